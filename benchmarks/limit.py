"""What limits a linear map: train its weights on the KL itself and see how far that goes.

python benchmarks/limit.py [--pairs NAME ...] [--sequences 1000] [--epochs 4]

No closed form: the weights of an aligned mapper of `benchmarks/fidelity.py` are trained by gradient
descent (Adam) through the target, so that its predictions on a mapped prefix with an exact sink are
its own. Of the same size, with much more text and with the very aim that the tables measure, so
what is left after it is what no linear map of these layers is likely to take away. Every tenth
sequence is held out and says when to stop; the figures are of the same text as that benchmark's.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from fidelity import LENGTH, PAIRS, SEQUENCES, TOP_K, read_pair
from torch import Tensor
from transformers import DynamicCache

from kvhub import KVMapper, align, calibrate, console, evaluate, fit, select_layers
from kvhub.alignment_rows import map_layer
from kvhub.cache import cache_of, prefill, read_cache
from kvhub.calibration import content_states
from kvhub.data import TokenBatch
from kvhub.exact import EXACT_PREFIX

PREFIX = LENGTH * 3 // 4
BATCH, RATE = 8, 3e-4


class Trainer:
    """The loss of a batch as a function of the mapper's tensors."""

    def __init__(self, mapper: KVMapper, source: Any, target: Any) -> None:
        self.config, self.source, self.target = mapper.config, source, target

    def loss(self, tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
        """Mean KL over the tokens behind the prefix."""
        batch, config = len(ids), self.config
        spec = config.target
        whole = prefill(self.target, ids[:, :-1])
        own_keys, own_values = read_cache(cache_of(whole), spec)
        prefix = TokenBatch(ids[:, :PREFIX], torch.ones_like(ids[:, :PREFIX]), tuple(range(batch)))
        states = content_states(self.source, prefix, config.source)
        cache = DynamicCache()
        for layer, chosen in enumerate(config.selection):
            parts = []
            for kind, own in (("keys", own_keys), ("values", own_values)):
                weight, bias = (
                    tensors[f"{kind[:-1]}_{part}"][layer] for part in ("weight", "bias")
                )
                rope = spec.require_rope() if kind == "keys" else None
                size = (config.heads, batch, spec.head_dim, rope)
                mapped = map_layer(states[kind][list(chosen)], weight, bias, *size)
                sink = own[layer][:, :, :EXACT_PREFIX]
                parts.append(torch.cat([sink, mapped[:, :, EXACT_PREFIX:]], dim=2))
            cache.update(*parts, layer)
        logits = self.target(ids[:, PREFIX:-1], past_key_values=cache).logits
        reference = whole.logits[:, PREFIX:].log_softmax(-1)
        return (reference.exp() * (reference - logits.log_softmax(-1))).sum(-1).mean()


def train(mapper: KVMapper, source: Any, target: Any, ids: Tensor, epochs: int) -> KVMapper:
    """The trained mapper that is best on the held-out tenth."""
    trainer = Trainer(mapper, source, target)
    held_out = torch.arange(len(ids)) % 10 == 9
    for model in (source, target):
        model.requires_grad_(False)
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in mapper.tensors().items()}
    optimizer = torch.optim.Adam(tensors.values(), lr=RATE)
    steps = epochs * -(-int((~held_out).sum()) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def held_out_loss() -> float:
        with torch.no_grad():
            parts = [trainer.loss(tensors, part) for part in ids[held_out].split(BATCH)]
        return float(torch.stack(parts).mean())

    best, kept = held_out_loss(), mapper
    for epoch in range(epochs):
        for part in ids[~held_out][torch.randperm(int((~held_out).sum()))].split(BATCH):
            optimizer.zero_grad()
            trainer.loss(tensors, part).backward()
            optimizer.step()
            schedule.step()
        now = held_out_loss()
        console.say(f"epoch {epoch + 1}: held-out KL {now:.4f}, best before {best:.4f}")
        if now < best:
            detached = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            best, kept = now, KVMapper(mapper.config, detached)
    return kept


def rows_of(paths: Any, sequences: int, epochs: int) -> Iterator[tuple[str, float]]:
    source, target, text, evaluated = read_pair(paths)
    batches = text(SEQUENCES)

    def kl(mapper: KVMapper) -> float:
        return evaluate(mapper, source, target, evaluated).settings["mapped"].kl.value

    statistics = calibrate(source, target, batches)
    top_k = min(TOP_K, statistics.source.num_layers)
    plain = fit(statistics, select_layers(statistics, top_k))
    yield "plain fit", kl(plain)
    aligned = align(plain, source, target, batches).best.mapper
    yield "aligned", kl(aligned)
    ids = torch.cat([batch.input_ids for batch in text(sequences)])
    yield f"trained on {sequences}", kl(train(aligned, source, target, ids, epochs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=["tiny-small-to-large"])
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    for pair in arguments.pairs:
        torch.manual_seed(0)
        for name, value in rows_of(PAIRS[pair], arguments.sequences, arguments.epochs):
            print(f"{pair}: {name}: KL {value:.3f}", flush=True)


if __name__ == "__main__":
    main()
