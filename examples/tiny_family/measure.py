"""Held-out negative log-likelihood of the embedded models, in nats per token.

python examples/tiny_family/measure.py
"""

from pathlib import Path

import torch
from torch.nn import functional

from kvhub.data import token_batches
from kvhub.models import load_model, load_tokenizer

HERE = Path(__file__).parent
SEQUENCES = 64
LENGTH = 512


@torch.no_grad()
def nll(name: str) -> float:
    """Mean over all predicted tokens of the held-out modules of the standard library."""
    model, tokenizer = load_model(str(HERE / name)), load_tokenizer(str(HERE / name))
    total, tokens = 0.0, 0
    for batch in token_batches(tokenizer, "stdlib-held-out", sequences=SEQUENCES, length=LENGTH):
        logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
        labels = batch.input_ids[:, 1:].masked_fill(batch.attention_mask[:, 1:] == 0, -100)
        total += functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        ).item()
        tokens += int((labels != -100).sum())
    return total / tokens


if __name__ == "__main__":
    for name in ("large", "middle", "small"):
        if (HERE / name / "config.json").is_file():
            print(f"{name:8} {nll(name):.3f}", flush=True)
