"""How well gate and probe foretell the damage of a hand-off: a table and docs/gate.png.

python benchmarks/gate.py [--pairs NAME ...] [--json FILE]

Good and bad mappers of each pair meet text that they know, text of another kind, and text that
repeats its own beginning. The gate judges a mapper on some sequences, and other sequences show what
its hand-offs do: the first 193 tokens are the prompt, the next 63 are scored.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvhub import KVMapper, calibrate, console, evaluate, fit, select_layers
from kvhub.cache import cache_of, crop_cache, prefill, read_cache
from kvhub.data import token_batches
from kvhub.gate import Gate, GateResult, check_gate
from kvhub.generation import prefill_mapped
from kvhub.metrics import score_predictions
from kvhub.pairs import LoadedPair, load_pair, read_spec
from kvhub.policy import MAX_EXCESS, PROBE_TOKENS, nll_excess
from kvhub.recipe import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]
PAIRS = ("tiny-small-to-large", "tiny-middle-to-large")
LENGTH, PROMPT = 256, 193
JUDGED, HANDED = 12, 16  # sequences for the gate, and for hand-offs
SPANS = (16, PROBE_TOKENS)  # of the probes that are compared
COLORS = ("#0072B2", "#D55E00", "#009E73")  # Okabe and Ito's


@dataclass(frozen=True)
class Prompt:
    """One hand-off: what the probes found in its prompt, and what came of it.

    Attributes
    ----------
    excess
        By number of probed tokens: NLL of mapped less that of source-alone on the prompt's end.
    key_error, value_error
        Likewise: relative error between what the target computes there and what is mapped.
    over_source
        NLL of the continuation, mapped less source-alone; above 0 the hand-off did harm.
    over_target
        The same less target-alone.
    kl, source_kl
        Of the continuation, from target-alone.
    """

    excess: dict[int, float]
    key_error: dict[int, float]
    value_error: dict[int, float]
    over_source: float
    over_target: float
    kl: float
    source_kl: float


@dataclass(frozen=True)
class Case:
    """A mapper on a kind of text."""

    pair: str
    mapper: str
    text: str
    gate: GateResult
    cosine: float
    key_r2: float
    prompts: list[Prompt]

    def mean(self, name: str) -> float:
        return sum(getattr(prompt, name) for prompt in self.prompts) / len(self.prompts)


def mappers_of(recipe: Recipe, pair: LoadedPair) -> Iterator[tuple[str, KVMapper]]:
    """The recipe's, a smaller one, and two that are too small or too stiff."""
    batches = token_batches(
        pair.tokenizer, recipe.data, sequences=recipe.sequences, length=recipe.length
    )
    statistics = calibrate(pair.source, pair.target, batches)
    layers = pair.source.config.num_hidden_layers
    for name, top_k, heads, penalty in (
        ("recipe", recipe.top_k, "all", recipe.ridge_lambda),
        ("matched heads", recipe.top_k, "matched", recipe.ridge_lambda),
        ("one layer", 1, "matched", recipe.ridge_lambda),
        ("penalty of 1", recipe.top_k, "all", 1.0),
    ):
        chosen = statistics.matched() if heads == "matched" else statistics
        selection = select_layers(chosen, min(top_k, layers))
        yield name, fit(chosen, selection, heads=heads, ridge_lambda=penalty)


def texts_of(recipe: Recipe, pair: LoadedPair, other: str) -> dict[str, Tensor]:
    """`[sequences, length]` each: known, of another kind, and repeating its beginning."""
    held_out = "stdlib-held-out" if recipe.data == "stdlib" else recipe.data
    start = recipe.sequences if held_out == recipe.data else 0
    known = whole_sequences(pair, held_out, start)
    strange = whole_sequences(pair, other, 0)
    # The prompt ends inside a copy of its first 64 tokens, and the continuation goes on with it.
    copies = torch.cat([known[:, :160], known[:, : LENGTH - 160]], dim=1)
    return {"known": known, "other kind": strange, "repeating": copies}


def whole_sequences(pair: LoadedPair, data: str, start: int) -> Tensor:
    wanted = JUDGED + HANDED
    found: list[Tensor] = []
    batches = token_batches(
        pair.tokenizer, data, sequences=4 * wanted, length=LENGTH, start=start, batch_size=1
    )
    for batch in batches:
        if batch.input_ids.shape[1] == LENGTH:
            found.append(batch.input_ids)
        if len(found) == wanted:
            break
    return torch.cat(found)


