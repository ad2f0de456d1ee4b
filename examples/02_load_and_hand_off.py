"""Switch models in the middle of a text: the small one reads and writes, the large one goes on.

python examples/02_load_and_hand_off.py [MAPPER]
"""

import sys
import textwrap
import time
from pathlib import Path

from kvhub import KVMapper, handoff
from kvhub.cache import cache_argument
from kvhub.models import load_model, load_tokenizer
from kvhub.recipe import locate_model

mapper = KVMapper.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "tiny-middle-to-large")
source = load_model(locate_model(mapper.config.source.model_id))
target = load_model(locate_model(mapper.config.target.model_id))
tokenizer = load_tokenizer(locate_model(mapper.config.target.model_id))

# A module of the standard library that neither model was trained on.
prompt = Path(textwrap.__file__).read_text(encoding="utf-8")[:1000]
ids = tokenizer(prompt, return_tensors="pt")["input_ids"]

# The source reads the prompt and writes a little; its cache comes back with the text.
written = source.generate(
    ids, max_new_tokens=16, do_sample=False, return_dict_in_generate=True, use_cache=True
)
source_cache = getattr(written, cache_argument(source))
ids = written.sequences
print(
    f"prompt of {ids.shape[1]} tokens, of which the source cached {source_cache.get_seq_length()}"
)
print("...", tokenizer.decode(ids[0, -40:]), sep="")

# The target takes over with the source's cache, mapped; it reads five tokens itself.
started = time.perf_counter()
output = handoff(
    mapper, source, target, ids, source_cache=source_cache, max_new_tokens=32, do_sample=False
)
print(f"\n--- mapped hand-off, {time.perf_counter() - started:.2f} s")
print(tokenizer.decode(output[0, ids.shape[1] :]))

started = time.perf_counter()
output = target.generate(ids, max_new_tokens=32, do_sample=False)
print(f"\n--- the target after reading everything again, {time.perf_counter() - started:.2f} s")
print(tokenizer.decode(output[0, ids.shape[1] :]))
