"""What a model's attention layers see: their queries, keys and values, and where they look.

Everything here is in rotated space: queries and keys as they meet in the dot product.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvhub.errors import IncompatiblePairError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "AttentionCallback",
    "attention_received",
    "attention_sensitivity",
    "attention_weights",
    "observe_attention",
]

AttentionCallback = Callable[[int, Tensor, Tensor, Tensor, float], None]

IMPLEMENTATION = "kvhub_observed"
# Attention weights that may exist at once: 64 MiB in float32.
MAX_WEIGHTS = 2**24

# transformers has no way to take an implementation back, so one name is registered for good and
# these decide what it does: nothing but sdpa for a module that nobody observes.
_observers: list[tuple[frozenset[nn.Module], AttentionCallback]] = []


def _observed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    scaling = options.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    for modules, callback in list(_observers):
        if module in modules:
            layer: Any = module.layer_idx
            callback(layer, query, key, value, scaling)
    result: tuple[Tensor, Tensor | None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, **options
    )
    return result


@contextmanager
def observe_attention(model: "PreTrainedModel", callback: AttentionCallback) -> Iterator[None]:
    """Call back for every attention layer that runs inside the `with` block.

    Inside, the model computes attention with PyTorch's scaled dot product; afterwards it has its
    own implementation again. Other models are not affected, even if they share its config.

    Parameters
    ----------
    model
        A decoder-only transformers model. Of a multimodal one, the text decoder is observed.
    callback
        Called as `callback(layer_index, queries, keys, values, scaling)` before the layer's
        attention is computed. Queries are `[batch, attention_heads, query_tokens, head_dim]`,
        keys and values `[batch, kv_heads, kv_tokens, head_dim]` with the cached tokens first, all
        in the model's dtype and queries and keys in rotated space. Scores are
        `scaling * queries @ keys^T`. It must not change the tensors. What it raises reaches the
        caller of the model.

    Raises
    ------
    IncompatiblePairError
        The model does not let its attention be replaced.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(IMPLEMENTATION, _observed_attention)
    # Without a mask function of the same name, transformers would run it with no mask at all.
    AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    decoder: PreTrainedModel = model.get_decoder()
    previous = decoder.config._attn_implementation
    observer = (frozenset(decoder.modules()), callback)
    try:
        decoder.set_attn_implementation(IMPLEMENTATION)
        if decoder.config._attn_implementation != IMPLEMENTATION:
            raise IncompatiblePairError(
                f"The attention of {type(model).__name__} cannot be observed: expected a model "
                f"built on transformers' AttentionInterface, found one fixed to {previous!r}.",
                "Use an architecture whose attention is part of transformers, not remote code.",
            )
        _observers.append(observer)
        try:
            yield
        finally:
            _observers.remove(observer)
    finally:
        decoder.set_attn_implementation(previous)


