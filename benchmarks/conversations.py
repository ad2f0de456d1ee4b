"""Drift over ten turns: a target that shares a conversation, against one that has read it.

python benchmarks/conversations.py [--pairs NAME ...] [--conversations N] [--json FILE]
python benchmarks/conversations.py --data coqa --pairs NAME ...

A passage, then ten turns, as in the paper's multi-turn experiment, but with text that every machine
has: documents that neither calibration nor (of the embedded family) training saw, cut into a
passage and ten segments. A model's turn is to read the next segment; it is scored on what it
predicts after each of the segment's tokens, against the text and against itself having read all
from the start. The first model always reads the passage, the figures are the second one's.

    once        the second takes every turn; the passage is mapped, once
    switch      the two take turns, and get each other's parts mapped; over both orders, so that
                the second is scored on every turn
    one-way     as switch, but with no mapper back: the first reads the second's turns itself
    remap       the first reads everything, and everything is mapped anew at every turn
    first       no hand-off: the first model takes every turn

Expected, written down before anything was measured:

- once: KL falls from turn to turn, to below half at turn 10, because ever more of what is near is
  the target's own; own states on mapped ones carry some error, so it does not fall to nothing.
- remap: equal to once at turn 1, then flat: the context is always mapped to the last token.
- switch: between the two at every turn, nearer to remap, because the segment just before, which
  matters most, is always mapped; flat from turn 2 on. So no drift upwards in any way.
- one-way: at most a tenth below switch: the error that comes back from the first model's states on
  mapped ones is small beside that of the map.
- agreement and the NLL gap follow the KL; the pair whose target was trained apart from its source
  is several times worse than the one whose models are related, in each direction.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import coqa
import torch
from torch import Tensor

from kvhub import Conversation, KVMapper, calibrate, console, fit, select_layers
from kvhub.bootstrap import Bootstrap
from kvhub.cache import cache_of, crop_cache, prefill
from kvhub.data import describe, evaluation_stream, token_batches
from kvhub.generation import EXACT_PREFIX, prefill_mapped
from kvhub.metrics import SCORES, score_predictions
from kvhub.models import load_model, load_tokenizer
from kvhub.recipe import Recipe, load_recipe
from kvhub.report import Estimate

WAYS = ("once", "switch", "one-way", "remap", "first")
MAPPERS = Path("demo-output/conversations")


@dataclass(frozen=True)
class Protocol:
    """How a document becomes a conversation, in tokens."""

    context: int = 128
    segment: int = 32
    turns: int = 10

    @property
    def length(self) -> int:
        """One more than is read, because the last token read predicts it."""
        return self.context + self.turns * self.segment + 1

    def stop(self, turn: int) -> int:
        """Where a turn ends, counted from 1; turn 0 is the passage."""
        return self.context + turn * self.segment


@dataclass
class Sums:
    """By way, `[turns, scores]` sums of every conversation; and what the turns cost."""

    scores: dict[str, list[Tensor]] = field(default_factory=dict)
    mapped: dict[str, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)

    def add(self, way: str, mapped: int, computed: int) -> None:
        """Count tokens of one of the second model's turns."""
        self.mapped[way] = self.mapped.get(way, 0) + mapped
        self.computed[way] = self.computed.get(way, 0) + computed


def measure(
    models: dict, mappers: dict, documents: list[Tensor], protocol: Protocol, name: str
) -> Sums:
    """All ways over all documents; `first` and `second` are the names of the models."""
    found = Sums()
    for done, document in enumerate(documents, start=1):
        alone = {role: prefill(model, document[:, :-1]) for role, model in models.items()}
        score = _scorer(document, alone["second"].logits, protocol)
        rows: dict[str, dict[int, Tensor]] = {way: {} for way in (*WAYS, "second")}
        turns = range(1, protocol.turns + 1)
        for turn in turns:
            span = slice(protocol.stop(turn - 1), protocol.stop(turn))
            rows["first"][turn] = score(turn, alone["first"].logits[:, span])
            rows["second"][turn] = score(turn, alone["second"].logits[:, span])
        both = {pair: mappers[pair] for pair in (("first", "second"), ("second", "first"))}
        there = {("first", "second"): mappers["first", "second"]}
        orders = (lambda turn: turn % 2 == 1, lambda turn: turn % 2 == 0)
        for way, given, mine in (
            ("once", there, (lambda _: True,)),
            ("switch", both, orders),
            ("one-way", there, orders),
        ):
            for is_second in mine:
                conversation = Conversation(models, given)
                conversation.read("first", document[:, : protocol.context])
                for turn in turns:
                    role = "second" if is_second(turn) else "first"
                    logits = conversation.read(role, document[:, : protocol.stop(turn)])
                    if role == "second":
                        rows[way][turn] = score(turn, logits)
                for record in conversation.turns:
                    if record.model == "second":
                        found.add(way, record.mapped, record.computed)
        source_cache = cache_of(alone["first"])
        for turn in turns:
            start, stop = protocol.stop(turn - 1), protocol.stop(turn)
            mapped = prefill_mapped(
                mappers["first", "second"],
                models["first"],
                models["second"],
                document[:, :stop],
                exact_suffix=protocol.segment,
                source_cache=crop_cache(source_cache, 0, start),
            )
            output = prefill(models["second"], document[:, start:stop], cache=mapped)
            rows["remap"][turn] = score(turn, output.logits)
            found.add("remap", start - EXACT_PREFIX, protocol.segment + EXACT_PREFIX)
        for way, by_turn in rows.items():
            table = torch.stack([by_turn[turn] for turn in turns])
            found.scores.setdefault(way, []).append(table)
        if done % 10 == 0 or done == len(documents):
            console.say(f"{name}: {done} of {len(documents)} conversations")
    return found


