"""What else the numbers of a map could be spent on: layers, heads and ranks, at equal size.

python benchmarks/ablation.py [--pair NAME] [--top-k K] [--aligned all|matched] [--json FILE]

One calibration of a pair of `benchmarks/fidelity.py`, and plain ridge regressions from it, not
aligned, so that only the choice of features differs:

    all, k           all heads of the k source layers with the best held-out probe
    in-sample probe  layers by the published probe
    greedy           layers by forward selection
    own lists        keys and values have lists of their own
    k per layer      as many layers in all, spread where they raise held-out R2 most
    low rank         twice the layers, through factors of as many numbers
    matched, k       matched heads, with as many numbers where k allows, and with fewer

Each is scored by hand-offs of held-out text (agreement: with an exact sink). A mapper has one k and
one list per target layer; here the others are made in one with more layers, whose other weights
are 0.

With --aligned instead: what k per layer is worth to a mapper as `kvhub fit` makes it, aligned as
far as held-out text likes it. Takes as many alignments as there are different k.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fidelity import EXACT_TOKENS, PAIRS, REAL_PAIRS, SEQUENCES, read_pair
from torch import Tensor

from kvhub import KVMapper, calibrate, console, evaluate, fit, select_layers
from kvhub.alignment import align
from kvhub.moments import KINDS
from kvhub.ridge import regress
from kvhub.selection import Selection, head_averaged_r2
from kvhub.stats import Statistics

RIDGE = 1e-3
Lists = dict[str, list[list[int]]]  # by kind, per target layer


def one_list(layers: list[list[int]]) -> Lists:
    return dict.fromkeys(KINDS, layers)


def probe_lists(statistics: Statistics, kind: str) -> list[list[int]]:
    """All source layers of each target layer, best held-out probe of that kind first."""
    single = statistics.matched() if statistics.heads == "all" else statistics
    scores = []
    for layer in range(statistics.source.num_layers):
        weights, bias = regress(single.block("fitted", kind, [layer], None), 0.0, "relative")
        held_out = single.block("held_out", kind, [layer], None)
        scores.append(head_averaged_r2(held_out, weights, bias, statistics.target))
    return torch.stack(scores, 1).sort(dim=-1, descending=True, stable=True).indices.tolist()


def held_out_r2(statistics: Statistics, layers: list[int], target_layer: int) -> float:
    """Of keys and values together, their squares relative to each kind's own."""
    found = 0.0
    for kind in KINDS:
        weights, bias = regress(
            statistics.block("fitted", kind, layers, target_layer), RIDGE, "relative"
        )
        block = statistics.block("held_out", kind, layers, target_layer)
        found += 1 - float(block.residual_square(weights, bias).sum() / block.target_square.sum())
    return found / len(KINDS)


def spread(statistics: Statistics, order: list[list[int]], total: int) -> list[list[int]]:
    """`total` source layers over the target layers, each next one where it gains most."""
    counts = [1] * len(order)

    def gain(layer: int) -> float:
        now, more = counts[layer], counts[layer] + 1
        if more > len(order[layer]):
            return -1.0
        return held_out_r2(statistics, order[layer][:more], layer) - held_out_r2(
            statistics, order[layer][:now], layer
        )

    gains = [gain(layer) for layer in range(len(order))]
    for _ in range(total - len(order)):
        best = max(range(len(order)), key=gains.__getitem__)
        counts[best] += 1
        gains[best] = gain(best)
    return [layers[:count] for layers, count in zip(order, counts, strict=True)]


def reduce_rank(weights: Tensor, gram: Tensor, rank: int) -> Tensor:
    """The best weights of that rank for the same regression (Izenman 1975)."""
    _, vectors = torch.linalg.eigh(weights.mT @ gram @ weights)
    kept = vectors[..., -rank:]
    return weights @ kept @ kept.mT


def assemble(statistics: Statistics, lists: Lists, rank: int | None = None) -> KVMapper:
    """A mapper that reads, for keys and for values, these source layers and no others."""
    target_layers, source_layers = statistics.target.num_layers, statistics.source.num_layers
    union = [
        sorted({*lists["keys"][layer], *lists["values"][layer]}) for layer in range(target_layers)
    ]
    top_k = max(map(len, union))
    for layers in union:
        unused = [layer for layer in range(source_layers) if layer not in layers]
        layers += unused[: top_k - len(layers)]
    selection = Selection(union, [[0.0] * source_layers] * target_layers, "probe", "held_out")
    mapper = fit(statistics, selection, ridge_lambda=RIDGE)
    tensors = mapper.tensors()
    for kind in KINDS:
        for layer, layers in enumerate(lists[kind]):
            block = statistics.block("fitted", kind, layers, layer)
            weights, bias = regress(block, RIDGE, "relative")
            if rank is not None:
                weights = reduce_rank(weights, block.gram, rank)
                bias = block.target_mean - torch.einsum("gf,gfo->go", block.source_mean, weights)
            padded = tensors[f"{kind[:-1]}_weight"][layer]
            groups, _, outputs = padded.shape
            by_layer = weights.view(groups, len(layers), -1, outputs).to(padded)
            padded.zero_()
            places = torch.tensor([union[layer].index(one) for one in layers])
            padded.view(groups, top_k, -1, outputs)[:, places] = by_layer
            tensors[f"{kind[:-1]}_bias"][layer] = bias
    return KVMapper(mapper.config, tensors)