@torch.no_grad()
def hand_over(mapper: KVMapper, pair: LoadedPair, ids: Tensor) -> Prompt:
    """Probe and hand over the prompt `[1, PROMPT]` of a sequence, and score what follows."""
    prompt, mask = ids[:, :PROMPT], torch.ones(1, PROMPT, dtype=torch.long)
    source = prefill(pair.source, ids[:, :-1])
    reference = prefill(pair.target, ids[:, :-1]).logits[:, PROMPT - 1 :]
    source_cache = crop_cache(cache_of(source), 0, PROMPT - 1)
    whole = prefill_mapped(mapper, pair.source, pair.target, prompt, source_cache=source_cache)
    excess: dict[int, float] = {}
    errors: dict[str, dict[int, float]] = {"keys": {}, "values": {}}
    for span in SPANS:
        # A token is mapped by itself, so a shorter mapped cache is the beginning of a longer one.
        cache = crop_cache(whole, 0, PROMPT - 1 - span)
        found = nll_excess(pair.source, pair.target, source_cache, cache, prompt, mask)
        excess[span] = float(found)
        for kind, own, mapped in zip(errors, read_cache(cache), read_cache(whole), strict=True):
            errors[kind][span] = relative_error(own, mapped, span)
        if span == PROBE_TOKENS:
            handed = cache  # as a hand-off with this probe goes on
    labels, later = ids[:, PROMPT:], ids[:, PROMPT - 1 : -1]
    scored = {
        name: score_predictions(logits, reference, labels)[0] / labels.shape[1]
        for name, logits in (
            ("target", reference),
            ("source", source.logits[:, PROMPT - 1 :]),
            ("mapped", prefill(pair.target, later, cache=handed).logits),
        )
    }
    nll = {name: float(scores[0]) for name, scores in scored.items()}
    return Prompt(
        excess=excess,
        key_error=errors["keys"],
        value_error=errors["values"],
        over_source=nll["mapped"] - nll["source"],
        over_target=nll["mapped"] - nll["target"],
        kl=float(scored["mapped"][2]),
        source_kl=float(scored["source"][2]),
    )


def relative_error(own: list[Tensor], mapped: list[Tensor], span: int) -> float:
    """Mean over layers; a rotation changes no norm, so keys may stay in rotated space."""
    errors = [
        (a[:, :, -span:] - b[:, :, -span:]).norm() / b[:, :, -span:].norm()
        for a, b in zip(own, mapped, strict=True)
    ]
    return float(torch.stack(errors).mean())


def measure(name: str) -> Iterator[Case]:
    recipe = load_recipe(name)
    pair = load_pair(*(read_spec(model) for model in recipe.locate_models()), "float32", "cpu")
    other = "english" if recipe.data == "stdlib" else "stdlib"
    texts = texts_of(recipe, pair, other)
    for kind, mapper in mappers_of(recipe, pair):
        for text, ids in texts.items():
            report = evaluate(mapper, pair.source, pair.target, ids[:JUDGED].split(4))
            yield Case(
                pair=name,
                mapper=kind,
                text=text,
                gate=check_gate(report),
                cosine=report.attention_output_cosine.low,
                key_r2=report.key_r2,
                prompts=[hand_over(mapper, pair, row[None]) for row in ids[JUDGED:]],
            )


def ranks(values: Tensor) -> Tensor:
    """Average ranks, from 1."""
    below = (values[None] < values[:, None]).sum(1)
    return below + ((values[None] == values[:, None]).sum(1) + 1) / 2


def spearman(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])


def auc(score: Tensor, harmed: Tensor) -> float:
    """How often a harmed prompt scores above an unharmed one."""
    positive = int(harmed.sum())
    negative = len(harmed) - positive
    if positive == 0 or negative == 0:
        return float("nan")
    total = float(ranks(score)[harmed].sum())
    return (total - positive * (positive + 1) / 2) / (positive * negative)


