"""A KV cache in blocks of a pool, and the checks before anything reads or writes one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from kvhub.exporters.map_plan import MapPlan
from torch import Tensor

from kvhub.errors import IncompatiblePairError, UsageError, VerificationError

__all__ = ["KEYS", "VALUES", "Cells", "PagedCache", "check_caches", "layer_parts", "require_finite"]

POOL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
KEYS, VALUES = 0, 1  # in a pool's third dim


class Cells(NamedTuple):
    """Where some tokens lie in a pool, and their absolute positions: `[tokens]` int64."""

    blocks: Tensor
    slots: Tensor
    positions: Tensor


@dataclass(frozen=True, eq=False)
class PagedCache:
    """A KV cache in blocks of a pool. Keys are in rotated space.

    Attributes
    ----------
    pool
        `[blocks, layers, 2, kv_heads, tokens_per_block, head_dim]` float32, float16 or bfloat16;
        keys at 0 and values at 1 of the third dim. Any strides, but a head's dims lie together.
    block_table
        `[rows, max_blocks]` int32: token t of a row is in slot t % tokens_per_block of block
        `block_table[row, t // tokens_per_block]`. Entries that no token needs may be anything.
    lengths
        `[rows]` integers: tokens of each row.
    start_positions
        `[rows]` integers: the absolute position of each row's first token.
    """

    pool: Tensor
    block_table: Tensor
    lengths: Tensor
    start_positions: Tensor

    @property
    def tokens_per_block(self) -> int:
        return self.pool.shape[4]

    def cells(self, start: int, stop: int) -> Cells:
        """Where tokens `start` up to `stop` lie, counted over all rows, one after the other."""
        ends = self.lengths.long().cumsum(0)
        index = torch.arange(start, stop, device=self.pool.device)
        rows = torch.searchsorted(ends, index, right=True)
        tokens = index - (ends - self.lengths)[rows]
        blocks = self.block_table[rows, tokens // self.tokens_per_block].long()
        slots = tokens % self.tokens_per_block
        positions = self.start_positions[rows].long() + tokens
        return Cells(blocks, slots, positions)

    def read(self, cells: Cells, layers: Sequence[int], kind: int, groups: int = 1) -> Tensor:
        """A copy of some tokens' keys or values.

        `[layers, groups, tokens, kv_heads / groups, head_dim]`: as a product's features.
        """
        runs, index = self._runs(cells, layers, kind, groups)
        return runs.index_select(0, index.flatten()).view(*index.shape, -1)

    def write(self, cells: Cells, layers: Sequence[int], kind: int, states: Tensor) -> None:
        """The inverse of `read`: these cells and no others."""
        runs, index = self._runs(cells, layers, kind, states.shape[1])
        runs.index_copy_(0, index.flatten(), states.flatten(0, -2))

    def _runs(self, cells: Cells, layers: Sequence[int], kind: int, groups: int) -> list[Tensor]:
        """Every run of head_dim numbers in memory, overlapping, and which of them are meant."""
        # Selecting from these costs a CPU a sixth of indexing by block, layer, head and slot.
        states, device = self.pool[:, :, kind], self.pool.device
        block_stride, layer_stride, head_stride, slot_stride, _ = states.stride()
        heads, head_dim = states.shape[2], states.shape[-1]
        # [layers, 1, 1, 1] + [groups, 1, heads of a group] + [tokens, 1]
        index = (
            torch.tensor(layers, device=device)[:, None, None, None] * layer_stride
            + torch.arange(heads, device=device).view(groups, 1, -1) * head_stride
            + (cells.blocks * block_stride + cells.slots * slot_stride)[:, None]
        )
        return [states.as_strided((_reach(states) + 1 - head_dim, head_dim), (1, 1)), index]


def check_caches(plan: MapPlan, source: PagedCache, target: PagedCache) -> None:
    """Raise where mapping, as `map_paged`, would read or write what it should not.

    Touches no pool. Waits for the device: it looks at the tables.

    Raises
    ------
    IncompatiblePairError
        A pool that is not one of the plan's models, or something not on the plan's device.
    UsageError
        A wrong dtype, shape or stride; a negative length or position; lengths that the table does
        not hold or that differ between source and target; a needed block that the pool does not
        have; a target block that is needed twice; or pools that share memory.
    """
    for side, cache in (("source", source), ("target", target)):
        _check_cache(side, cache, plan)
    lengths, found_lengths = source.lengths.tolist(), target.lengths.tolist()
    if len(lengths) != len(found_lengths):
        raise UsageError(
            f"The source has {len(lengths)} rows and the target {len(found_lengths)}; expected as "
            "many."
        )
    for row, (length, found) in enumerate(zip(lengths, found_lengths, strict=True)):
        if length != found:
            raise UsageError(
                f"Row {row} has {length} tokens in the source and {found} in the target.",
                "Allocate target blocks for as many tokens as the source has, row by row.",
            )
    counts = needed_blocks(target)[1].bincount(minlength=1)
    if int(counts.max()) > 1:
        raise UsageError(
            f"Target block {int(counts.argmax())} is needed {int(counts.max())} times; expected "
            "every block to hold other tokens.",
            "Give each row its own target blocks.",
        )
    if _overlaps_itself(target.pool):
        raise UsageError(
            f"Cells of the target's pool share memory: shape {list(target.pool.shape)}, strides "
            f"{list(target.pool.stride())}.",
            "Pass a pool that was not made by expand.",
        )
    (first, first_end), (second, second_end) = _extent(source.pool), _extent(target.pool)
    if first < second_end and second < first_end:
        raise UsageError(
            "The source's and the target's pool share memory.",
            "Allocate the target's pool for itself.",
        )


def _check_cache(side: str, cache: PagedCache, plan: MapPlan) -> None:
    layers, kv_heads, head_dim = (
        getattr(plan, f"{side}_{name}") for name in ("layers", "kv_heads", "head_dim")
    )
    pool, table = cache.pool, cache.block_table
    shape = list(pool.shape)
    if len(shape) != 6 or shape[1:4] + shape[5:] != [layers, 2, kv_heads, head_dim]:
        raise IncompatiblePairError(
            f"The {side}'s pool must be [blocks, {layers}, 2, {kv_heads}, tokens_per_block, "
            f"{head_dim}], found {shape}.",
            "Pass the pool of the model that the mapper was fitted for, its dims in this order.",
        )
    tensors = (
        ("pool", pool, POOL_DTYPES),
        ("block_table", table, (torch.int32,)),
        ("lengths", cache.lengths, INTEGERS),
        ("start_positions", cache.start_positions, INTEGERS),
    )
    for name, tensor, dtypes in tensors:
        if tensor.device != plan.device:
            raise IncompatiblePairError(
                f"The {side}'s {name} is on {tensor.device}, the plan on {plan.device}.",
                "Move the mapper before make_plan, or the cache.",
            )
        if tensor.dtype not in dtypes:
            raise UsageError(
                f"The {side}'s {name} must be one of {[*map(str, dtypes)]}, found {tensor.dtype}."
            )
    per_row = {tuple(table.shape[:1])}
    if table.dim() != 2 or {cache.lengths.shape, cache.start_positions.shape} != per_row:
        raise UsageError(
            f"The {side}'s block_table must be [rows, max_blocks], its lengths and start_positions "
            f"[rows]; found {list(table.shape)}, {list(cache.lengths.shape)} and "
            f"{list(cache.start_positions.shape)}."
        )
    if pool.stride(5) != 1 or not cache.tokens_per_block:
        raise UsageError(
            f"The {side}'s pool must hold a head's dims one after the other, and tokens: expected "
            f"a last stride of 1, found shape {shape} and strides {list(pool.stride())}.",
            "Permute any dims but the last, or pass a contiguous pool.",
        )
    _check_table(side, cache)


def _check_table(side: str, cache: PagedCache) -> None:
    lengths, starts = cache.lengths.tolist(), cache.start_positions.tolist()
    capacity = cache.block_table.shape[1] * cache.tokens_per_block
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        if not 0 <= length <= capacity or start < 0:
            raise UsageError(
                f"Row {row} of the {side} has {length} tokens from position {start}; expected 0 to "
                f"{capacity}, what its row of the block table holds, and a position from 0.",
                "Pass a wider block table, or the lengths that belong to this one.",
            )
    rows, blocks = needed_blocks(cache)
    outside = (blocks < 0) | (blocks >= cache.pool.shape[0])
    if bool(outside.any()):
        first = int(outside.nonzero()[0])
        raise UsageError(
            f"Row {int(rows[first])} of the {side} needs block {int(blocks[first])}; expected 0 to "
            f"{cache.pool.shape[0] - 1}, the blocks of its pool.",
            "Pass the block table of this pool, and lengths that it has blocks for.",
        )


def needed_blocks(cache: PagedCache) -> tuple[Tensor, Tensor]:
    """The table's entries that hold a token: their rows, and the blocks that they name."""
    first_tokens = torch.arange(cache.block_table.shape[1], device=cache.pool.device)
    needed = first_tokens * cache.tokens_per_block < cache.lengths[:, None]
    return needed.nonzero()[:, 0], cache.block_table[needed]


