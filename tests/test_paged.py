"""The map on paged pools: against KVMapper, cell by cell, and never a cell too many."""

from dataclasses import replace

import pytest
import torch
from kvhub.exporters.paged import PagedCache, map_paged, tokens_at_once
from kvhub.exporters.plan import make_plan
from mapping import random_mapper
from tiny import tiny_config
from torch.profiler import ProfilerActivity, profile

from kvhub import ModelSpec
from kvhub.cache import build_cache
from kvhub.errors import IncompatiblePairError, UsageError, VerificationError
from kvhub.rope import apply_rope, strip_rope

LENGTHS, STARTS = [9, 0, 1, 21], [0, 5, 7000, 30000]
FILL = 7.25  # in every dtype
UNUSED = [-1, 2**31 - 1]  # what a table may hold where no token needs a block
ROPES = [
    ("qwen3", "llama"),
    ("llama", "arcee"),  # attention scaling
    ("arcee", "glm4"),  # partial and interleaved
    ("cohere", "stablelm"),
    ("glm4", "qwen3"),
]


def mapper_of(source, target, heads="all", **options):
    specs = (
        ModelSpec.from_config(tiny_config(source, 3)),
        ModelSpec.from_config(tiny_config(target, 4)),
    )
    return random_mapper(*specs, heads, **options)


