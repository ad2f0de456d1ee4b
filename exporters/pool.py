"""An engine's pool of blocks, as one rank has it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["FLOAT8", "PagedPool", "Pool", "as_bytes"]

FLOAT8 = torch.float8_e4m3fn


class Pool(Protocol):
    """Blocks of some KV heads, wherever an engine keeps them. Keys are rotated."""

    @property
    def heads(self) -> tuple[int, int]:
        """The first of the model's KV heads that these are, and the one after the last."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens that are read and written at once."""

    @property
    def geometry(self) -> tuple[int, int, int]:
        """Layers, KV heads, head_dim."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def tokens_per_block(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def paged(self) -> Tensor | None:
        """What can be mapped into: `[blocks, layers, 2, kv_heads, tokens_per_block, head_dim]`.

        In any strides with a head's dims side by side. None where there is no such view: then
        mapped states are written, chunk by chunk.
        """

    def read(self, start: int, blocks: Sequence[int]) -> Tensor:
        """A copy of a chunk, `[layers, 2, kv_heads, tokens, head_dim]`.

        Parameters
        ----------
        start
            Its first token.
        blocks
            That of this token, and those behind it.
        """

    def write(self, start: int, blocks: Sequence[int], states: Tensor) -> None:
        """The inverse of `read`; `states` may be on another device."""


@dataclass(frozen=True, eq=False)
class PagedPool:
    """A pool that is one tensor.

    Attributes
    ----------
    states
        As `Pool.paged`.
    heads, chunk_tokens
        As in `Pool`.
    """

    states: Tensor
    heads: tuple[int, int]
    chunk_tokens: int

    @property
    def geometry(self) -> tuple[int, int, int]:
        _, layers, _, kv_heads, _, head_dim = self.states.shape
        return layers, kv_heads, head_dim

    @property
    def num_blocks(self) -> int:
        return len(self.states)

    @property
    def tokens_per_block(self) -> int:
        return self.states.shape[4]

    @property
    def dtype(self) -> torch.dtype:
        return self.states.dtype

    @property
    def device(self) -> torch.device:
        return self.states.device

    @property
    def chunk_bytes(self) -> int:
        layers, kv_heads, head_dim = self.geometry
        return 2 * layers * kv_heads * head_dim * self.chunk_tokens * self.dtype.itemsize

    @property
    def paged(self) -> Tensor | None:
        return None if self.dtype == FLOAT8 else self.states

    def read(self, start: int, blocks: Sequence[int]) -> Tensor:
        at, slots = self._cells(start, blocks)
        states = as_bytes(self.states)[at, :, :, :, slots]
        return states.permute(1, 2, 3, 0, 4).contiguous().view(self.states.dtype)

    def write(self, start: int, blocks: Sequence[int], states: Tensor) -> None:
        at, slots = self._cells(start, blocks)
        moved = states.permute(3, 0, 1, 2, 4).to(self.states.device)
        as_bytes(self.states)[at, :, :, :, slots] = as_bytes(moved)

    def _cells(self, start: int, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
        size, device = self.tokens_per_block, self.states.device
        tokens = start % size + torch.arange(self.chunk_tokens)
        at = torch.tensor(blocks)[tokens // size]
        return at.to(device), (tokens % size).to(device)


def as_bytes(states: Tensor) -> Tensor:
    """float8 as bytes, which torch can index and copy on every device."""
    return states.view(torch.uint8) if states.dtype == FLOAT8 else states
