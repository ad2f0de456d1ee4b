"""Where the KL of a mapper lies: each held-out sequence by itself.

python benchmarks/by_sequence.py MAPPER [--pair NAME] [--familiar NATS]

MAPPER is the name or the folder of a mapper of a pair of `benchmarks/fidelity.py`; the sequences
are that benchmark's, handed off with an exact sink. The last rows compare those that the target
finds easy, with a mean NLL below --familiar, with all others: such text repeats what stands before
it, so the target reads the answer from its cache.
"""

import argparse
from typing import Any

import torch
from fidelity import PAIRS, REAL_PAIRS, read_pair

from kvhub import KVMapper, evaluate
from kvhub.models import load_tokenizer
from kvhub.store import find_mapper


def figures(mapper: KVMapper, models: tuple[Any, Any], ids: torch.Tensor) -> tuple[float, ...]:
    """KL mapped and of the source alone, and the target's NLL, of one sequence."""
    settings = evaluate(mapper, *models, [ids[None]]).settings
    kl = (settings[name].kl.value for name in ("mapped", "source_alone"))
    return (*kl, settings["target_alone"].nll.value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = {**PAIRS, **REAL_PAIRS}
    parser.add_argument("mapper", help="name or folder")
    parser.add_argument("--pair", choices=known, default="smollm2-26-to-30")
    parser.add_argument("--familiar", type=float, default=1.2, help="nats")
    arguments = parser.parse_args()
    source, target, _, evaluated = read_pair(known[arguments.pair])
    tokenizer = load_tokenizer(str(known[arguments.pair][1]))
    mapper = KVMapper.from_pretrained(find_mapper(arguments.mapper))
    sequences = [ids for batch in evaluated for ids in batch.input_ids]
    rows = [figures(mapper, (source, target), ids) for ids in sequences]
    print("| KL mapped | KL source alone | NLL target alone | predicted text |\n|---|---|---|---|")
    order = sorted(range(len(rows)), key=lambda index: -rows[index][0])
    for index in order:
        ids = sequences[index]
        text = tokenizer.decode(ids[len(ids) * 3 // 4 :])[:60].replace("|", " ")
        print("| " + " | ".join(f"{value:.3f}" for value in rows[index]) + f" | {text!r} |")
    table = torch.tensor(rows, dtype=torch.float64)
    familiar = table[:, 2] < arguments.familiar
    for name, which in (("familiar", familiar), ("others", ~familiar)):
        part = table[which]
        share = float(part[:, 0].sum() / table[:, 0].sum())
        kl = ", ".join(f"{value:.3f}" for value in part[:, :2].mean(0).tolist())
        print(f"{name}: {len(part)} of {len(rows)}, mean KL mapped and source alone {kl}")
        print(f"  that is {share:.0%} of all KL; median of KL mapped {part[:, 0].median():.3f}")


if __name__ == "__main__":
    main()
