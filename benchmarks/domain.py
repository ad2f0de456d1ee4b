"""Fitted on one kind of text and used on another: what is lost, and what a refit brings back.

    python benchmarks/domain.py tiny-middle-to-large
    python benchmarks/domain.py smollm2 --json domain.json

A is the kind of text that the recipe calibrates on, B the other one of `stdlib` (Python) and
`english` (prose). Each mapper is evaluated on text of both kinds that none of them has seen:

    A, B             fitted on one kind
    A + B            fitted on the sums of both statistics
    own B            fitted on a user's few sequences of B alone
    A, weights       A refitted on those few, its weights as the prior
    A, statistics    A refitted on those few, its statistics as the prior

docs/domain.md says what was expected, what was found, and how to read it.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from kvhub import KVMapper, Statistics, calibrate, evaluate, fit, refit, select_layers
from kvhub.data import TokenBatch, token_batches
from kvhub.gate import check_gate
from kvhub.pairs import LoadedPair, load_pair, read_spec
from kvhub.recipe import Recipe, load_recipe
from kvhub.refitting import HELD_OUT_EVERY, held_out_part, try_strengths

OTHER = {"stdlib": "english", "english": "stdlib"}
STARTED = time.monotonic()


def say(message: str) -> None:
    print(f"{time.monotonic() - STARTED:5.0f} s  {message}", file=sys.stderr, flush=True)


def batches(pair: LoadedPair, options: argparse.Namespace, data: str, sequences: int, start=0):
    return token_batches(
        pair.tokenizer, data, sequences=sequences, length=options.length, start=start
    )


def measured(
    pair: LoadedPair, recipe: Recipe, tokens, held_out_every: int, about: dict
) -> Statistics:
    specs = {"source_spec": read_spec(recipe.source), "target_spec": read_spec(recipe.target)}
    return calibrate(
        pair.source,
        pair.target,
        tokens,
        heads=recipe.heads,
        held_out_every=held_out_every,
        provenance=about,
        **specs,
    )


def fitted(recipe: Recipe, statistics: Statistics) -> KVMapper:
    selection = select_layers(statistics, recipe.top_k)
    return fit(
        statistics,
        selection,
        heads=recipe.heads,
        ridge_lambda=recipe.ridge_lambda,
        lambda_scale=recipe.lambda_scale,
    )


def mappers(
    pair: LoadedPair, recipe: Recipe, options: argparse.Namespace, found: dict
) -> dict[str, KVMapper]:
    a, b = recipe.data, OTHER[recipe.data]
    say(f"calibrate on {options.sequences} sequences of {a}")
    first = measured(pair, recipe, batches(pair, options, a, options.sequences), 10, {"data": a})
    say(f"calibrate on {options.own} own and {options.sequences - options.own} more of {b}")
    text = list(batches(pair, options, b, options.own))
    own = measured(pair, recipe, text, HELD_OUT_EVERY, {"data": b})
    more = batches(pair, options, b, options.sequences - options.own, options.own)
    second = own + measured(pair, recipe, more, HELD_OUT_EVERY, {"data": b})
    found["tokens"] = {"A": first.tokens, "B": second.tokens, "own B": own.tokens}

    say("fit")
    both = first + second
    result = {
        "A": fitted(recipe, first),
        "B": fitted(recipe, second),
        "A + B": fitted(recipe, both),
    }
    del both, second
    result["own B"] = refit(result["A"], own, strength=0)
    held_out: list[TokenBatch] = list(held_out_part(text, HELD_OUT_EVERY))
    for method, original in (("weights", None), ("statistics", first)):
        say(f"refit on own B from {method}")
        refits, tried = try_strengths(result["A"], pair, own, held_out, None, original)
        found.setdefault("strengths", {})[method] = [asdict(one) for one in tried]
        best = min(range(len(tried)), key=lambda index: tried[index].kl)
        result[f"A, {method}"] = refits[best]
    return result


def cell(report) -> dict:
    mapped, source = (report.settings[name] for name in ("mapped", "source_alone"))
    return {
        "kl": asdict(mapped.kl),
        "agreement": asdict(mapped.agreement),
        "source_kl": source.kl.value,
        "key_r2": report.key_r2,
        "key_layers_below_0": sum(r2 < 0 for r2 in report.layers.key_r2),
        "value_r2": report.value_r2,
        "attention_output_cosine": report.attention_output_cosine.value,
        "gate_failed": [one.name for one in check_gate(report).failures],
    }


def show(found: dict) -> None:
    print(f"\n{found['pair']}: A is {found['A']}, B is {found['B']}; {found['tokens']} tokens\n")
    columns = ("mapper", "used on", "KL to target", "agreement", "R2 keys", "layers < 0", "gate")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, cells in found["mappers"].items():
        for kind, one in cells.items():
            kl, agreement = (
                f"{one[key]['value']:.3f} [{one[key]['low']:.3f}, {one[key]['high']:.3f}]"
                for key in ("kl", "agreement")
            )
            gate = ", ".join(one["gate_failed"]) or "passed"
            r2 = f"{one['key_r2']:.3f} | {one['key_layers_below_0']}"
            print(f"| {name} | {kind} | {kl} | {agreement} | {r2} | {gate} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", help="A recipe that calibrates on stdlib or english.")
    parser.add_argument("--sequences", type=int, default=64, help="To fit A, and to fit B.")
    parser.add_argument("--own", type=int, default=16, help="The user's own, the first of B's.")
    parser.add_argument("--evaluate", type=int, default=16, help="Of each kind.")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--heads", choices=("all", "matched"), help="Default: the recipe's.")
    parser.add_argument("--json", type=Path, help="Also write the figures here.")
    options = parser.parse_args()
    recipe = load_recipe(options.pair)
    if options.heads:
        recipe = Recipe(**{**vars(recipe), "heads": options.heads})
    pair = load_pair(read_spec(recipe.source), read_spec(recipe.target), "float32", "cpu")
    kinds = {"A": recipe.data, "B": OTHER[recipe.data]}
    found: dict = {"pair": options.pair, "heads": recipe.heads, **kinds, "mappers": {}}
    found |= {name: getattr(options, name) for name in ("sequences", "own", "evaluate", "length")}
    made = mappers(pair, recipe, options, found)
    unseen = {}
    for kind, data in kinds.items():
        # None of the modules held out of `stdlib` is in its calibration; of prose the later part.
        where = ("stdlib-held-out", 0) if data == "stdlib" else (data, options.sequences)
        unseen[kind] = list(batches(pair, options, where[0], options.evaluate, where[1]))
    for name, mapper in made.items():
        for kind, tokens in unseen.items():
            say(f"evaluate {name} on {kind}")
            report = evaluate(mapper, pair.source, pair.target, tokens)
            found["mappers"].setdefault(name, {})[kind] = cell(report)
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    show(found)


if __name__ == "__main__":
    main()
