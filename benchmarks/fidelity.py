"""How near a mapped target comes to itself: the published method against kvhub's, on every pair.

python benchmarks/fidelity.py [--pairs NAME ...] [--real] [--json FILE]

For each pair one calibration, and from it:

    published        all heads, every token alike, layers by the in-sample probe
    not aligned      kvhub's, with layers by the held-out probe: all heads, and matched
    all, matched     the same, fitted to the attention output as far as its own held-out sequences
                     like it: what `kvhub fit` makes

scored on held-out text beside the source alone, with the tokens that the target computes itself:
none (as published), the sink (a hand-off's default), and a budget of 32. Intervals are 95 % over
sequences; the gap is of mean NLL, from the source's to the target's. With --real also SmolLM2-135M
and its pruned copy (examples/smollm2/make_models.py), which takes most of an hour on two cores.
Pairs that are in the JSON file already are not made again.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kvhub import KVMapper, calibrate, console, evaluate, fit, select_layers
from kvhub.alignment import align
from kvhub.alignment_choice import choose_alignment
from kvhub.data import evaluation_stream, token_batches
from kvhub.fitting import held_out_batches
from kvhub.models import load_model, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
TINY, REAL = ROOT / "examples/tiny_family", ROOT / "examples/smollm2/models"
SIZES = ("small", "middle", "large")
PAIRS = {
    f"tiny-{source}-to-{target}": (TINY / source, TINY / target, "stdlib")
    for source in SIZES
    for target in SIZES
    if source != target
}
REAL_PAIRS = {
    "smollm2-26-to-30": (REAL / "source", REAL / "target", "english"),
    "smollm2-30-to-26": (REAL / "target", REAL / "source", "english"),
}
SEQUENCES, LENGTH, EVALUATED = 128, 256, 32
TOP_K = 8  # or all of a source with fewer layers
EXACT_TOKENS = (0, 4, 32)
Text = Callable[..., list[Any]]
COLUMNS = (  # of the tables; the JSON file has every method with every number of exact tokens
    ("source alone", None),
    ("published", 0),
    ("published", 32),
    ("all, not aligned", 4),
    ("all", 0),
    ("all", 4),
    ("all", 32),
    ("matched, not aligned", 4),
    ("matched", 0),
    ("matched", 4),
    ("matched", 32),
)


def mappers(source: Any, target: Any, batches: list[Any]) -> Iterator[tuple[str, KVMapper]]:
    """Every way to make a mapper of this pair."""
    statistics = calibrate(source, target, batches)
    top_k = min(TOP_K, statistics.source.num_layers)
    yield "published", fit(statistics, select_layers(statistics, top_k, scored_on="fitted"))
    for heads, sums in (("all", statistics), ("matched", statistics.matched())):
        plain = fit(sums, select_layers(sums, top_k), heads=heads)
        yield f"{heads}, not aligned", plain
        aligned = align(plain, source, target, batches)
        best, tried = choose_alignment(plain, aligned, source, target, held_out_batches(batches))
        for one in tried:
            console.say(f"{heads}, values aligned {one.value_share}: held-out KL {one.kl}")
        yield heads, best.mapper


def read_pair(paths: tuple[Path, Path, str]) -> tuple[Any, Any, Text, list[Any]]:
    """Source, target, a reader of the calibration text by its sequences, and the text to score."""
    source, target = (load_model(str(path), dtype="float32", device="cpu") for path in paths[:2])
    tokenizer, data = load_tokenizer(str(paths[1])), paths[2]

    def text(sequences: int, name: str = data, start: int = 0) -> list[Any]:
        options = {"length": LENGTH, "batch_size": 4, "start": start}
        return list(token_batches(tokenizer, name, sequences=sequences, **options))

    record = {"data": data, "sequences": SEQUENCES, "length": LENGTH}
    held_out, start, _ = evaluation_stream(record)
    return source, target, text, text(EVALUATED, held_out, start)


def rows_of(paths: tuple[Path, Path, str]) -> Iterator[dict[str, Any]]:
    """The figures of one pair, a row per method."""
    source, target, text, evaluated = read_pair(paths)
    for name, mapper in mappers(source, target, text(SEQUENCES)):
        report = evaluate(
            mapper, source, target, evaluated, exact_prefix=0, exact_budgets=EXACT_TOKENS
        ).to_dict()
        alone, target_alone = (
            report["settings"][part] for part in ("source_alone", "target_alone")
        )
        gap = alone["nll"]["value"] - target_alone["nll"]["value"]
        if name == "published":
            yield {"method": "source alone", **{part: alone[part] for part in ("kl", "agreement")}}
        for point in report["exact"]:
            yield {
                "method": name,
                "parameters": mapper.num_parameters,
                "exact": point["budget"],
                "kl": point["kl"],
                "agreement": point["agreement"],
                "gap": (alone["nll"]["value"] - point["nll"]["value"]) / gap if gap > 0 else None,
                "cosine": report["attention_output_cosine"],
            }


def show(estimate: dict[str, float] | float | None) -> str:
    if estimate is None:
        return ""
    if isinstance(estimate, float):
        return f"{estimate:.2f}"
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = {**PAIRS, **REAL_PAIRS}
    parser.add_argument("--pairs", nargs="+", choices=known, help="instead of the embedded ones")
    parser.add_argument("--real", action="store_true", help="SmolLM2 as well")
    parser.add_argument("--json", type=Path, help="read and write the results there")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.is_file():
        found = json.loads(arguments.json.read_text(encoding="utf-8"))
    for pair in arguments.pairs or [*PAIRS, *(REAL_PAIRS if arguments.real else ())]:
        if pair not in found:
            console.say(f"{pair} ...")
            torch.manual_seed(0)
            found[pair] = list(rows_of(known[pair]))
            if arguments.json is not None:
                text = json.dumps(found, indent=1) + "\n"
                arguments.json.write_text(text, encoding="utf-8")
    for figure in ("kl", "agreement", "gap", "cosine"):
        print(f"\n{figure}\n\n| pair | " + " | ".join(map(title, COLUMNS)) + " |")
        print("|---" * (1 + len(COLUMNS)) + "|")
        for pair, rows in found.items():
            by_column = {(row["method"], row.get("exact")): row.get(figure) for row in rows}
            cells = [show(by_column[column]) for column in COLUMNS]
            print(f"| {pair} | " + " | ".join(cells) + " |")


def title(column: tuple[str, int | None]) -> str:
    method, exact = column
    return method if exact is None else f"{method}, {exact} exact"


if __name__ == "__main__":
    main()