def show(cases: list[Case]) -> None:
    console.table(
        "The gate, and what hand-offs do on other sequences (NLL and KL in nats per token)",
        ("pair", "mapper", "text", "gate", "cosine ", "key R2 ", "NLL over source ", "KL ratio "),
        [
            (
                case.pair,
                case.mapper,
                case.text,
                "met" if case.gate.passed else "not: " + ", ".join(
                    criterion.name for criterion in case.gate.failures
                ),
                f"{case.cosine:.3f}",
                f"{case.key_r2:.3f}",
                f"{case.mean('over_source'):+.3f}",
                f"{case.mean('kl') / case.mean('source_kl'):.2f}",
            )
            for case in cases
        ],
    )  # fmt: skip
    for pair in dict.fromkeys(case.pair for case in cases):
        own = [case for case in cases if case.pair == pair]
        damage = torch.tensor([case.mean("kl") / case.mean("source_kl") for case in own])
        bound = torch.tensor([case.gate.criteria[0].bound for case in own])
        cosine = torch.tensor([case.cosine for case in own])
        console.say(
            f"{pair}: Spearman with the KL ratio: the gate's bound {spearman(bound, damage):.2f}, "
            f"its cosine {spearman(cosine, damage):.2f}"
        )
    rows = []
    for pair in dict.fromkeys(case.pair for case in cases):
        prompts = [p for case in cases if case.pair == pair for p in case.prompts]
        over_source = torch.tensor([p.over_source for p in prompts])
        kl = torch.tensor([p.kl for p in prompts])
        for probe in ("excess", "key_error", "value_error"):
            for span in SPANS:
                score = torch.tensor([getattr(p, probe)[span] for p in prompts])
                rows.append(
                    (
                        pair,
                        probe,
                        span,
                        f"{spearman(score, over_source):.2f}",
                        f"{auc(score, over_source > 0):.2f}",
                        f"{spearman(score, kl):.2f}",
                    )
                )
    console.table(
        "Probes over all prompts of a pair",
        ("pair", "probe", "tokens ", "Spearman, NLL over source ", "AUC, harmed ", "Spearman, KL "),
        rows,
    )
    for pair in dict.fromkeys(case.pair for case in cases):
        prompts = [p for case in cases if case.pair == pair for p in case.prompts]
        show_thresholds(pair, prompts)


def show_thresholds(pair: str, prompts: list[Prompt]) -> None:
    """What a threshold of the probe lets through, and what it costs."""
    excess = torch.tensor([p.excess[PROBE_TOKENS] for p in prompts])
    over = torch.tensor([p.over_source for p in prompts])
    kl = torch.tensor([p.kl for p in prompts])
    harmed = over > 0
    console.table(
        f"{pair}: {PROBE_TOKENS} probed tokens, {int(harmed.sum())} of {len(over)} harmed",
        (
            "limit ",
            "mapped ",
            "of the harmed vetoed ",
            "of the others ",
            "KL mapped ",
            "KL vetoed ",
        ),
        [
            (
                f"{limit:g}",
                f"{float((excess <= limit).double().mean()):.0%}",
                f"{float((excess > limit)[harmed].double().mean()):.0%}",
                f"{float((excess > limit)[~harmed].double().mean()):.0%}",
                f"{float(kl[excess <= limit].mean()):.3f}",
                f"{float(kl[excess > limit].mean()):.3f}",
            )
            for limit in (-0.1, 0.0, MAX_EXCESS, 0.1, 0.2, 0.3)
        ],
    )


def draw(cases: list[Case], path: Path) -> None:
    """The gate on the left, the probe on the right."""
    from matplotlib.figure import Figure

    pairs = list(dict.fromkeys(case.pair for case in cases))
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for pair, color in zip(pairs, COLORS, strict=False):
        own = [case for case in cases if case.pair == pair]
        for met, face in ((True, color), (False, "white")):
            some = [case for case in own if case.gate.passed is met]
            left.scatter(
                [case.gate.criteria[0].bound for case in some],
                [case.mean("over_source") for case in some],
                facecolors=face,
                edgecolors=color,
                label=f"{pair}, gate {'met' if met else 'not met'}",
            )
        prompts = [prompt for case in own for prompt in case.prompts]
        found = [prompt.excess[PROBE_TOKENS] for prompt in prompts]
        over = [prompt.over_source for prompt in prompts]
        ranking = auc(torch.tensor(found), torch.tensor(over) > 0)
        harmed = sum(value > 0 for value in over)
        label = f"{pair}: {harmed} harmed, AUC {ranking:.2f}"
        right.scatter(found, over, s=9, alpha=0.5, color=color, label=label)
    left.axvline(Gate().max_kl_over_source, color="black", linestyle=":")
    left.set_xlabel("KL over source alone's, upper bound, on the gate's sequences")
    left.set_ylabel("NLL of hand-offs over source alone, nats per token")
    left.set_title("gate: one point per mapper and kind of text", fontsize=10)
    right.axvline(MAX_EXCESS, color="black", linestyle=":")
    right.set_xlabel(f"probe: excess on the last {PROBE_TOKENS} tokens, nats per token")
    right.set_title("probe: one point per prompt", fontsize=10)
    for axis in (left, right):
        axis.axhline(0, color="black", linewidth=0.8)
        axis.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=PAIRS, help="recipes; smollm2 takes longest")
    parser.add_argument(
        "--json", type=Path, help="write every prompt's figures there, line by line"
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    cases = []
    for name in arguments.pairs:
        for case in measure(name):
            cases.append(case)
            console.say(f"{name}: {case.mapper} on {case.text} text")
            if arguments.json is not None:
                with arguments.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(case)) + "\n")
    show(cases)
    draw(cases, ROOT / "docs" / "gate.png")


if __name__ == "__main__":
    main()
