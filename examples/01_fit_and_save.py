"""Fit a mapper between two models and save it, step by step.

python examples/01_fit_and_save.py [DIRECTORY]
"""

import sys

from kvhub import ModelSpec, align, calibrate, check_pair, fit, select_layers
from kvhub.data import token_batches
from kvhub.models import load_model, load_tokenizer
from kvhub.recipe import load_recipe

directory = sys.argv[1] if len(sys.argv) > 1 else "demo-output/my-mapper"
recipe = load_recipe("tiny-middle-to-large")
source_id, target_id = recipe.locate_models()

# 1. Do the two fit together? Reads configs and tokenizers only; an empty list means yes.
mismatches = check_pair(ModelSpec.from_pretrained(source_id), ModelSpec.from_pretrained(target_id))
print("mismatches:", mismatches)

# 2. Both models read the same tokens once; only sums of products are kept.
source, target = load_model(source_id), load_model(target_id)
batches = list(token_batches(load_tokenizer(target_id), "stdlib", sequences=60, length=256))
statistics = calibrate(source, target, batches)
statistics.save(f"{directory}.statistics")  # any other fit of this pair starts from here

# 3. Choose source layers for each target layer, and solve. No model is needed any more.
selection = select_layers(statistics, top_k=2)
mapper = fit(statistics, selection, ridge_lambda=1e-3)
print("held-out R2:", mapper.config.quality["held_out_r2"])

# 4. Fit again, at the same size, to what the target reads from its cache, as far as that helps.
alignment = align(mapper, source, target, batches)
for tried in alignment.tried:
    print(f"{tried.key_steps} key steps, values {tried.value_share:.0%}: held-out KL", tried.kl)
mapper = alignment.best.mapper

mapper.save_pretrained(directory, overwrite=True)
print("saved in", directory)
