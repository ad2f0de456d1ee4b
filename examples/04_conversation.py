"""Two models take turns in one text: the small one writes most of it, the large one now and then.

python examples/04_conversation.py [MAPPER [MAPPER_BACK]]
"""

import difflib
import sys
from pathlib import Path

import torch

from kvhub import Conversation, KVMapper
from kvhub.models import load_model, load_tokenizer
from kvhub.recipe import locate_model

names = sys.argv[1:] or ["tiny-middle-to-large", "tiny-large-to-middle"]
there = KVMapper.from_pretrained(names[0])
mappers = {("small", "large"): there}
if len(names) > 1:  # without it the small one reads by itself what the large one has written
    mappers["large", "small"] = KVMapper.from_pretrained(names[1])
models = {
    "small": load_model(locate_model(there.config.source.model_id)),
    "large": load_model(locate_model(there.config.target.model_id)),
}
tokenizer = load_tokenizer(locate_model(there.config.target.model_id))
conversation = Conversation(models, mappers)


def encode(text: str) -> torch.Tensor:
    return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]


# A module of the standard library that neither model was trained on, a piece of it each turn.
source = Path(difflib.__file__).read_text(encoding="utf-8")
pieces = [source[start : start + 300] for start in range(6000, 7500, 300)]
prompt = encode(source[:1500])
for name, piece in zip(["small", "large", "small", "small", "large"], pieces, strict=True):
    prompt = torch.cat([prompt, encode(piece)], dim=1)
    reply = conversation.reply(name, prompt, max_new_tokens=16, do_sample=False)
    print(f"--- {name}: {tokenizer.decode(reply[0])!r}")
    prompt = conversation.input_ids  # the whole text so far, the reply included

print(f"\n{'model':7}{'prompt':>8}{'kept':>8}{'mapped':>8}{'computed':>10}{'seconds':>9}")
for turn in conversation.turns:
    kept = turn.kept_exact + turn.kept_own + turn.kept_mapped
    print(
        f"{turn.model:7}{turn.prompt_tokens:8}{kept:8}{turn.mapped:8}"
        f"{turn.computed:10}{turn.seconds:9.2f}"
    )
print("\nWhose states the large model's cache holds:")
for span in conversation.spans("large"):
    origin = f" from the {span.origin} one" if span.origin else ""
    print(f"tokens {span.start:4} to {span.stop:4}: {span.kind}{origin}")
