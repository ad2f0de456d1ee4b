"""Paged caches for the tests of what maps on them, good ones and bad ones."""

from dataclasses import replace

import torch
from kvhub.exporters.paged_cache import PagedCache
from mapping import random_mapper
from tiny import tiny_config

from kvhub import ModelSpec
from kvhub.cache import build_cache
from kvhub.errors import IncompatiblePairError, UsageError, VerificationError

LENGTHS, STARTS = [9, 0, 1, 21], [0, 5, 7000, 30000]
FILL = 7.25  # in every dtype
UNUSED = [-1, 2**31 - 1]  # what a table may hold where no token needs a block


def mapper_of(source, target, heads="all", *, head_dim=16, **options):
    specs = (
        ModelSpec.from_config(tiny_config(source, 3, head_dim=head_dim)),
        ModelSpec.from_config(tiny_config(target, 4, head_dim=head_dim)),
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


def padded(pool):
    """The same pool inside of a larger buffer."""
    buffer = torch.full([size + 2 for size in pool.shape], FILL, dtype=pool.dtype)
    inside = buffer[tuple(slice(1, -1) for _ in pool.shape)]
    return inside.copy_(pool), buffer


def layers_first(pool):
    """The same pool as separate layers of [blocks, tokens, heads, head_dim]."""
    buffer = pool.permute(1, 2, 0, 4, 3, 5).contiguous()
    return buffer.permute(2, 0, 1, 4, 3, 5), buffer


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
