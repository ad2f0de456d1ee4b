"""The map on paged pools against the matrix products that it cannot do without."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from common import Result, compare, qwen3_pair, smollm2_pair
from kvhub.exporters.map_plan import MapPlan
from kvhub.exporters.paged import map_paged
from kvhub.exporters.paged_cache import PagedCache
from kvhub.exporters.plan import make_plan
from speed import bare_products, random_mapper

from kvhub import ModelSpec
from kvhub.products import multiply

SOURCE_BLOCK, TARGET_BLOCK = 32, 64  # tokens
LIMIT = 1.3
# Expected before the first measurement. Beside what `mapping` does it reads the source twice, once
# to check it, and both through a block table: two more passes over some megabytes per layer, which
# the wide products of `all` heads hide. `matched` heads do an eighth (SmolLM2: a third) of that
# work on as many numbers.
EXPECTED = {"all": "1.2x", "matched": "1.5x"}


def paged_cache(spec: ModelSpec, tokens: int, tokens_per_block: int) -> PagedCache:
    """A row of random states in blocks in no order."""
    blocks = -(-tokens // tokens_per_block)
    return PagedCache(
        pool=torch.randn(
            blocks, spec.num_layers, 2, spec.kv_heads, tokens_per_block, spec.head_dim
        ),
        block_table=torch.randperm(blocks)[None].int(),
        lengths=torch.tensor([tokens]),
        start_positions=torch.tensor([0]),
    )


def own_products(plan: MapPlan, tokens: int) -> Callable[[], None]:
    """The matrix products that `map_paged` makes, on sources that are ready, and nothing else."""
    shape = (plan.source_layers, plan.groups, tokens, plan.features // plan.top_k)
    sources = torch.randn(shape)
    product = torch.empty(plan.target_layers, plan.groups, tokens, plan.outputs)
    chosen = plan.gather.tolist()

    def run() -> None:
        for weights, biases in (
            (plan.key_weight, plan.key_bias),
            (plan.value_weight, plan.value_bias),
        ):
            for layer, layers in enumerate(chosen):
                multiply(
                    [sources[index] for index in layers],
                    weights[layer],
                    biases[layer][:, None],
                    gather=False,
                    out=product[layer],
                )

    return run


def paged() -> Iterator[Result]:
    """`map_paged` against its own products, and for information against one for each layer.

    A layer's product is a sum of top_k smaller ones, which spares a CPU the gathering; one wide
    product on features that lie gathered already is faster still, and nothing that maps has these.
    """
    cases = [
        ("SmolLM2 pair", smollm2_pair(), "all", {256: 9, 1024: 7, 4096: 5}),
        ("SmolLM2 pair", smollm2_pair(), "matched", {256: 11, 1024: 9, 4096: 7}),
        ("Qwen3 0.6B to 7 layers of 1.7B", qwen3_pair(7), "all", {256: 5, 1024: 3, 4096: 2}),
        ("Qwen3 0.6B to 1.7B", qwen3_pair(), "matched", {256: 7, 1024: 5, 4096: 3}),
    ]
    for name, (source, target), heads, lengths in cases:
        plan = make_plan(random_mapper(source, target, heads))
        for tokens, repeats in lengths.items():
            pages = paged_cache(source, tokens, SOURCE_BLOCK)
            mapped = paged_cache(target, tokens, TARGET_BLOCK)
            run = partial(map_paged, plan, pages, mapped)
            found = compare(run, own_products(plan, tokens), repeats)
            wide = compare(run, bare_products(plan, tokens), repeats)
            yield Result(
                f"Paged mapping, {name}, {heads} heads, {tokens} tokens",
                EXPECTED[heads],
                f"{found} of its products; {wide.ratio:.2f}x of one wide product a layer",
                found.ratio,
                LIMIT,
            )
