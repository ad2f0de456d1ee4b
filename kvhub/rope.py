"""Removing rotary position embeddings from cached keys, and putting them back.

Caches hold rotated keys. A map between models is fitted on content keys, the keys before rotation,
because those do not depend on the position and the two models may rotate differently.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvhub.errors import UsageError


class Rope(Protocol):
    """How a model rotates its keys; a `RopeSpec` is one, and explains the four."""

    @property
    def rotary_dim(self) -> int: ...
    @property
    def interleaved(self) -> bool: ...
    @property
    def attention_scaling(self) -> float: ...
    @property
    def inv_freq(self) -> Sequence[float] | Tensor: ...


def strip_rope(rotated_keys: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Undo the rotation of cached keys.

    For each pair of rotating dims a model caches ``k' = a R(p w) k``, with position ``p``, inverse
    frequency ``w``, rotation ``R`` and attention scaling ``a`` (YaRN multiplies both cos and sin by
    it). The transposed product gives ``(a R)^T k' = a^2 k``, so ``k = (a R)^T k' / a^2``.

    Parameters
    ----------
    rotated_keys
        ``[..., kv_heads, tokens, head_dim]``, rotated space, any floating dtype.
    positions
        Absolute positions, ``[tokens]`` for all rows, or ``[batch, tokens]`` with keys
        ``[..., batch, kv_heads, tokens, head_dim]``. Integers.
    rope
        How the model that wrote the keys rotates them.

    Returns
    -------
    Tensor
        Content keys of the same shape; float64 for float64 keys, else float32.

    Raises
    ------
    UsageError
        If the shapes do not fit each other or the positions are not integers.
    """
    dtype = _working_precision(rotated_keys)
    return Rotation(positions, rope, dtype, rotated_keys.device).strip(rotated_keys)


def apply_rope(content_keys: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Rotate content keys as the model of `rope` does before it caches them.

    Parameters
    ----------
    content_keys
        ``[..., kv_heads, tokens, head_dim]``, content space, any floating dtype.
    positions
        Absolute positions, ``[tokens]`` for all rows, or ``[batch, tokens]`` with keys
        ``[..., batch, kv_heads, tokens, head_dim]``. Integers.
    rope
        How the model that will read the keys rotates them.

    Returns
    -------
    Tensor
        Rotated keys of the same shape; float64 for float64 keys, else float32.

    Raises
    ------
    UsageError
        If the shapes do not fit each other or the positions are not integers.
    """
    dtype = _working_precision(content_keys)
    return Rotation(positions, rope, dtype, content_keys.device).apply(content_keys)


class Rotation:
    """How a model rotates keys at some positions: its cos and sin, computed once for many layers.

    Parameters
    ----------
    positions
        Absolute positions, ``[tokens]`` for all rows, or ``[batch, tokens]``. Integers.
    rope
        How the model rotates.
    dtype, device
        Of cos and sin: float32, or float64 for float64 keys.

    Raises
    ------
    UsageError
        If the positions are not integers, or, on use, do not fit the keys.
    """

    def __init__(
        self,
        positions: Tensor,
        rope: Rope,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if positions.is_floating_point() or positions.dtype == torch.bool:
            raise UsageError(f"Positions must be integers, found {positions.dtype}.")
        self.positions_shape = tuple(positions.shape)
        self.rope = rope
        inv_freq = torch.as_tensor(rope.inv_freq, dtype=torch.float32, device=device)
        # transformers multiplies in float32. Far from position 0 that product is off by more than
        # float32 keys resolve, so undoing it needs the same rounding and not a better one.
        angles = positions.to(device)[..., None].to(torch.float32) * inv_freq
        if positions.dim() == 2:
            angles = angles.unsqueeze(-3)
        angles = angles.to(dtype)
        # [(batch, 1,) tokens, rotary_dim / 2]
        self.cos = angles.cos() * rope.attention_scaling
        self.sin = angles.sin() * rope.attention_scaling
        self.strip_cos = self.cos / rope.attention_scaling**2
        self.strip_sin = -self.sin / rope.attention_scaling**2

    def strip(self, rotated_keys: Tensor) -> Tensor:
        """As `strip_rope`."""
        return self._turn(rotated_keys, self.strip_cos, self.strip_sin)

    def apply(self, content_keys: Tensor) -> Tensor:
        """As `apply_rope`."""
        return self._turn(content_keys, self.cos, self.sin)

    def _turn(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        _check_shapes(keys, self.positions_shape, self.rope)
        keys = keys.to(cos.dtype)
        # In place on one copy: a rotation costs the memory that it touches.
        turned = keys.clone()
        first, second = _pairs(keys, self.rope)
        turned_first, turned_second = _pairs(turned, self.rope)
        turned_first.mul_(cos).addcmul_(second, sin, value=-1)
        turned_second.mul_(cos).addcmul_(first, sin)
        return turned


def _pairs(keys: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second dim of every rotating pair."""
    rotating = keys[..., : rope.rotary_dim]
    if rope.interleaved:
        return rotating[..., 0::2], rotating[..., 1::2]
    half = rope.rotary_dim // 2
    return rotating[..., :half], rotating[..., half:]


def _working_precision(keys: Tensor) -> torch.dtype:
    if not keys.is_floating_point():
        raise UsageError(f"Keys must be floating point, found {keys.dtype}.")
    return torch.float64 if keys.dtype == torch.float64 else torch.float32


def _check_shapes(keys: Tensor, positions: tuple[int, ...], rope: Rope) -> None:
    if keys.dim() < 3 or keys.shape[-1] < rope.rotary_dim:
        raise UsageError(
            f"Expected keys [..., kv_heads, tokens, head_dim] with head_dim of at least "
            f"{rope.rotary_dim}, the dims that rotate, found shape {list(keys.shape)}."
        )
    tokens = keys.shape[-2]
    fits = len(positions) in (1, 2) and positions[-1] == tokens
    if len(positions) == 2:
        fits = fits and keys.dim() >= 4 and positions[0] in (1, keys.shape[-4])
    if not fits:
        raise UsageError(
            f"Expected positions [{tokens}] or [batch, {tokens}] for keys of shape "
            f"{list(keys.shape)}, found positions of shape {list(positions)}."
        )
