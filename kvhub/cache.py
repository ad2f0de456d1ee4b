"""Between a transformers cache and plain tensors, and the model calls that need one.

transformers 5.24 renamed the model argument and output `past_key_values` to `cache`; 5.19 knows
only the old name. This file is the one place that knows both.
"""

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.errors import IncompatiblePairError, UsageError, VerificationError
from kvhub.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import Cache, DynamicCache, PreTrainedModel

__all__ = [
    "build_cache",
    "cache_argument",
    "cache_of",
    "concatenate_caches",
    "crop_cache",
    "move_cache",
    "positions_from_mask",
    "prefill",
    "read_cache",
]


def cache_argument(model: "PreTrainedModel") -> str:
    """The name under which this model's `forward` and `generate` take a cache."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UsageError(
        f"{type(model).__name__}.forward takes neither `cache` nor `past_key_values`; "
        f"found {sorted(parameters)}.",
        "Pass a decoder-only transformers model, not a wrapper around one.",
    )


def cache_of(output: Any) -> "Cache":
    """The cache in a model's output, under its old or new name."""
    for name in ("cache", "past_key_values"):
        cache: Cache | None = getattr(output, name, None)
        if cache is not None:
            return cache
    raise UsageError("The model returned no cache.", "Call it with use_cache=True.")


def positions_from_mask(attention_mask: Tensor) -> Tensor:
    """Absolute positions `[batch, tokens]` int64 of a mask's tokens; padding gets 0.

    The count starts at each row's first token, so left padding does not shift the positions.
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def prefill(
    model: "PreTrainedModel",
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    cache: "Cache | None" = None,
    logits_to_keep: int = 0,
    **options: Any,
) -> Any:
    """Run a model over tokens and return its output with a cache.

    Parameters
    ----------
    model
        A decoder-only transformers model.
    input_ids
        `[batch, tokens]` int64: the new tokens only, those in `cache` left out.
    attention_mask
        `[batch, cached + tokens]`, 1 for a token and 0 for padding. Positions are counted from
        it, so that left-padded rows start at position 0.
    cache
        What the tokens come after; it is extended in place.
    logits_to_keep
        Only the last so many rows of logits, for models that know how; 0 for all. The vocabulary's
        matrix is most of a small model's work.
    options
        Passed to the model, for example `output_hidden_states`.
    """
    if logits_to_keep and "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = logits_to_keep
    cached = 0 if cache is None else cache.get_seq_length()
    batch, tokens = input_ids.shape
    if attention_mask is None:
        attention_mask = torch.ones(batch, cached + tokens, dtype=torch.long)
    attention_mask = attention_mask.to(input_ids.device)
    if attention_mask.shape != (batch, cached + tokens):
        raise UsageError(
            "attention_mask must cover cached and new tokens: expected "
            f"{(batch, cached + tokens)}, found {tuple(attention_mask.shape)}.",
            "Pass the mask of the whole context.",
        )
    return model(
        input_ids,
        attention_mask=attention_mask,
        position_ids=positions_from_mask(attention_mask)[:, cached:],
        use_cache=True,
        **{cache_argument(model): cache},
        **options,
    )


def read_cache(cache: "Cache", spec: ModelSpec | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a cache, checked, not copied.

    Returns
    -------
    keys, values
        One `[batch, kv_heads, tokens, head_dim]` per layer in the cache's dtype; keys in rotated
        space, as the cache holds them.

    Raises
    ------
    IncompatiblePairError
        A layer is not plain full attention, or the geometry is not that of `spec`.
    VerificationError
        A layer is empty or shorter than the others.
    """
    from transformers.cache_utils import DynamicLayer

    layers = list(cache.layers)
    if not layers:
        raise VerificationError("The cache has no layers.", "Prefill the source model first.")
    for index, layer in enumerate(layers):
        # A sliding-window layer reports all positions but stores only the last ones.
        if type(layer) is not DynamicLayer:
            raise IncompatiblePairError(
                f"Layer {index} of the cache is a {type(layer).__name__}; expected a DynamicLayer, "
                "which stores every token of a full-attention layer.",
                "Use a DynamicCache and a model without sliding-window or hybrid layers.",
            )
        if not layer.is_initialized or layer.get_seq_length() == 0:
            raise VerificationError(
                f"Layer {index} of the cache is empty.", "Prefill every layer of the source model."
            )
    shapes = {tuple(tensor.shape) for layer in layers for tensor in (layer.keys, layer.values)}
    if len(shapes) != 1:
        raise VerificationError(
            "The layers of the cache differ in shape: expected one "
            f"[batch, kv_heads, tokens, head_dim], found {sorted(shapes)}.",
            "Pass a cache that one model filled in one go.",
        )
    _, kv_heads, _, head_dim = next(iter(shapes))
    if spec is not None:
        expected = (spec.num_layers, spec.kv_heads, spec.head_dim)
        found = (len(layers), kv_heads, head_dim)
        if expected != found:
            raise IncompatiblePairError(
                f"The cache is not one of {spec.model_id}: expected (layers, kv_heads, head_dim) "
                f"= {expected}, found {found}.",
                "Pass the cache of the model that the mapper was fitted for.",
            )
    return [layer.keys for layer in layers], [layer.values for layer in layers]


def build_cache(keys: Iterable[Tensor], values: Iterable[Tensor]) -> "DynamicCache":
    """A cache from rotated keys and values per layer, `[batch, kv_heads, tokens, head_dim]`.

    The tensors become the cache's own without a copy; a cache that grows replaces them.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache()
    for layer_keys, layer_values in zip(keys, values, strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(layer_keys, layer_values)
        layer.keys, layer.values = layer_keys, layer_values
        cache.layers.append(layer)
    return cache


def concatenate_caches(first: "Cache", second: "Cache") -> "DynamicCache":
    """The tokens of two caches of one model, one after the other; positions are not changed."""
    pairs = list(zip(first.layers, second.layers, strict=True))
    return build_cache(
        (torch.cat([a.keys, b.keys.to(a.keys)], dim=-2) for a, b in pairs),
        (torch.cat([a.values, b.values.to(a.values)], dim=-2) for a, b in pairs),
    )


def crop_cache(cache: "Cache", start: int, stop: int) -> "DynamicCache":
    """A new cache with the tokens `start` up to `stop` of a cache; the old one is not changed."""
    return build_cache(
        (layer.keys[..., start:stop, :].clone() for layer in cache.layers),
        (layer.values[..., start:stop, :].clone() for layer in cache.layers),
    )


def move_cache(cache: "Cache", device: torch.device) -> "Cache":
    """The same cache on a device; itself if it is there already."""
    if cache.layers[0].keys.device == device:
        return cache
    return build_cache(
        (layer.keys.to(device) for layer in cache.layers),
        (layer.values.to(device) for layer in cache.layers),
    )
