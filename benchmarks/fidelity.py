"""How near a mapped target comes to itself: the published method against kvhub's, on every pair.

python benchmarks/fidelity.py [--pairs NAME ...] [--real] [--json FILE]

For each pair one calibration, and from it:

    published        all heads, every token alike, layers by the in-sample probe
    not aligned      kvhub's, with layers by the held-out probe: all heads, and matched
    all, matched     the same, fitted to the attention output as far as its own held-out sequences
                     like it: what `kvhub fit` makes
    all, fewer       all heads of so few layers that it is of the size of `matched`, or less

scored on held-out text beside the source alone, with the tokens that the target computes itself:
none (as published), the sink (a hand-off's default), and a budget of 32. Intervals are 95 % over
sequences; the gap is of mean NLL, from the source's to the target's, and has no figure where the
source is not the worse model beyond noise. With --real also SmolLM2-135M and its pruned copy
(examples/smollm2/make_models.py), which takes about an hour each way on two cores. Methods that are
in the JSON file already are not made again.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kvhub import KVMapper, calibrate, console, evaluate, fit, select_layers
from kvhub.alignment import align
from kvhub.data import evaluation_stream, token_batches
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
Results = dict[str, list[dict[str, Any]]]  # by pair, a row per method and number of exact tokens
METHODS = {"source alone", "published", "matched", "all, fewer", "all"}
SUMMARY = (  # method and number of exact tokens
    ("source alone", None),
    ("published", 0),
    ("published", 32),
    ("all", 0),
    ("all", 4),
    ("all", 32),
    ("matched", 0),
    ("matched", 4),
    ("matched", 32),
    ("all, fewer", 0),
    ("all, fewer", 4),
    ("all, fewer", 32),
)
FIGURES = {
    "kl": "KL, nats",
    "agreement": "agreement",
    "gap": "gap recovered",
    "cosine": "attention-output cosine",
}


def mappers(
    source: Any, target: Any, batches: list[Any], known: set[str]
) -> Iterator[tuple[str, KVMapper]]:
    """Every way to make a mapper of this pair that is not known yet."""
    statistics = calibrate(source, target, batches)
    top_k = min(TOP_K, statistics.source.num_layers)
    fewer = max(1, top_k // statistics.source.kv_heads)
    if "published" not in known:
        selection = select_layers(statistics, top_k, scored_on="fitted")
        yield "published", fit(statistics, selection)
    for name, heads, layers in (
        ("matched", "matched", top_k),
        ("all, fewer", "all", fewer),
        ("all", "all", top_k),
    ):
        if name in known:
            continue
        sums = statistics if heads == "all" else statistics.matched()
        plain = fit(sums, select_layers(sums, layers), heads=heads)
        if f"{name}, not aligned" not in known:
            yield f"{name}, not aligned", plain
        found = align(plain, source, target, batches)
        for one in found.tried:
            how = f"{one.key_steps} key steps, values {one.value_share}"
            console.say(f"{name}, {how}: held-out KL {one.kl[0]:.4f}, {one.kl[1]:.4f}")
        yield name, found.best.mapper


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


def rows_of(paths: tuple[Path, Path, str], known: set[str]) -> Iterator[list[dict[str, Any]]]:
    """The figures of one pair, of one method after the other."""
    source, target, text, evaluated = read_pair(paths)
    for name, mapper in mappers(source, target, text(SEQUENCES), known):
        report = evaluate(
            mapper, source, target, evaluated, exact_prefix=0, exact_budgets=EXACT_TOKENS
        ).to_dict()
        if name == "published":
            alone = report["settings"]["source_alone"]
            figures = {part: alone[part] for part in ("kl", "agreement")}
            yield [{"method": "source alone", **figures}]
        yield [
            {
                "method": name,
                "parameters": mapper.num_parameters,
                "exact": point["budget"],
                "kl": point["kl"],
                "agreement": point["agreement"],
                "gap": point["gap_recovered"],
                "cosine": report["attention_output_cosine"] if point["budget"] == 0 else None,
            }
            for point in report["exact"]
        ]


def show(estimate: dict[str, float] | None) -> str:
    if estimate is None:
        return ""
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def summary(found: Results) -> str:
    """KL alone, a row for each pair."""
    heads = [method if exact is None else f"{method}, {exact}" for method, exact in SUMMARY]
    lines = ["| pair | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for pair, rows in found.items():
        kl = {(row["method"], row.get("exact")): row["kl"]["value"] for row in rows}
        cells = [f"{kl[column]:.3f}" for column in SUMMARY]
        lines.append(f"| `{pair}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def table(found: Results) -> str:
    """All figures, a row for each pair, method and number of exact tokens."""
    heads = ("pair", "method", "numbers", "exact", *FIGURES.values())
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for pair, rows in found.items():
        for row in rows:
            numbers = f"{row['parameters'] / 1e6:.2f} M" if "parameters" in row else ""
            figures = [show(row.get(figure)) for figure in FIGURES]
            cells = (f"`{pair}`", row["method"], numbers, str(row.get("exact", "")), *figures)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pairs = {**PAIRS, **REAL_PAIRS}
    parser.add_argument("--pairs", nargs="+", choices=pairs, help="instead of the embedded ones")
    parser.add_argument("--real", action="store_true", help="SmolLM2 as well")
    parser.add_argument("--json", type=Path, help="read and write the results there")
    arguments = parser.parse_args()
    found: Results = {}
    if arguments.json is not None and arguments.json.is_file():
        found = json.loads(arguments.json.read_text(encoding="utf-8"))
    for pair in arguments.pairs or [*PAIRS, *(REAL_PAIRS if arguments.real else ())]:
        rows = found.setdefault(pair, [])
        known = {row["method"] for row in rows}
        if known >= METHODS:
            continue
        console.say(f"{pair} ...")
        torch.manual_seed(0)
        for more in rows_of(pairs[pair], known):
            rows += more
            if arguments.json is not None:
                text = json.dumps(found, indent=1) + "\n"
                arguments.json.write_text(text, encoding="utf-8")
    print(summary(found), table(found), sep="\n")


if __name__ == "__main__":
    main()
