"""The pool of a vLLM engine, as one rank has it: a tensor per layer, checked before it is used.

All layers are `[blocks, kv_heads, tokens_per_block, 2 * head_dim]`, in strides that depend on the
backend. In the memory of GPU backends each token's key lies in front of its value. The CPU backend
gives that shape to something else: a block's head is its keys as `[head_dim, tokens_per_block]`
and behind them its values as `[tokens_per_block, head_dim]`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from kvhub.exporters.pool import as_bytes
from torch import Tensor

from kvhub.errors import IncompatiblePairError

__all__ = ["LayeredPool", "open_pool", "require_packing"]

# Which of vLLM's instruction sets pack the CPU's blocks as said above; `amx` and others do not.
PLAIN_ISAS = ("vec", "vec16")


@dataclass(frozen=True, eq=False)
class LayeredPool:
    """Blocks of some KV heads, a pair of views per layer: fulfils `kvhub.exporters.pool.Pool`.

    Attributes
    ----------
    keys, values
        Per layer `[blocks, kv_heads, tokens_per_block, head_dim]`, in any strides; keys rotated.
    heads, chunk_tokens
        As `PagedPool` has them.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    heads: tuple[int, int]
    chunk_tokens: int

    @property
    def geometry(self) -> tuple[int, int, int]:
        _, kv_heads, _, head_dim = self.keys[0].shape
        return len(self.keys), kv_heads, head_dim

    @property
    def num_blocks(self) -> int:
        return len(self.keys[0])

    @property
    def tokens_per_block(self) -> int:
        return self.keys[0].shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def chunk_bytes(self) -> int:
        layers, kv_heads, head_dim = self.geometry
        return 2 * layers * kv_heads * head_dim * self.chunk_tokens * self.dtype.itemsize

    @property
    def paged(self) -> Tensor | None:
        """One view of all, where layers, keys and values lie in equal steps of one memory.

        So they do in the memory of vLLM's GPU backends, in every layout; never in that of CPUs.
        """
        parts = [part for pair in zip(self.keys, self.values, strict=True) for part in pair]
        first = parts[0]
        at = [(part.data_ptr() - first.data_ptr()) // first.element_size() for part in parts]
        layer, value = at[2] if len(at) > 2 else 0, at[1]
        equal = [layer * number + part for number in range(len(self.keys)) for part in (0, value)]
        one_memory = {part.untyped_storage().data_ptr() for part in parts}
        strides = {part.stride() for part in parts}
        if at != equal or len(one_memory) > 1 or len(strides) > 1 or first.stride(3) != 1:
            return None
        if layer < 0 or value < 0:
            return None
        block, head, token, dim = first.stride()
        size = (self.num_blocks, len(self.keys), 2, *first.shape[1:])
        return first.as_strided(size, (block, layer, value, head, token, dim))

    def read(self, start: int, blocks: Sequence[int]) -> Tensor:
        """A copy of a chunk, `[layers, 2, kv_heads, tokens, head_dim]`.

        Parameters
        ----------
        start
            Its first token.
        blocks
            That of this token, and those behind it.
        """
        at, slots = self._cells(start, blocks)
        layers = [
            torch.stack([as_bytes(part)[at, :, slots] for part in pair])
            for pair in zip(self.keys, self.values, strict=True)
        ]
        return torch.stack(layers).transpose(2, 3).contiguous().view(self.dtype)

    def write(self, start: int, blocks: Sequence[int], states: Tensor) -> None:
        """The inverse of `read`; `states` may be on another device."""
        at, slots = self._cells(start, blocks)
        moved = as_bytes(states).to(self.device).transpose(2, 3)
        for pair, layer in zip(zip(self.keys, self.values, strict=True), moved, strict=True):
            for part, new in zip(pair, layer, strict=True):
                as_bytes(part)[at, :, slots] = new

    def _cells(self, start: int, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
        size = self.tokens_per_block
        tokens = start % size + torch.arange(self.chunk_tokens)
        at = torch.tensor(blocks)[tokens // size]
        return at.to(self.device), (tokens % size).to(self.device)


def open_pool(
    layers: Mapping[str, Tensor],
    *,
    heads: tuple[int, int],
    head_dim: int,
    tokens_per_block: int,
    chunk_tokens: int,
) -> LayeredPool:
    """The pool that an engine registers.

    Parameters
    ----------
    layers
        What `register_kv_caches` is given: a tensor by the name of each layer.
    heads, head_dim, tokens_per_block
        As the engine must have them.
    chunk_tokens
        Tokens that are read and written at once.

    Raises
    ------
    IncompatiblePairError
        A layer has another shape, or something in it that is not known here.
    """
    tensors = _in_order(layers)
    expected = [heads[1] - heads[0], tokens_per_block, 2 * head_dim]
    for name, layer in tensors:
        same = layer.dtype == tensors[0][1].dtype and layer.stride() == tensors[0][1].stride()
        if list(layer.shape[1:]) != expected or not same:
            raise IncompatiblePairError(
                f"vLLM's cache of {name} is {list(layer.shape)} as {layer.dtype}; expected "
                f"[blocks, {', '.join(map(str, expected))}], the same in every layer.",
                "Serve the model that the mapper was exported for, on a vLLM that the exported "
                "README.md names.",
            )
    pairs = [_pair(name, layer) for name, layer in tensors]
    keys, values = zip(*pairs, strict=True)
    return LayeredPool(keys, values, heads, chunk_tokens)


def require_packing(isa: str) -> None:
    """Refuse a CPU whose instruction set packs blocks in a way that is not known here.

    Raises
    ------
    IncompatiblePairError
        It does.
    """
    if isa not in PLAIN_ISAS:
        raise IncompatiblePairError(
            f"vLLM packs the CPU's cache for {isa!r}; known are {', '.join(PLAIN_ISAS)}.",
            "On a CPU with AMX, serve as float32: --dtype float32.",
        )


def _in_order(layers: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    numbered = []
    for name, tensor in layers.items():
        found = re.findall(r"\.(\d+)\.", name)
        numbered.append((int(found[0]) if len(found) == 1 else -1, name, tensor))
    numbered.sort(key=lambda item: item[:2])
    if not numbered or [number for number, _, _ in numbered] != list(range(len(numbered))):
        raise IncompatiblePairError(
            f"Expected the cache of layers 0, 1, 2 and so on, found {sorted(layers)}.",
            "Pipeline parallelism, draft models and several caches per layer are not supported.",
        )
    return [(name, tensor) for _, name, tensor in numbered]


def _pair(name: str, layer: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a layer's keys and values, `[blocks, kv_heads, tokens_per_block, head_dim]`."""
    tokens, both = layer.shape[2:]
    dim = both // 2
    if layer.device.type != "cpu":
        if layer.stride(3) != 1:
            raise IncompatiblePairError(
                f"vLLM's cache of {name} has strides {layer.stride()}; expected a token's numbers "
                "side by side."
            )
        return layer[..., :dim], layer[..., dim:]
    if layer.stride()[1:] != (tokens * both, both, 1):
        raise IncompatiblePairError(
            f"vLLM's cache of {name} has strides {layer.stride()}; expected blocks as dense as "
            "its CPU backend makes them."
        )
    halves = layer.view(*layer.shape[:2], 2, tokens * dim)
    keys = halves[:, :, 0].view(*layer.shape[:2], dim, tokens).transpose(2, 3)
    return keys, halves[:, :, 1].view(*layer.shape[:2], tokens, dim)