def _scorer(
    document: Tensor, reference: Tensor, protocol: Protocol
) -> Callable[[int, Tensor], Tensor]:
    """Scores of a turn's predictions; the label of each token read is the one after it."""

    def score(turn: int, logits: Tensor) -> Tensor:
        span = slice(protocol.stop(turn - 1), protocol.stop(turn))
        labels = document[:, span.start + 1 : span.stop + 1]
        if logits.shape[1] != labels.shape[1]:
            raise RuntimeError(f"{logits.shape[1]} predictions for {labels.shape[1]} tokens")
        return score_predictions(logits, reference[:, span], labels)[0]

    return score


def summarize(found: Sums, protocol: Protocol) -> dict[str, dict]:
    """Figures with 95 % intervals over conversations, by way; KL and NLL in nats per token."""
    names = list(found.scores)
    # [conversations, ways, turns, scores]
    table = torch.stack([torch.stack(rows) for rows in found.scores.values()], dim=1)
    bootstrap = Bootstrap(torch.cat([torch.ones(len(table), 1).double(), table.flatten(1)], dim=1))

    def figure(statistic: Callable[[Tensor], Tensor]) -> dict:
        """A statistic of means per token, `[..., ways, turns, scores]`."""

        def of_sums(sums: Tensor) -> Tensor:
            means = sums[..., 1:] / sums[..., :1] / protocol.segment
            return statistic(means.unflatten(-1, table.shape[1:]))

        return asdict(bootstrap.estimate(of_sums))

    nll, kl, agreement = (SCORES.index(score) for score in ("nll", "kl", "agreement"))
    alone = names.index("second")
    result: dict[str, dict] = {}
    for index, way in enumerate(names):
        if way == "second":
            continue

        def gap(means: Tensor, index: int = index) -> Tensor:
            return (means[..., index, :, nll] - means[..., alone, :, nll]).mean(-1)

        conversations = len(table)
        result[way] = {
            "kl_by_turn": [
                figure(lambda m, i=index, t=turn: m[..., i, t, kl])
                for turn in range(protocol.turns)
            ],
            "kl": figure(lambda m, i=index: m[..., i, :, kl].mean(-1)),
            "kl_last_less_first": figure(lambda m, i=index: m[..., i, -1, kl] - m[..., i, 0, kl]),
            "nll_gap": figure(gap),
            "agreement": figure(lambda m, i=index: m[..., i, :, agreement].mean(-1)),
            "mapped_tokens": found.mapped.get(way, 0) / conversations,
            "computed_tokens": found.computed.get(way, 0) / conversations,
        }
    one_way, switch = names.index("one-way"), names.index("switch")
    result["switch"]["kl_over_one_way"] = figure(
        lambda m: m[..., switch, :, kl].mean(-1) / m[..., one_way, :, kl].mean(-1)
    )
    return result


def fitted(recipe: Recipe, source: str, target: str, length: int) -> KVMapper:
    """The recipe's map in either direction, from as much text; kept for the next run."""
    name = f"{Path(source).name}-to-{Path(target).name}-{recipe.name}-{length}"
    if (MAPPERS / name).is_dir():
        return KVMapper.from_pretrained(MAPPERS / name)
    console.say(f"Fitting {name} ...")
    batches = token_batches(
        load_tokenizer(target),
        recipe.data,
        sequences=recipe.sequences * recipe.length // length,
        length=length,
        batch_size=2,
    )
    statistics = calibrate(
        load_model(source),
        load_model(target),
        batches,
        heads=recipe.heads,
        provenance={**describe(recipe.data), "length": length},
    )
    selection = select_layers(statistics, recipe.top_k)
    mapper = fit(
        statistics,
        selection,
        heads=recipe.heads,
        ridge_lambda=recipe.ridge_lambda,
        lambda_scale=recipe.lambda_scale,
    )
    mapper.save_pretrained(MAPPERS / name)
    return mapper