def aligned(statistics: Statistics, lists: list[list[int]], models: Any, batches: Any) -> KVMapper:
    """These lists, one for keys and values, each aligned as `kvhub fit` aligns its k.

    A layer's alignment does not depend on the other layers' maps, so each is taken from a mapper in
    which all have as many source layers as it.
    """
    plain = assemble(statistics, one_list(lists))
    tensors = {name: tensor.clone() for name, tensor in plain.tensors().items()}
    for count in sorted({len(layers) for layers in lists}):
        same = [list(layers[:count]) for layers in plain.config.selection]
        found = align(assemble(statistics, one_list(same)), *models, batches).best.mapper
        for name, tensor in found.tensors().items():
            for layer, layers in enumerate(lists):
                if len(layers) == count:  # features that are used come first
                    tensors[name][layer][:, : tensor.shape[2]] = tensor[layer]
    return KVMapper(plain.config, tensors)


def size(statistics: Statistics, lists: Lists, rank: int | None = None) -> int:
    """Numbers of the weights, or of their two factors."""
    groups = 1 if statistics.heads == "all" else statistics.target.kv_heads
    outputs = statistics.target.kv_dim // groups
    numbers = 0
    for kind in KINDS:
        for layers in lists[kind]:
            features = len(layers) * statistics.source.kv_dim // groups
            one = features * outputs if rank is None else rank * (features + outputs)
            numbers += groups * one
    return numbers


def variants(statistics: Statistics, top_k: int) -> Any:
    """Name, statistics, lists and rank of each."""
    most, layers = statistics.source.num_layers, statistics.target.num_layers
    matched = statistics.matched()
    kv_heads = statistics.target.kv_heads
    order = select_layers(statistics, most).layers
    first = [chosen[:top_k] for chosen in order]
    yield f"all, {top_k}", statistics, one_list(first), None
    published = select_layers(statistics, top_k, scored_on="fitted").layers
    yield f"all, {top_k}, in-sample probe", statistics, one_list(published), None
    greedy = select_layers(statistics, top_k, method="greedy").layers
    yield f"all, {top_k}, greedy", statistics, one_list(greedy), None
    own = {kind: [chosen[:top_k] for chosen in probe_lists(statistics, kind)] for kind in KINDS}
    yield f"all, {top_k}, own lists", statistics, own, None
    budget = spread(statistics, order, top_k * layers)
    yield f"all, {top_k} per layer on average", statistics, one_list(budget), None
    double = min(2 * top_k, most)
    wide, out = statistics.source.kv_dim, statistics.target.kv_dim
    rank = int(top_k * wide * out / (double * wide + out))
    lists = one_list([chosen[:double] for chosen in order])
    yield f"all, {double}, rank {rank}", statistics, lists, rank
    same = min(kv_heads * top_k, most)
    for count in sorted({same, top_k}, reverse=True):
        yield f"matched, {count}", matched, one_list([chosen[:count] for chosen in order]), None
    yield f"matched, {top_k}, greedy", matched, one_list(greedy), None
    yield f"all, {most}", statistics, one_list(order), None


def plain_mappers(statistics: Statistics, top_k: int) -> Iterator[tuple[str, int, KVMapper]]:
    """Name, numbers and mapper of each variant."""
    for name, sums, lists, rank in variants(statistics, top_k):
        yield name, size(sums, lists, rank), assemble(sums, lists, rank)


def aligned_mappers(
    statistics: Statistics, top_k: int, models: Any, batches: Any
) -> Iterator[tuple[str, int, KVMapper]]:
    """Of one k and of k per layer, aligned."""
    source_layers, target_layers = statistics.source.num_layers, statistics.target.num_layers
    order = select_layers(statistics, source_layers).layers
    for name, lists in (
        (f"{statistics.heads}, {top_k}", [chosen[:top_k] for chosen in order]),
        (
            f"{statistics.heads}, {top_k} per layer on average",
            spread(statistics, order, top_k * target_layers),
        ),
    ):
        mapper = aligned(statistics, lists, models, batches)
        yield name, size(statistics, one_list(lists)), mapper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = {**PAIRS, **REAL_PAIRS}
    parser.add_argument("--pair", choices=known, default="smollm2-26-to-30")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--aligned", choices=("all", "matched"), help="k per layer, aligned")
    parser.add_argument("--json", type=Path, help="write the results there too")
    arguments = parser.parse_args()
    *models, text, evaluated = read_pair(known[arguments.pair])
    batches = text(SEQUENCES)
    statistics = calibrate(*models, batches)
    made = plain_mappers(statistics, arguments.top_k)
    if arguments.aligned is not None:
        sums = statistics if arguments.aligned == "all" else statistics.matched()
        made = aligned_mappers(sums, arguments.top_k, models, batches)
    rows = []
    exact = " | ".join(f"KL, {tokens} exact" for tokens in EXACT_TOKENS)
    print(f"| layers and heads | numbers | {exact} | agreement |\n|---|---|---|---|---|---|")
    for name, numbers, mapper in made:
        report = evaluate(mapper, *models, evaluated, exact_prefix=0, exact_budgets=EXACT_TOKENS)
        kl = [point.kl.value for point in report.exact]
        agreement = report.exact[1].agreement.value
        rows.append({"name": name, "numbers": numbers, "kl": kl, "agreement": agreement})
        cells = [f"{numbers / 1e6:.2f} M", *(f"{each:.3f}" for each in (*kl, agreement))]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    console.say("Done.")


if __name__ == "__main__":
    main()
