"""How long each step takes beside the bare operations that it cannot do without."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from common import (
    SMOLLM2,
    Result,
    compare,
    duration,
    mapper_config,
    qwen3_pair,
    seconds,
    smollm2_pair,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from kvhub import KVMapper, ModelSpec, Selection, Statistics, fit, select_layers
from kvhub.cache import build_cache, prefill
from kvhub.mapper_config import tensor_shapes
from kvhub.moments import KINDS, Moments, group_features

ROWS = 1024
TOP_K, OTHER_TOP_K = 8, 4
# Expected, before the first measurement, of Moments.update: it also converts and centres the rows
# (a pass over 11 million numbers) and reads what it adds to, 54 million; the product needs 55
# billion multiplications, so a tenth more than the bare product at the most.
EXPECTED_UPDATE = "1.1x"
# 1560 probes of 64 features are Python's overhead, about 1 ms each; a factorisation of 1536
# features takes 0.1 s on one core and there are 60, for 768 features an eighth of that.
EXPECTED_CLOSED_FORM = "7 s on one core"
# The products of `all` heads are wide and should hide RoPE, gathers and checks. Those of `matched`
# heads read as many numbers for a third or an eighth of the work, so there the rest shows.
EXPECTED_MAPPING = {"all": "1.2x", "matched": "1.4x"}
# Two products of 1536 x 192 per layer and token against 3.5 million weights and attention.
EXPECTED_PREFILL = {"all": "0.2x", "matched": "0.1x"}


def statistics_update() -> Iterator[Result]:
    """Adding a batch's states to the moments, against one product x^T [x | y] in float64."""
    source, target = smollm2_pair()
    states = [
        torch.randn(spec.num_layers, spec.kv_heads, ROWS, spec.head_dim)
        for spec in (source, target)
    ]
    x, y = (group_features(part, "all")[:, 0].double() for part in states)
    both = torch.cat([x, y], dim=1)
    product = torch.empty(x.shape[1], both.shape[1], dtype=torch.float64)
    moments = Moments.zeros(1, x.shape[1], y.shape[1])

    def update() -> None:
        moments.update(*(group_features(part, "all") for part in states))

    found = compare(update, lambda: torch.matmul(x.T, both, out=product), repeats=3)
    yield Result(
        f"Statistics: {ROWS} rows, {x.shape[1]} features, {y.shape[1]} outputs",
        EXPECTED_UPDATE,
        f"{found} of one matmul",
        found.ratio,
        1.5,
    )


def closed_form() -> Iterator[Result]:
    """From a statistics file to a mapper and to another one, without a model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "statistics"
        synthetic_statistics().save(path)
        loaded: list[Statistics] = []
        selections: list[Selection] = []
        times = {
            "load": seconds(lambda: loaded.append(Statistics.load(path))),
            "select": seconds(lambda: selections.append(select_layers(loaded[0], TOP_K))),
            f"fit k={TOP_K}": seconds(lambda: fit(loaded[0], selections[0])),
            f"refit k={OTHER_TOP_K}": seconds(
                lambda: fit(loaded[0], select_layers(loaded[0], OTHER_TOP_K))
            ),
        }
        total = sum(times.values())
        parts = ", ".join(f"{name} {duration(part)}" for name, part in times.items())
        yield Result(
            "Load, select, fit and refit for another k: SmolLM2 pair, heads all",
            EXPECTED_CLOSED_FORM,
            f"{parts}; together {duration(total)}",
            total,
            10.0,
            "s",
        )


def synthetic_statistics(target_layers: int | None = None) -> Statistics:
    """Statistics of the SmolLM2 pair's shape, ill-conditioned as real ones are.

    Neighbouring numbers of the data would be nearly dependent: variances fall by 1e6 over 512
    common factors, which leave 1 % of the variance to each feature itself.
    """
    source, target = smollm2_pair()
    if target_layers is not None:
        target = replace(
            target, num_layers=target_layers, layer_types=target.layer_types[:target_layers]
        )
    statistics = Statistics.empty(source, target)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    strength = torch.logspace(0, -3, 512, dtype=torch.float64)[:, None]
    for kind in KINDS:
        features, outputs = statistics.fitted[kind].cross.shape[1:]
        x, y = strength * normal(512, features), strength * normal(512, outputs)
        noise = 0.01 * (x**2).sum(0).mean()
        for moments, tokens in (
            (statistics.fitted[kind], 30000),
            (statistics.held_out[kind], 3000),
        ):
            moments.tokens = tokens
            moments.weight += tokens
            moments.weight_square += tokens
            moments.source_mean += normal(features)
            moments.target_mean += normal(outputs)
            torch.matmul(tokens * x.T, x, out=moments.gram[0])
            moments.gram[0].diagonal().add_(tokens * noise)
            torch.matmul(tokens * x.T, y, out=moments.cross[0])
            moments.target_square += tokens * ((y**2).sum(0) + noise)
    return statistics


def greedy_selection() -> Iterator[Result]:
    """Greedy selection for a target of one layer, times the real target's; information only."""
    statistics = synthetic_statistics(target_layers=1)
    layers = smollm2_pair()[1].num_layers
    time = seconds(lambda: select_layers(statistics, TOP_K, method="greedy"))
    yield Result(
        f"Greedy selection, k={TOP_K}: SmolLM2 pair, extrapolated",
        "2 min on one core",
        f"one target layer {duration(time)}, so {layers} take {duration(layers * time)}",
        layers * time,
        None,
        "s",
    )


