"""Whether networks pay beside a linear map: a table of cosine, KL, agreement and size.

python benchmarks/repair.py [MAPPER] [--size-budget B ...] [--hidden N] [--json FILE]

MAPPER is a local mapper, or a recipe that is fitted first. Each budget makes one repaired mapper;
all are then evaluated on the same text, which neither the fit nor the training saw.
"""

import argparse
import json
from pathlib import Path

from kvhub import KVMapper, console
from kvhub.fitting import FitPlan, fit_mapper
from kvhub.pipeline import evaluate_mapper
from kvhub.recipe import load_recipe
from kvhub.repairing import RepairPlan, repair_mapper
from kvhub.store import find_local

EXACT_PREFIX = 4


def fitted(name: str) -> None:
    """Fit the recipe of this name, if there is no mapper of it."""
    if find_local(name) is not None:
        return
    recipe = load_recipe(name)
    recipe.locate_models()
    plan = FitPlan(
        name,
        recipe.source,
        recipe.target,
        top_k=recipe.top_k,
        heads=recipe.heads,
        data=recipe.data,
        sequences=recipe.sequences,
        length=recipe.length,
    )
    fit_mapper(plan, console.track, console.say)


def figures(name: str, sequences: int) -> dict[str, float | str]:
    """What `kvhub evaluate` says of a mapper, and its size."""
    report, path = evaluate_mapper(
        name,
        console.track,
        data=None,
        sequences=sequences,
        length=None,
        exact_prefix=EXACT_PREFIX,
        dtype="auto",
        device=None,
    )
    mapped = report.settings["mapped"]
    mapper = KVMapper.from_pretrained(path)
    repair = mapper.config.repair
    return {
        "mapper": name,
        "networks": 0 if repair is None else len(repair.keys) + len(repair.values),
        "size_bytes": mapper.size_bytes,
        "attention_output_cosine": report.attention_output_cosine.value,
        "kl": mapped.kl.value,
        "kl_low": mapped.kl.low,
        "kl_high": mapped.kl.high,
        "agreement": mapped.agreement.value,
        "nll": mapped.nll.value,
        "key_r2": report.key_r2,
        "value_r2": report.value_r2,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mapper", nargs="?", default="tiny-small-to-large")
    parser.add_argument("--size-budget", type=float, nargs="+", default=[0.5, 2.0])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--train", type=int, help="sequences; default: as many as the fit")
    parser.add_argument("--sequences", type=int, default=32, help="of the evaluation")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    fitted(options.mapper)
    rows = [figures(options.mapper, options.sequences)]
    for budget in options.size_budget:
        name = f"{options.mapper}-repaired-{budget:g}"
        plan = RepairPlan(
            options.mapper,
            name=name,
            sequences=options.train,
            size_budget=budget,
            hidden=options.hidden,
            overwrite=True,
        )
        if repair_mapper(plan, console.track, console.say).name is not None:
            rows.append(figures(name, options.sequences))
    columns = ("networks ", "MB ", "cosine ", "KL, nats ", "agreement ", "R2 keys ", "values ")
    console.table(
        f"{options.sequences} sequences, first {EXACT_PREFIX} tokens exact; KL with its 95 % "
        "interval",
        ("mapper", *columns),
        [
            (
                row["mapper"],
                row["networks"],
                f"{row['size_bytes'] / 1e6:.2f}",
                f"{row['attention_output_cosine']:.4f}",
                f"{row['kl']:.4f} [{row['kl_low']:.4f}, {row['kl_high']:.4f}]",
                f"{100 * row['agreement']:.1f} %",
                f"{row['key_r2']:.3f}",
                f"{row['value_r2']:.3f}",
            )
            for row in rows
        ],
    )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
