"""What each part of the alignment is worth, and what a step more or less does.

python benchmarks/alignment.py [--pair NAME] [--heads all|matched] [--json FILE]

One calibration of a pair of `benchmarks/fidelity.py`, and from it

    plain                 the ridge regression, every token alike
    weighted              the same with each token weighted by what an error in it alone does to
                          the attention output: `kvhub fit --weighting attention --no-align`
    keys, n steps         of the descent of `kvhub.key_fit`, with the plain values
    values, half and all  of the way to those of `kvhub.value_fit`, with the keys of `kvhub fit`
    no token exact        the same fits, which take the first tokens like any others

scored as hand-offs of held-out text with nothing exact, with an exact sink, and with 32 tokens that
`kvhub.exact` chooses. `kvhub fit` takes up to `kvhub.key_fit.STEPS` steps, and values as far as
held-out text likes them.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from fidelity import EXACT_TOKENS, PAIRS, REAL_PAIRS, SEQUENCES, TOP_K, read_pair

from kvhub import KVMapper, calibrate, evaluate, fit, select_layers
from kvhub.alignment import part_way
from kvhub.alignment_passes import align_keys, align_values
from kvhub.data import TokenBatch
from kvhub.key_fit import STEPS

MOST_STEPS = STEPS + 1


def variants(
    models: tuple, batches: list[TokenBatch], heads: str
) -> Iterator[tuple[str, KVMapper]]:
    """Every way to fit the same shape."""
    statistics = calibrate(*models, batches)
    selection = select_layers(statistics, min(TOP_K, statistics.source.num_layers))
    plain = fit(statistics, selection, heads=heads)
    del statistics
    yield "plain", plain
    for steps, mapper in enumerate(align_keys(plain, *models, batches, steps=MOST_STEPS), start=1):
        yield f"keys, {steps} steps", mapper
        if steps == STEPS:
            aligned = align_values(mapper, *models, batches)
            yield f"keys, {steps} steps, values half", part_way(mapper, aligned, 0.5)
            yield f"keys, {steps} steps, values all", aligned
    *_, mapper = align_keys(plain, *models, batches, exact_prefix=0)
    yield f"keys, {STEPS} steps, no token exact", mapper
    aligned = align_values(mapper, *models, batches, exact_prefix=0)
    yield f"keys, {STEPS} steps, values all, no token exact", aligned
    weighted = calibrate(*models, batches, weighting="attention")
    yield "weighted", fit(weighted, selection, heads=heads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = {**PAIRS, **REAL_PAIRS}
    parser.add_argument("--pair", choices=known, default="smollm2-26-to-30")
    parser.add_argument("--heads", choices=("all", "matched"), default="matched")
    parser.add_argument("--json", type=Path, help="write the results there too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    *models, text, evaluated = read_pair(known[arguments.pair])
    rows = {}
    print("| | nothing exact | sink | 32 tokens |\n|---|---|---|---|")
    for name, mapper in variants(tuple(models), text(SEQUENCES), arguments.heads):
        report = evaluate(mapper, *models, evaluated, exact_prefix=0, exact_budgets=EXACT_TOKENS)
        rows[name] = [point.kl.value for point in report.exact]
        print(f"| {name} | " + " | ".join(f"{kl:.3f}" for kl in rows[name]) + " |", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
