"""Put a model's own keys and values of chosen tokens into a cache that holds others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.cache import build_cache, cache_argument, crop_cache, positions_from_mask
from kvhub.errors import UsageError

if TYPE_CHECKING:
    from transformers import Cache, DynamicCache, PreTrainedModel

__all__ = ["recompute"]


@torch.no_grad()
def recompute(
    model: "PreTrainedModel",
    input_ids: Tensor,
    cache: "Cache",
    cells: Tensor,
    *,
    attention_mask: Tensor | None = None,
) -> "DynamicCache":
    """Let a model compute some tokens of a cache itself; the others stay as they are.

    All of them go through the model in one pass. In every layer their keys and values take the
    place of those in the cache before attention is computed, and each looks at the cells up to its
    own. So it sees the earlier ones of them exact and all others as they were: the same as one
    pass per token, in their order.

    Parameters
    ----------
    model
        The model that the cache belongs to. Inside, it computes attention with PyTorch's scaled
        dot product, which takes any mask.
    input_ids
        `[batch, tokens]` int64, the cached tokens.
    cache
        Of `tokens` tokens, in the model's dtype and on its device. It is not changed.
    cells
        `[batch, exact]` int64: which tokens, as indices into `input_ids`, each row ascending.
    attention_mask
        `[batch, tokens]`, 0 on padding, left padding only.

    Returns
    -------
    cache
        A new one; keys in rotated space. What a padded cell of `cells` gets has no meaning.

    Raises
    ------
    UsageError
        The shapes do not fit each other, or a row of `cells` is not ascending inside the cache.
    """
    tokens = cache.get_seq_length()
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if input_ids.shape[1] != tokens or mask.shape != input_ids.shape:
        raise UsageError(
            f"The cache has {tokens} tokens; found input_ids of {list(input_ids.shape)} and an "
            f"attention mask of {list(mask.shape)}.",
            "Pass the ids and the mask of the cached tokens.",
        )
    if cells.ndim != 2 or len(cells) != len(input_ids) or not _ascending(cells, tokens):
        raise UsageError(
            f"Expected cells [batch, exact], each row ascending from 0 to {tokens - 1} at the "
            f"most, without repeats; found {cells.tolist()}."
        )
    if cells.shape[1] == 0:
        return crop_cache(cache, 0, tokens)
    device = model.device
    cells = cells.to(device)
    ids, mask = input_ids.to(device), mask.to(device).bool()
    places = torch.arange(tokens, device=device)
    # A padded token looks at itself, because attention to nothing would be NaN.
    visible = (places <= cells[..., None]) & mask[:, None] | (places == cells[..., None])
    grown = _cache_with_fixed_cells(cache, cells)
    # The decoder alone: nobody asks what comes next, and the vocabulary's matrix is costly.
    decoder: Any = model.get_decoder()
    with _any_mask(decoder):
        decoder(
            ids.gather(1, cells),
            attention_mask=visible[:, None],
            position_ids=positions_from_mask(mask).gather(1, cells),
            use_cache=True,
            **{cache_argument(decoder): grown},
        )
    return build_cache(
        (layer.keys for layer in grown.layers), (layer.values for layer in grown.layers)
    )


def _ascending(cells: Tensor, tokens: int) -> bool:
    inside = bool(((cells >= 0) & (cells < tokens)).all())
    return inside and bool((cells.diff(dim=1) > 0).all())


def _cache_with_fixed_cells(cache: "Cache", cells: Tensor) -> Any:
    """A copy whose updates go into the cells `[batch, exact]` instead of behind the last one."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    class FixedCells(DynamicLayer):  # type: ignore[misc]  # transformers has no types here
        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            places = cells[:, None, :, None].expand_as(key_states)
            self.keys.scatter_(2, places, key_states)
            self.values.scatter_(2, places, value_states)
            return self.keys, self.values

    copy = DynamicCache()
    for layer in cache.layers:
        own = FixedCells()
        own.lazy_initialization(layer.keys, layer.values)
        own.keys, own.values = layer.keys.clone(), layer.values.clone()
        copy.layers.append(own)
    return copy


@contextmanager
def _any_mask(decoder: "PreTrainedModel") -> Iterator[None]:
    """Attention that takes a mask per query; flash attention for one would ignore it."""
    previous = decoder.config._attn_implementation
    try:
        decoder.set_attn_implementation("sdpa")
        yield
    finally:
        decoder.set_attn_implementation(previous)
