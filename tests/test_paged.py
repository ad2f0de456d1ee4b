"""The map on paged pools: against KVMapper, cell by cell, and never a cell too many."""

from dataclasses import replace

import pytest
import torch
from kvhub.exporters.paged import map_paged, tokens_at_once
from kvhub.exporters.paged_cache import PagedCache
from kvhub.exporters.plan import make_plan
from pages import (
    BAD,
    FILL,
    assert_maps_as,
    changed,
    dense,
    fill_source,
    layers_first,
    mapper_of,
    padded,
    paged,
)
from torch.profiler import ProfilerActivity, profile

from kvhub.errors import UsageError, VerificationError
from kvhub.rope import apply_rope, strip_rope

ROPES = [
    ("qwen3", "llama"),
    ("llama", "arcee"),  # attention scaling
    ("arcee", "glm4"),  # partial and interleaved
    ("cohere", "stablelm"),
    ("glm4", "qwen3"),
]


@pytest.mark.parametrize("heads", ["all", "matched"])
@pytest.mark.parametrize(("source", "target"), ROPES)
def test_pages_map_as_a_plain_cache_does(source, target, heads):
    mapper = mapper_of(source, target, heads)
    pages = fill_source(paged(mapper.config.source, 4))
    before = pages.pool.clone()
    mapped = paged(mapper.config.target, 8)
    map_paged(make_plan(mapper), pages, mapped)
    assert_maps_as(mapper, pages, mapped, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pages.pool, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("blocks", [(1, 32), (16, 3), (5, 5)])
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_dtypes_and_block_sizes(dtypes, blocks):
    mapper = mapper_of("qwen3", "arcee", dtype=getattr(torch, dtypes[0]))
    dtype, written = (getattr(torch, name) for name in dtypes)
    pages = fill_source(paged(mapper.config.source, blocks[0], dtype))
    mapped = paged(mapper.config.target, blocks[1], written)
    map_paged(make_plan(mapper), pages, mapped)
    # Both compute in float32, in another order, and round once: to the same number or the next.
    tolerance = max(torch.finfo(written).eps, 1e-5)
    assert_maps_as(mapper, pages, mapped, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_a_float64_plan_is_exact(heads):
    """The equation per head in float64; only the result is rounded, to float32."""
    mapper = mapper_of("arcee", "glm4", heads, dtype=torch.float64)
    config = mapper.config
    pages = fill_source(paged(config.source, 4, lengths=[13], starts=[2000]))
    mapped = paged(config.target, 8, lengths=[13], starts=[2000])
    map_paged(make_plan(mapper), pages, mapped)
    (states, positions), (found, _) = dense(pages, 0), dense(mapped, 0)
    for layer, chosen in enumerate(config.selection):
        for kind in ("keys", "values"):
            read = [getattr(states.layers[index], kind).double() for index in chosen]
            if kind == "keys":
                read = [strip_rope(keys, positions, config.source.rope) for keys in read]
            weight, bias = (getattr(mapper, f"{kind[:-1]}_{part}") for part in ("weight", "bias"))
            heads_of = [[0, 1]] if heads == "all" else [[0], [1]]
            products = [
                torch.cat([keys[0, head] for keys in read for head in group], -1)
                @ weight[layer, index]
                + bias[layer, index]
                for index, group in enumerate(heads_of)
            ]
            expected = torch.cat(products, -1).unflatten(-1, (2, -1)).transpose(0, 1)[None]
            if kind == "keys":
                expected = apply_rope(expected, positions, config.target.rope)
            result = getattr(found.layers[layer], kind)
            torch.testing.assert_close(result, expected.float(), rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("layout", [padded, layers_first])
def test_strided_pools(layout):
    mapper = mapper_of("qwen3", "llama", "matched")
    pages = fill_source(paged(mapper.config.source, 4))
    mapped = paged(mapper.config.target, 8)
    pool, buffer = layout(mapped.pool)
    assert not pool.is_contiguous()
    strided = replace(mapped, pool=pool)
    map_paged(make_plan(mapper), replace(pages, pool=layout(pages.pool)[0]), strided)
    assert_maps_as(mapper, pages, strided, rtol=1e-5, atol=1e-5)
    assert bool((buffer == FILL).all())


def test_keys_move_to_where_the_target_says():
    mapper = mapper_of("llama", "qwen3")
    pages = fill_source(paged(mapper.config.source, 4))
    here = paged(mapper.config.target, 4)
    there = replace(here, pool=here.pool.clone(), start_positions=here.start_positions + 40)
    for mapped in (here, there):
        map_paged(make_plan(mapper), pages, mapped)
    (near, positions), (far, moved) = dense(here, 3), dense(there, 3)
    for a, b in zip(near.layers, far.layers, strict=True):
        rope = mapper.config.target.require_rope()
        content = strip_rope(a.keys, positions, rope)
        # float32 angles at position 30000 are off by some thousandths.
        torch.testing.assert_close(strip_rope(b.keys, moved, rope), content, rtol=0, atol=1e-4)
        assert float((a.keys - b.keys).abs().max()) > 0.1
        assert torch.equal(a.values, b.values)


def peak_bytes(function):
    """What `function` holds at most, from the allocator's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = recorded.profiler.kineto_results.events()
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("case", ["all float32", "matched bfloat16", "all float64"])
def test_the_workspace_is_bounded_and_does_not_show(case):
    heads, dtype = case.split()
    mapper = mapper_of("qwen3", "glm4", heads)
    plan = make_plan(mapper, dtype=getattr(torch, dtype))
    read = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    pages = fill_source(paged(mapper.config.source, 8, read, lengths=[130], starts=[3]))
    mapped = paged(mapper.config.target, 16, lengths=[130], starts=[3])
    map_paged(plan, pages, mapped)
    whole = mapped.pool.clone()
    for workspace_bytes in (20_000, 40_000, 100_000):
        mapped.pool.fill_(FILL)

        def run(bound=workspace_bytes):
            map_paged(plan, pages, mapped, workspace_bytes=bound)

        assert 1 <= tokens_at_once(plan, workspace_bytes) < 130
        # Not far below either, or the bound would be no use.
        assert workspace_bytes / 2 < peak_bytes(run) <= workspace_bytes
        torch.testing.assert_close(mapped.pool, whole, rtol=1e-5, atol=1e-5)
    with pytest.raises(UsageError, match="does not hold one token"):
        map_paged(plan, pages, mapped, workspace_bytes=500)


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(name):
    side, error, message, spoil = BAD[name]
    mapper = mapper_of("qwen3", "llama")
    pages = fill_source(paged(mapper.config.source, 4))
    mapped = paged(mapper.config.target, 8)
    good = mapped.pool
    if side == "source":
        pages = spoil(pages)
    else:
        mapped = spoil(mapped)
    with pytest.raises(error, match=message):
        map_paged(make_plan(mapper), pages, mapped, workspace_bytes=10_000)
    assert bool((good == FILL).all())


def test_pools_that_share_memory_are_refused():
    mapper = mapper_of("qwen3", "qwen3", top_k=1)
    config = mapper.config
    memory = torch.zeros(20, 4, 2, 2, 4, 16)
    pages = replace(paged(config.source, 4, blocks=20), pool=memory[:, :3])
    mapped = replace(paged(config.target, 4, blocks=20), pool=memory)
    with pytest.raises(UsageError, match="share memory"):
        map_paged(make_plan(mapper), pages, mapped)


def test_a_result_that_overflows_is_an_error():
    mapper = mapper_of("qwen3", "llama")
    mapper.value_bias[2] += 1e5  # above float16's largest number
    pages = fill_source(paged(mapper.config.source, 4))
    mapped = paged(mapper.config.target, 8, torch.float16)
    with pytest.raises(VerificationError, match=r"mapped cache is not finite .* layer 2"):
        map_paged(make_plan(mapper), pages, mapped)


def test_rows_of_the_source_may_share_blocks():
    mapper = mapper_of("qwen3", "llama")
    pages = fill_source(paged(mapper.config.source, 4, lengths=[6, 6], starts=[2, 2]))
    pages = changed(pages, "block_table", 1, pages.block_table[0])
    mapped = paged(mapper.config.target, 8, lengths=[6, 6], starts=[2, 2])
    map_paged(make_plan(mapper), pages, mapped)
    first, second = mapped.pool[mapped.block_table[:, 0]]
    assert torch.equal(first, second)
    assert_maps_as(mapper, pages, mapped, rtol=1e-5, atol=1e-5)


def test_no_tokens_are_nothing_to_do():
    mapper = mapper_of("qwen3", "llama")
    for rows in (0, 2):
        pages = paged(mapper.config.source, 4, lengths=[0, 0], starts=[0, 0])
        pages = PagedCache(pages.pool, *(part[:rows] for part in list(vars(pages).values())[1:]))
        mapped = paged(mapper.config.target, 8, lengths=[0, 0], starts=[0, 0])
        mapped = PagedCache(mapped.pool, *(part[:rows] for part in list(vars(mapped).values())[1:]))
        map_paged(make_plan(mapper), pages, mapped)
        assert bool((mapped.pool == FILL).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", ["all", "matched"])
def test_cuda_maps_as_the_cpu_does(heads, dtype):
    mapper = mapper_of("llama", "glm4", heads, dtype=dtype)
    pages = fill_source(paged(mapper.config.source, 4, dtype))
    mapped = paged(mapper.config.target, 8, dtype)
    on_gpu = [
        PagedCache(*(part.cuda() for part in vars(cache).values())) for cache in (pages, mapped)
    ]
    map_paged(make_plan(mapper), pages, mapped)
    map_paged(make_plan(mapper.cuda()), *on_gpu)
    # In bfloat16 the GPU rounds content keys and products as well, before and after the weights.
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(on_gpu[1].pool.cpu(), mapped.pool, rtol=tolerance, atol=tolerance)
