"""An engine's pool of blocks, as one rank has it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FLOAT8", "Pool", "as_bytes"]

FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, eq=False)
class Pool:
    """Blocks of some KV heads.

    Attributes
    ----------
    states
        `[blocks, layers, 2, kv_heads, tokens_per_block, head_dim]`, in any strides with a head's
        dims side by side; keys rotated.
    heads
        The first of the model's KV heads that these are, and the one after the last.
    chunk_tokens
        Tokens that are read and written at once.
    """

    states: Tensor
    heads: tuple[int, int]
    chunk_tokens: int

    @property
    def tokens_per_block(self) -> int:
        return self.states.shape[4]

    @property
    def chunk_bytes(self) -> int:
        block = self.states[0]
        return block.numel() * block.element_size() // self.tokens_per_block * self.chunk_tokens

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
        states = as_bytes(self.states)[at, :, :, :, slots]
        return states.permute(1, 2, 3, 0, 4).contiguous().view(self.states.dtype)

    def write(self, start: int, blocks: Sequence[int], states: Tensor) -> None:
        """The inverse of `read`; `states` may be on another device."""
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
