"""Checking a spec's RoPE against what the live model does."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvhub.cache import cache_argument, cache_of, read_cache
from kvhub.errors import IncompatiblePairError
from kvhub.rope import strip_rope
from kvhub.spec import ModelSpec, RopeSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_TOKENS = 8
# Far enough for the slow pairs to turn visibly. Beyond it, frequencies that another device rounded
# differently in float32 would turn the fast pairs visibly too.
FARTHEST_POSITION = 131072
# Of the length of a pair of key dims. Two roundings of bfloat16 keys cost less than 0.01; a pair
# turned by an angle that is off by this much already fails.
TOLERANCE = 0.02


@torch.no_grad()
def verify_rope(model: "PreTrainedModel", spec: ModelSpec) -> None:
    """Raise unless a live model rotates its keys as its spec says.

    The content keys of the first layer depend on the token alone. So the same tokens at position
    0 and far away must give the same keys once the rotation is removed, and other ones before.

    Parameters
    ----------
    model
        The model; it runs twice over 8 tokens.
    spec
        Its spec, with a supported RoPE.

    Raises
    ------
    IncompatiblePairError
        If the stripped keys differ, the cached keys do not, or their shape is not the spec's.
    """
    rope = spec.require_rope()
    far = max(min(spec.max_positions, FARTHEST_POSITION) - PROBE_TOKENS, 1)
    starts = (0, far)
    was_training = model.training
    model.train(False)
    try:
        rotated = [_first_layer_keys(model, spec, start) for start in starts]
    finally:
        model.train(was_training)
    name = spec.model_id or spec.model_type
    content = [
        strip_rope(keys, _positions(start, keys.device), rope)
        for keys, start in zip(rotated, starts, strict=True)
    ]
    # A rotation that the spec puts elsewhere leaves its mark in any dims, so all are compared.
    error = _difference(content[0], content[1], rope)
    if not error <= TOLERANCE:
        raise IncompatiblePairError(
            f"{name} does not rotate its keys as its spec says: expected the keys of the same "
            f"tokens at positions 0 and {far} to agree within {TOLERANCE} after the rotation is "
            f"removed, found a relative difference of {error:.3g}.",
            "Load the model with from_pretrained(..., dtype=...): model.to(dtype) also rounds the "
            "frequencies. If that is not it, this model type is not supported.",
        )
    if _difference(rotated[0].float(), rotated[1].float(), rope) <= TOLERANCE:
        raise IncompatiblePairError(
            f"Expected {name} to rotate its keys, found the same keys at positions 0 and {far}.",
            "The model ignores position_ids or its keys are constant; use another one.",
        )
    _verify_scaling(model, rope, name)


def _positions(start: int, device: torch.device) -> Tensor:
    return torch.arange(start, start + PROBE_TOKENS, device=device)


def _first_layer_keys(model: "PreTrainedModel", spec: ModelSpec, start: int) -> Tensor:
    """Return rotated keys ``[1, kv_heads, PROBE_TOKENS, head_dim]`` of fixed tokens."""
    tokens = (torch.arange(PROBE_TOKENS, device=model.device) * 37 + 11) % spec.vocab_size
    output = model(
        tokens[None],
        position_ids=_positions(start, model.device)[None],
        use_cache=True,
        **{cache_argument(model): None},
    )
    keys, _ = read_cache(cache_of(output), spec)
    return keys[0]


def _difference(first: Tensor, second: Tensor, rope: RopeSpec) -> float:
    """Return the largest relative difference of any pair of dims, over all heads and tokens."""

    def squared_norms(keys: Tensor) -> Tensor:
        squares = keys.double().square().sum(dim=(0, 1, 2))
        pair = squares[: rope.rotary_dim]
        pair = pair.view(-1, 2) if rope.interleaved else pair.view(2, -1).T
        return torch.cat([pair.sum(-1), squares[rope.rotary_dim :]])

    # The bound only keeps dims that are zero in both from giving 0 / 0.
    ratio = squared_norms(first - second) / squared_norms(first).clamp_min(1e-30)
    return ratio.max().sqrt().item()


def _verify_scaling(model: "PreTrainedModel", rope: RopeSpec, name: str) -> None:
    """Compare the attention scaling, which stripped keys of both positions share."""
    rotaries = (module for module in model.modules() if hasattr(module, "inv_freq"))
    scalings = (getattr(module, "attention_scaling", None) for module in rotaries)
    found = {float(scaling) for scaling in scalings if isinstance(scaling, float | int)}
    if found and not any(abs(scaling - rope.attention_scaling) < 1e-6 for scaling in found):
        raise IncompatiblePairError(
            f"Expected {name} to scale cos and sin by {rope.attention_scaling}, found "
            f"{sorted(found)}.",
            "Read the spec from this model: ModelSpec.from_model(model).",
        )