def attention_weights(
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    attention_mask: Tensor | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield exact causal attention weights, some queries at a time so that memory is bounded.

    Parameters
    ----------
    queries
        `[batch, attention_heads, query_tokens, head_dim]`, rotated space: the last
        `query_tokens` of the `kv_tokens` tokens.
    keys
        `[batch, kv_heads, kv_tokens, head_dim]`, rotated space.
    scaling
        Factor on the scores.
    attention_mask
        `[batch, kv_tokens]`, 1 for a token and 0 for padding; None: all are tokens.

    Yields
    ------
    queries
        Slice into the query tokens.
    weights
        `[batch, kv_heads, heads_per_kv_head, queries in the slice, kv_tokens]`, float64 for
        float64 input, else float32. A token's row adds up to 1, the row of padding is 0.

    Raises
    ------
    UsageError
        The shapes do not fit each other.
    """
    batch, heads, query_tokens, head_dim = queries.shape
    kv_heads, kv_tokens = keys.shape[1:3]
    offset = kv_tokens - query_tokens
    if heads % kv_heads or offset < 0 or keys.shape != (batch, kv_heads, kv_tokens, head_dim):
        raise UsageError(
            "Expected queries [batch, attention_heads, query_tokens, head_dim] and keys [batch, "
            "kv_heads, kv_tokens, head_dim] with at least as many key as query tokens, found "
            f"{list(queries.shape)} and {list(keys.shape)}."
        )
    if attention_mask is not None and attention_mask.shape != (batch, kv_tokens):
        raise UsageError(
            f"Expected an attention mask of shape {[batch, kv_tokens]}, found "
            f"{list(attention_mask.shape)}.",
            "Pass the mask of cached and new tokens.",
        )
    dtype = torch.promote_types(queries.dtype, torch.float32)
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads, query_tokens, head_dim)
    wide_keys = keys.to(dtype)[:, :, None].mT
    positions = torch.arange(kv_tokens, device=queries.device)
    allowed = None if attention_mask is None else attention_mask.to(queries.device).bool()
    step = max(1, MAX_WEIGHTS // (batch * heads * kv_tokens))
    for start in range(0, query_tokens, step):
        chunk = slice(start, min(start + step, query_tokens))
        scores = grouped[:, :, :, chunk].to(dtype) @ wide_keys
        rows = positions[offset + chunk.start : offset + chunk.stop]
        visible = positions <= rows[:, None]
        if allowed is not None:
            visible = visible & allowed[:, None, None, None] & allowed[:, None, None, rows, None]
        # A row of padding has nothing to look at: softmax makes it NaN, and it must count as 0.
        weights = (scores * scaling).masked_fill_(~visible, -torch.inf).softmax(-1)
        yield chunk, weights if allowed is None else weights.masked_fill_(~visible, 0.0)


def attention_received(
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """How much attention each token gets, summed over queries and the query heads of its KV head.

    Parameters
    ----------
    queries, keys, scaling, attention_mask
        As for `attention_weights`.

    Returns
    -------
    Tensor
        `[batch, kv_heads, kv_tokens]`, float64 for float64 input, else float32. Padding gets 0,
        and a row adds up to the number of its query tokens times the heads per KV head.
    """
    batch, kv_heads, kv_tokens, _ = keys.shape
    dtype = torch.promote_types(queries.dtype, torch.float32)
    received = torch.zeros(batch, kv_heads, kv_tokens, dtype=dtype, device=keys.device)
    for _, weights in attention_weights(queries, keys, scaling, attention_mask):
        received += weights.sum((2, 3))
    return received


def attention_sensitivity(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """How much an error in a token's key or value moves the attention output.

    With weights a and output o of a query q, an error e in the value of token t moves o by a_t e,
    and an error d in its key by a_t (v_t - o) s q^T d to first order, with s the scaling. Squared,
    averaged over the directions of d, and summed over queries and the query heads of a KV head,
    without the factor s^2 / head_dim:

        value sensitivity_t = sum a_t^2,    key sensitivity_t = sum a_t^2 |v_t - o|^2 |q|^2

    Parameters
    ----------
    queries, keys, scaling, attention_mask
        As for `attention_weights`.
    values
        `[batch, kv_heads, kv_tokens, head_dim]`.

    Returns
    -------
    key_sensitivity, value_sensitivity
        Each `[batch, kv_heads, kv_tokens]`, float64 for float64 input, else float32; 0 on padding.
    """
    dtype = torch.promote_types(queries.dtype, torch.float32)
    wide = values.to(dtype)
    value_norms = (wide**2).sum(-1)[:, :, None, None]
    for_keys = torch.zeros(keys.shape[:3], dtype=dtype, device=keys.device)
    for_values = torch.zeros_like(for_keys)
    query_norms = (queries.to(dtype) ** 2).sum(-1, keepdim=True)
    query_norms = query_norms.view(*keys.shape[:2], -1, queries.shape[2], 1)
    for span, weights in attention_weights(queries, keys, scaling, attention_mask):
        outputs = weights @ wide[:, :, None]
        norms = (outputs**2).sum(-1, keepdim=True)
        distances = value_norms - 2 * outputs @ wide[:, :, None].mT + norms
        squares = weights**2
        for_values += squares.sum((2, 3))
        for_keys += (squares * distances.clamp(min=0) * query_norms[:, :, :, span]).sum((2, 3))
    return for_keys, for_values
