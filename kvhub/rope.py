"""Removing rotary position embeddings from cached keys, and putting them back.

Caches hold rotated keys. A map between models is fitted on content keys, the keys before rotation,
because those do not depend on the position and the two models may rotate differently.
"""

import torch
from torch import Tensor

from kvhub.errors import UsageError
from kvhub.spec import RopeSpec


def strip_rope(rotated_keys: Tensor, positions: Tensor, rope: RopeSpec) -> Tensor:
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
    keys = _working_precision(rotated_keys)
    cos, sin = _cos_sin(keys, positions, rope)
    squared_scaling = rope.attention_scaling**2
    return _rotate(keys, cos / squared_scaling, -sin / squared_scaling, rope)


def apply_rope(content_keys: Tensor, positions: Tensor, rope: RopeSpec) -> Tensor:
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
    keys = _working_precision(content_keys)
    cos, sin = _cos_sin(keys, positions, rope)
    return _rotate(keys, cos, sin, rope)


def _working_precision(keys: Tensor) -> Tensor:
    if not keys.is_floating_point():
        raise UsageError(f"Keys must be floating point, found {keys.dtype}.")
    return keys if keys.dtype == torch.float64 else keys.to(torch.float32)


def _cos_sin(keys: Tensor, positions: Tensor, rope: RopeSpec) -> tuple[Tensor, Tensor]:
    """Return scaled cos and sin, ``[(batch, 1,) tokens, rotary_dim / 2]``, in the keys' dtype."""
    _check_shapes(keys, positions, rope)
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=keys.device)
    # transformers multiplies in float32. Far from position 0 that product is off by more than
    # float32 keys resolve, so undoing it needs the same rounding and not a better one.
    angles = positions.to(keys.device)[..., None].to(torch.float32) * inv_freq
    if positions.dim() == 2:
        angles = angles.unsqueeze(-3)
    angles = angles.to(keys.dtype)
    return angles.cos() * rope.attention_scaling, angles.sin() * rope.attention_scaling


def _rotate(keys: Tensor, cos: Tensor, sin: Tensor, rope: RopeSpec) -> Tensor:
    rotating = keys[..., : rope.rotary_dim]
    if rope.interleaved:
        first, second = rotating[..., 0::2], rotating[..., 1::2]
    else:
        first, second = rotating.chunk(2, dim=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    if rope.interleaved:
        turned = [torch.stack(turned, dim=-1).flatten(-2)]
    return torch.cat([*turned, keys[..., rope.rotary_dim :]], dim=-1)


def _check_shapes(keys: Tensor, positions: Tensor, rope: RopeSpec) -> None:
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise UsageError(f"Positions must be integers, found {positions.dtype}.")
    if keys.dim() < 3 or keys.shape[-1] < rope.rotary_dim:
        raise UsageError(
            f"Expected keys [..., kv_heads, tokens, head_dim] with head_dim of at least "
            f"{rope.rotary_dim}, the dims that rotate, found shape {list(keys.shape)}."
        )
    tokens = keys.shape[-2]
    fits = positions.dim() in (1, 2) and positions.shape[-1] == tokens
    if positions.dim() == 2:
        fits = fits and keys.dim() >= 4 and positions.shape[0] in (1, keys.shape[-4])
    if not fits:
        raise UsageError(
            f"Expected positions [{tokens}] or [batch, {tokens}] for keys of shape "
            f"{list(keys.shape)}, found positions of shape {list(positions.shape)}."
        )