def random_mapper(source: ModelSpec, target: ModelSpec, heads: str) -> KVMapper:
    config = mapper_config(source, target, heads, TOP_K)
    tensors = {
        name: torch.empty(shape).uniform_(-0.02, 0.02)
        for name, shape in tensor_shapes(config).items()
    }
    return KVMapper(config, tensors)


def random_cache(spec: ModelSpec, tokens: int) -> DynamicCache:
    shape = (spec.num_layers, 1, spec.kv_heads, tokens, spec.head_dim)
    return build_cache(torch.randn(shape), torch.randn(shape))


def bare_products(mapper: KVMapper, tokens: int) -> Callable[[], None]:
    """The matrix products of a mapping and nothing else: no gather, RoPE, bias, check or cache.

    Every target layer has inputs and an output of its own, as it has in a mapping. One buffer
    reused by all would stay in the processor's cache and be faster, and so raise the ratios.
    """
    layers, groups, features, outputs = mapper.key_weight.shape
    gathered = torch.randn(layers, groups, tokens, features)
    product = torch.empty(layers, groups, tokens, outputs)

    def run() -> None:
        for weights in (mapper.key_weight, mapper.value_weight):
            for layer, weight in enumerate(weights):
                torch.bmm(gathered[layer], weight, out=product[layer])

    return run


def mapping() -> Iterator[Result]:
    """A mapping against the products it needs, and against the target's prefill."""
    prefill_model = smollm2_model()
    cases = [
        ("SmolLM2 pair", smollm2_pair(), "all", {256: 9, 1024: 7, 4096: 5}),
        ("SmolLM2 pair", smollm2_pair(), "matched", {256: 11, 1024: 9, 4096: 7}),
        ("Qwen3 0.6B to 7 layers of 1.7B", qwen3_pair(7), "all", {256: 5, 1024: 3}),
        ("Qwen3 0.6B to 1.7B", qwen3_pair(), "matched", {256: 7, 1024: 5, 4096: 3}),
    ]
    for name, (source, target), heads, lengths in cases:
        mapper = random_mapper(source, target, heads)
        for tokens, repeats in lengths.items():
            cache = random_cache(source, tokens)
            found = compare(partial(mapper, cache), bare_products(mapper, tokens), repeats)
            yield Result(
                f"Mapping, {name}, {heads} heads, {tokens} tokens",
                EXPECTED_MAPPING[heads],
                f"{found} of bare products",
                found.ratio,
                1.5,
            )
            if name == "SmolLM2 pair" and tokens == 1024:
                ids = torch.randint(0, target.vocab_size, (1, tokens))
                read = partial(prefill, prefill_model, ids, logits_to_keep=1)
                found = compare(partial(mapper, cache), read, 3)
                yield Result(
                    f"Mapping against prefill, {name}, {heads} heads, {tokens} tokens",
                    EXPECTED_PREFILL[heads],
                    f"{found} of prefilling again",
                    found.ratio,
                    0.5,
                )


def smollm2_model() -> PreTrainedModel:
    """A model of SmolLM2-135M's shape with random weights: its time is that of the real one."""
    config = LlamaConfig.from_dict(SMOLLM2)
    return AutoModelForCausalLM.from_config(config).eval()