def _overlaps_itself(pool: Tensor) -> bool:
    dims = sorted((step, size) for size, step in zip(pool.shape, pool.stride(), strict=True))
    reach = 0
    for step, size in dims:
        if size > 1 and step <= reach:
            return True
        reach += (size - 1) * step
    return False


def _extent(pool: Tensor) -> tuple[int, int]:
    """The addresses of a pool's first byte and of the one after its last."""
    if not pool.numel():
        return 0, 0
    return pool.data_ptr(), pool.data_ptr() + _reach(pool) * pool.element_size()


def _reach(pool: Tensor) -> int:
    """Numbers from a tensor's first to its last in memory, both counted."""
    return 1 + sum((size - 1) * step for size, step in zip(pool.shape, pool.stride(), strict=True))


def layer_parts(layers: Sequence[int], size: int) -> list[Sequence[int]]:
    """The layers, at most `size` at a time."""
    return [layers[start : start + size] for start in range(0, len(layers), size)]


def require_finite(
    cache: PagedCache, span: tuple[int, int], layers: Sequence[int], what: str, at_once: int = 1
) -> None:
    """Raise VerificationError with the first number of these tokens that is not finite."""
    cells = cache.cells(*span)
    # One pass over the numbers and one wait per span. No sum hides an infinity or a NaN, but it
    # may overflow by itself, hence the second look.
    sums = [
        cache.read(cells, part, kind).sum(dtype=torch.float32)
        for part, kind in product(layer_parts(layers, at_once), (KEYS, VALUES))
    ]
    if bool(torch.isfinite(torch.stack(sums)).all()):
        return
    for layer, kind in product(layers, (KEYS, VALUES)):
        bad = (~torch.isfinite(cache.read(cells, [layer], kind))).nonzero()[:1].tolist()
        for _, _, token, head, _ in bad:
            raise VerificationError(
                f"The {what} cache is not finite as {cache.pool.dtype}: first the "
                f"{'values' if kind else 'keys'} of layer {layer}, KV head {head}, block "
                f"{int(cells.blocks[token])}, slot {int(cells.slots[token])}.",
                "Use a wider dtype (bfloat16 or float32), or prefill the target itself.",
            )
