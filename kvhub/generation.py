"""Hand a conversation from one model to the other with a mapped cache instead of a prefill."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.cache import (
    build_cache,
    cache_argument,
    cache_of,
    concatenate_caches,
    crop_cache,
    move_cache,
    positions_from_mask,
    prefill,
)
from kvhub.compatibility import require_same
from kvhub.errors import UsageError
from kvhub.mapper import KVMapper
from kvhub.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import Cache, DynamicCache, PreTrainedModel

__all__ = ["EXACT_PREFIX", "generate_from", "handoff", "prefill_mapped"]

# The first tokens collect attention whatever they say (attention sinks) and a linear map hits them
# badly. That the target computes a few itself removes more error than any other tokens would.
EXACT_PREFIX = 4


@torch.no_grad()
def prefill_mapped(
    mapper: KVMapper,
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    exact_prefix: int = EXACT_PREFIX,
    exact_suffix: int = 1,
    source_cache: "Cache | None" = None,
) -> "DynamicCache":
    """The target's cache of a prompt without its last tokens, most of it mapped.

    1. The target prefills the first `exact_prefix` tokens itself.
    2. The source's cache of the following ones is mapped, and put behind.
    3. The last `exact_suffix` tokens are left for the caller to run through the target on top.

    Parameters
    ----------
    mapper
        Fitted for these two models.
    source_model, target_model
        They may be on different devices; the mapper's device does the mapping.
    input_ids
        `[batch, tokens]` int64, the whole prompt.
    attention_mask
        `[batch, tokens]`, 0 on padding. Left padding only; the exact prefix then reaches
        `exact_prefix` tokens into the shortest row.
    exact_prefix, exact_suffix
        In tokens. At least one token must be left over at the end: the target needs it to predict
        the next one.
    source_cache
        The source's cache of the prompt's first tokens, if it is at hand; what it lacks is
        prefilled by the source. It is not changed.

    Returns
    -------
    target_cache
        Of `tokens - exact_suffix` tokens, in the target model's dtype and on its device.

    Raises
    ------
    UsageError
        `exact_suffix` below 1, a source cache longer than the prompt, or right padding.
    IncompatiblePairError
        The mapper was fitted for other models.
    VerificationError
        The source's cache, or what it maps to, is not finite.
    """
    require_same(mapper.config.source, ModelSpec.from_model(source_model), "source")
    require_same(mapper.config.target, ModelSpec.from_model(target_model), "target")
    if exact_suffix < 1 or exact_prefix < 0:
        raise UsageError(
            f"exact_suffix must be at least 1 and exact_prefix at least 0; found {exact_suffix} "
            f"and {exact_prefix}.",
            "A cache that covers the whole prompt leaves the target nothing to predict from.",
        )
    tokens = input_ids.shape[1]
    mask = _left_padded(attention_mask, input_ids)
    cached = 0 if source_cache is None else source_cache.get_seq_length()
    if cached > tokens:
        raise UsageError(
            f"The source cache has {cached} tokens, the prompt only {tokens}.",
            "Pass the prompt that the cache was made from, with its new tokens at the end.",
        )
    stop = max(0, tokens - exact_suffix)
    padding = int((mask == 0).sum(1).max())
    start = min(stop, padding + exact_prefix)
    empty = build_cache([], [])
    if stop == 0:
        return empty
    exact = empty
    if start > 0:
        device = target_model.device
        output = prefill(
            target_model,
            input_ids[:, :start].to(device),
            attention_mask=mask[:, :start],
            logits_to_keep=1,
        )
        exact = cache_of(output)
    if start == stop:
        return exact
    source_cache = _extend(source_model, input_ids, mask, source_cache, stop)
    mapped: DynamicCache = mapper(
        move_cache(crop_cache(source_cache, start, stop), mapper.key_weight.device),
        positions=positions_from_mask(mask)[:, start:stop],
        dtype=target_model.dtype,
    )
    mapped = move_cache(mapped, target_model.device)
    return mapped if start == 0 else concatenate_caches(exact, mapped)


def handoff(
    mapper: KVMapper,
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    input_ids: Tensor,
    *,
    max_new_tokens: int = 64,
    attention_mask: Tensor | None = None,
    exact_prefix: int = EXACT_PREFIX,
    exact_suffix: int = 1,
    source_cache: "Cache | None" = None,
    **generate_options: Any,
) -> Tensor:
    """Let the target go on with a prompt that the source has read.

    Parameters
    ----------
    mapper, source_model, target_model, input_ids, attention_mask
        As for `prefill_mapped`.
    max_new_tokens
        How many tokens to generate at the most.
    exact_prefix, exact_suffix, source_cache
        As for `prefill_mapped`.
    generate_options
        Passed to the target's `generate`, for example `do_sample=False`.

    Returns
    -------
    output_ids
        `[batch, tokens + new tokens]` int64: the prompt and what the target generated.

    Raises
    ------
    UsageError, IncompatiblePairError, VerificationError
        As for `prefill_mapped`.
    """
    cache = prefill_mapped(
        mapper,
        source_model,
        target_model,
        input_ids,
        attention_mask=attention_mask,
        exact_prefix=exact_prefix,
        exact_suffix=exact_suffix,
        source_cache=source_cache,
    )
    return generate_from(
        target_model,
        input_ids,
        cache,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        **generate_options,
    )


def generate_from(
    model: "PreTrainedModel",
    input_ids: Tensor,
    cache: "Cache",
    *,
    attention_mask: Tensor | None = None,
    **generate_options: Any,
) -> Tensor:
    """Generate after a prompt of which a cache covers the first tokens.

    Parameters
    ----------
    model
        The model that the cache belongs to.
    input_ids
        `[batch, tokens]` int64, the whole prompt, cached tokens included.
    cache
        Of fewer than `tokens` tokens; it is extended in place.
    attention_mask
        `[batch, tokens]`, 0 on padding.
    generate_options
        Passed to the model's `generate`.

    Raises
    ------
    UsageError
        The cache covers the whole prompt: `generate` would then write wrong text without a word.
    """
    cached = cache.get_seq_length()
    if cached >= input_ids.shape[1]:
        raise UsageError(
            f"The cache has {cached} tokens, the prompt {input_ids.shape[1]}; at least one token "
            "of the prompt must be left for the model to predict from.",
            "Hold back the last token of the prompt.",
        )
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if cached > 0:
        generate_options[cache_argument(model)] = cache
    # generate gets the whole prompt and takes from it what the cache does not cover.
    generate: Any = model.generate
    output_ids: Tensor = generate(
        input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        **generate_options,
    )
    return output_ids


def _left_padded(attention_mask: Tensor | None, input_ids: Tensor) -> Tensor:
    if attention_mask is None:
        return torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape or bool((attention_mask.diff(dim=1) < 0).any()):
        raise UsageError(
            f"attention_mask must be {list(input_ids.shape)} with padding on the left only.",
            "Tokenize with padding_side='left'.",
        )
    return attention_mask


def _extend(
    model: "PreTrainedModel", input_ids: Tensor, mask: Tensor, cache: "Cache | None", stop: int
) -> "Cache":
    """A cache of at least `stop` tokens: the given one, or a longer copy of it."""
    cached = 0 if cache is None else cache.get_seq_length()
    if cache is not None and cached >= stop:
        return cache
    ids = input_ids[:, cached:stop].to(model.device)
    copy = None if cache is None or cached == 0 else crop_cache(cache, 0, cached)
    return cache_of(
        prefill(model, ids, attention_mask=mask[:, :stop], cache=copy, logits_to_keep=1)
    )