def measure_pair(
    name: str, data: str, conversations: int, protocol: Protocol
) -> Iterator[tuple[str, dict]]:
    """Both directions of a recipe's pair, on local text or CoQA: title and figures of each."""
    recipe = load_recipe(name)
    source, target = recipe.locate_models()
    models = {path: load_model(path) for path in (source, target)}
    mappers = {
        pair: fitted(recipe, *pair, protocol.length)
        for pair in ((source, target), (target, source))
    }
    tokenizer = load_tokenizer(target)
    documents: list[Tensor] = []
    if data == "local":
        calibration = mappers[source, target].config.calibration
        data, start, length = evaluation_stream(calibration, None, protocol.length)
        batches = token_batches(
            tokenizer, data, sequences=conversations, length=length, batch_size=1, start=start
        )
        documents = [batch.input_ids for batch in batches if batch.input_ids.shape[1] == length]
    for first, second in ((source, target), (target, source)):
        title = f"{Path(first).name} to {Path(second).name}"
        roles = {"first": models[first], "second": models[second]}
        given = {
            ("first", "second"): mappers[first, second],
            ("second", "first"): mappers[second, first],
        }
        if data == "coqa":
            yield title, {"ways": coqa.measure(roles, given, tokenizer, conversations)}
            continue
        started = time.perf_counter()
        found = measure(roles, given, documents, protocol, title)
        yield (
            title,
            {
                "recipe": name,
                "data": data,
                "conversations": len(documents),
                "ways": summarize(found, protocol),
                "seconds": time.perf_counter() - started,
            },
        )


def draw(results: dict[str, dict], path: Path) -> None:
    """KL by turn, a panel for each direction of each pair."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from kvhub.plots import BLUE, GREEN, GREY, ORANGE, STYLE

    drawn = (
        ("remap", "everything mapped anew each turn", ORANGE, "s"),
        ("switch", "taking turns, mapped both ways", BLUE, "o"),
        ("one-way", "taking turns, no mapper back", GREY, "x"),
        ("once", "handed off once", GREEN, "^"),
    )
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        columns = 2
        rows = (len(results) + 1) // columns
        figure = Figure(figsize=(8, 2.6 * rows + 0.5))
        axes = figure.subplots(rows, columns, sharex=True, squeeze=False)
        for ax, (title, result) in zip(axes.flat, results.items(), strict=False):
            for way, label, color, marker in drawn:
                estimates = result["ways"][way]["kl_by_turn"]
                turns = range(1, len(estimates) + 1)
                values, lows, highs = (
                    [estimate[key] for estimate in estimates] for key in ("value", "low", "high")
                )
                ax.plot(turns, values, color=color, marker=marker, markersize=4, label=label)
                ax.fill_between(turns, lows, highs, color=color, alpha=0.15, linewidth=0)
            alone = result["ways"]["first"]["kl"]["value"]
            ax.set_title(f"{title}  (first model alone: {alone:.2f})")
            ax.set_ylim(bottom=0)
            ax.grid(axis="y")
        for ax in axes[-1]:
            ax.set_xlabel("turn")
        for ax in axes[:, 0]:
            ax.set_ylabel("KL, nats per token")
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, dpi=150)


def show(results: dict[str, dict]) -> None:
    def text(figure: dict, digits: int = 3) -> str:
        estimate = Estimate(**figure)
        low, high = (f"{edge:.{digits}f}" for edge in (estimate.low, estimate.high))
        return f"{estimate.value:.{digits}f} [{low}, {high}]"

    for title, result in results.items():
        console.table(
            f"{title}: {result['conversations']} conversations of {result['data']}",
            [
                *("way", "KL turn 1 ", "KL turn 10 ", "10 less 1 ", "KL, all turns ", "NLL gap "),
                *("agreement ", "mapped ", "computed "),
            ],
            [
                (
                    way,
                    text(found["kl_by_turn"][0]),
                    text(found["kl_by_turn"][-1]),
                    text(found["kl_last_less_first"]),
                    text(found["kl"]),
                    text(found["nll_gap"]),
                    text(found["agreement"]),
                    f"{found['mapped_tokens']:.0f}",
                    f"{found['computed_tokens']:.0f}",
                )
                for way, found in ((way, result["ways"][way]) for way in WAYS)
            ],
        )
        ratio = text(result["ways"]["switch"]["kl_over_one_way"])
        console.say(f"{title}: KL of switch over one-way {ratio}; {result['seconds']:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--pairs", nargs="+", default=["tiny-middle-to-large", "tiny-small-to-large"]
    )
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--data", choices=("local", "coqa"), default="local")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--plot", type=Path, help="draw KL by turn there, as PNG")
    arguments = parser.parse_args()
    if arguments.plot is not None and arguments.data == "coqa":
        parser.error("--plot draws KL by turn, which --data coqa does not have")
    torch.manual_seed(0)
    protocol = Protocol()
    results: dict[str, dict] = {}
    for name in arguments.pairs:
        found = measure_pair(name, arguments.data, arguments.conversations, protocol)
        for title, result in found:
            results[title] = result
            report = {"protocol": asdict(protocol), "torch": torch.__version__, "results": results}
            if arguments.json is not None:  # now, because the next direction takes as long again
                arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if arguments.data == "coqa":
        print(json.dumps(results, indent=2))
    else:
        show(results)
    if arguments.plot is not None:
        draw(results, arguments.plot)


if __name__ == "__main__":
    main()