def paged(spec, tokens_per_block, dtype=torch.float32, lengths=LENGTHS, starts=STARTS, blocks=None):
    """A pool full of `FILL` with a shuffled block table, and entries to spare."""
    needed = [-(-length // tokens_per_block) for length in lengths]
    blocks = blocks or sum(needed) + 3
    pool = torch.full(
        (blocks, spec.num_layers, 2, spec.kv_heads, tokens_per_block, spec.head_dim),
        FILL,
        dtype=dtype,
    )
    table = torch.tensor(UNUSED * (max(needed) // 2 + 1)).repeat(len(lengths), 1).int()
    order = torch.randperm(blocks).int().split([*needed, blocks - sum(needed)])
    for row, ids in enumerate(order[: len(lengths)]):
        table[row, : len(ids)] = ids
    return PagedCache(pool, table, torch.tensor(lengths), torch.tensor(starts, dtype=torch.int32))


def cell(cache, row, token):
    """`[layers, 2, kv_heads, head_dim]` of one token, a view."""
    size = cache.pool.shape[4]
    return cache.pool[cache.block_table[row, token // size], :, :, :, token % size]


def fill_source(cache):
    """Random states for every token; the rest is NaN, which nobody may read."""
    cache.pool.fill_(float("nan"))
    for row, length in enumerate(cache.lengths.tolist()):
        for token in range(length):
            states = cell(cache, row, token)
            states.copy_(torch.randn(states.shape))
    return cache


def dense(cache, row):
    """A row as a transformers cache, and its positions."""
    length = int(cache.lengths[row])
    states = torch.stack([cell(cache, row, token) for token in range(length)])
    # [tokens, layers, 2, kv_heads, head_dim] -> [layers, 2, batch, kv_heads, tokens, head_dim]
    states = states.permute(1, 2, 3, 0, 4).unsqueeze(2)
    return build_cache(states[:, 0], states[:, 1]), cache.start_positions[row] + torch.arange(
        length
    )


def assert_maps_as(mapper, source, target, rtol, atol):
    """Every token is what KVMapper makes of it, and every other cell is `FILL`."""
    for row, length in enumerate(source.lengths.tolist()):
        if not length:
            continue
        found, _ = dense(target, row)
        states, positions = dense(source, row)
        expected = mapper(states, positions=positions, dtype=target.pool.dtype)
        for a, b in zip(found.layers, expected.layers, strict=True):
            torch.testing.assert_close(a.keys, b.keys, rtol=rtol, atol=atol)
            torch.testing.assert_close(a.values, b.values, rtol=rtol, atol=atol)
        for token in range(length):
            cell(target, row, token).fill_(FILL)
    assert bool((target.pool == FILL).all())


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


def padded(pool):
    """The same pool inside of a larger buffer."""
    buffer = torch.full([size + 2 for size in pool.shape], FILL, dtype=pool.dtype)
    inside = buffer[tuple(slice(1, -1) for _ in pool.shape)]
    return inside.copy_(pool), buffer


def layers_first(pool):
    """The same pool as separate layers of [blocks, tokens, heads, head_dim]."""
    buffer = pool.permute(1, 2, 0, 4, 3, 5).contiguous()
    return buffer.permute(2, 0, 1, 4, 3, 5), buffer


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


def changed(cache, name, row, value):
    tensor = getattr(cache, name).clone()
    tensor[row] = value
    return replace(cache, **{name: tensor})


OVERLAPPING = (1024, 512, 256, 128, 16, 1)  # of [blocks, 4, 2, 2, 8, 16]: a block reaches 2048 far
# Side, error, message, and how a good cache becomes a bad one.
BAD = {
    "block past the pool": (
        *("source", UsageError, "Row 0 of the source needs block 99"),
        lambda cache: changed(cache, "block_table", (0, 1), 99),
    ),
    "negative block": (
        *("target", UsageError, "Row 3 of the target needs block -1"),
        lambda cache: changed(cache, "block_table", (3, 0), -1),
    ),
    "block taken twice": (
        *("target", UsageError, "needed 2 times"),
        lambda cache: changed(cache, "block_table", (0, 0), int(cache.block_table[3, 1])),
    ),
    "longer than the table": (
        *("source", UsageError, "Row 2 of the source has 500 tokens"),
        lambda cache: changed(cache, "lengths", 2, 500),
    ),
    "negative length": (
        *("source", UsageError, "Row 2 of the source has -1 tokens"),
        lambda cache: changed(cache, "lengths", 2, -1),
    ),
    "negative position": (
        *("target", UsageError, "from position -3"),
        lambda cache: changed(cache, "start_positions", 0, -3),
    ),
    "other lengths": (
        *("target", UsageError, "Row 0 has 9 tokens in the source and 8 in the target"),
        lambda cache: changed(cache, "lengths", 0, 8),
    ),
    "fewer rows": (
        *("target", UsageError, "The source has 4 rows and the target 3"),
        lambda cache: PagedCache(
            cache.pool, cache.block_table[:3], cache.lengths[:3], cache.start_positions[:3]
        ),
    ),
    "missing position": (
        *("source", UsageError, r"found \[4, \d\], \[4\] and \[3\]"),
        lambda cache: replace(cache, start_positions=cache.start_positions[:3]),
    ),
    "wide table": (
        *("target", UsageError, "block_table must be one of .*int32.*, found torch.int64"),
        lambda cache: replace(cache, block_table=cache.block_table.long()),
    ),
    "float lengths": (
        *("source", UsageError, "lengths must be one of"),
        lambda cache: replace(cache, lengths=cache.lengths.float()),
    ),
    "double pool": (
        *("target", UsageError, "pool must be one of .*, found torch.float64"),
        lambda cache: replace(cache, pool=cache.pool.double()),
    ),
    "layer missing": (
        *("source", IncompatiblePairError, r"pool must be \[blocks, 3, 2, 2, tokens"),
        lambda cache: replace(cache, pool=cache.pool[:, :2]),
    ),
    "tokens before heads": (
        *("target", IncompatiblePairError, r"found \[\d+, 4, 2, 8, 2, 16\]"),
        lambda cache: replace(cache, pool=cache.pool.transpose(3, 4)),
    ),
    "strided dims": (
        *("target", UsageError, "a last stride of 1"),
        lambda cache: replace(cache, pool=cache.pool.repeat_interleave(2, -1)[..., ::2]),
    ),
    "expanded": (
        *("target", UsageError, "Cells of the target's pool share memory"),
        lambda cache: replace(cache, pool=cache.pool[:1].expand(cache.pool.shape)),
    ),
    "overlapping": (
        *("target", UsageError, "Cells of the target's pool share memory"),
        lambda cache: replace(cache, pool=cache.pool.as_strided(cache.pool.shape, OVERLAPPING)),
    ),
    "elsewhere": (
        *("target", IncompatiblePairError, "pool is on meta, the plan on cpu"),
        lambda cache: replace(cache, pool=cache.pool.to("meta")),
    ),
    "not finite": (
        *("source", VerificationError, "the values of layer 1, KV head 0, block"),
        lambda cache: (cell(cache, 3, 20)[1, 1, 0].fill_(float("inf")), cache)[1],
    ),
}


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
