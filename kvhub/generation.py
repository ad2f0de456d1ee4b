"""Hand a conversation from one model to the other with a mapped cache instead of a prefill."""

from collections.abc import Callable
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
from kvhub.exact import EXACT_PREFIX, choose_exact, predicted_damage
from kvhub.mapper import KVMapper
from kvhub.recompute import recompute
from kvhub.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import Cache, DynamicCache, PreTrainedModel

    from kvhub.policy import HandoffDecision, Policy

__all__ = ["EXACT_PREFIX", "extended_cache", "generate_from", "handoff", "prefill_mapped"]


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
    exact_positions: Tensor | None = None,
    source_cache: "Cache | None" = None,
) -> "DynamicCache":
    """The target's cache of a prompt without its last tokens, most of it mapped.

    1. The target prefills the first `exact_prefix` tokens itself.
    2. The source's cache of the following ones is mapped, and put behind.
    3. The last `exact_suffix` tokens are left for the caller to run through the target on top.

    With `exact_positions` everything is mapped, and the target then computes these tokens and the
    first ones in one pass, see `recompute`.

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
    exact_positions
        `[batch, others]` int64: tokens behind the prefix that the target computes itself, as
        indices into `input_ids`, each row ascending; see `kvhub.exact.choose_exact`.
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
        `exact_suffix` below 1, a source cache longer than the prompt, right padding, or exact
        positions that are not ascending between prefix and suffix.
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
    cells = None
    if exact_positions is not None and start < stop:
        cells = _cells(exact_positions, len(input_ids), start, stop)
        start = 0
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
    source_cache = extended_cache(source_model, input_ids, mask, source_cache, stop)
    mapped: DynamicCache = mapper(
        move_cache(crop_cache(source_cache, start, stop), mapper.key_weight.device),
        positions=positions_from_mask(mask)[:, start:stop],
        dtype=target_model.dtype,
    )
    mapped = move_cache(mapped, target_model.device)
    if cells is not None:
        return recompute(
            target_model, input_ids[:, :stop], mapped, cells, attention_mask=mask[:, :stop]
        )
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
    exact_budget: int | None = None,
    source_cache: "Cache | None" = None,
    policy: "Policy | None" = None,
    on_decision: "Callable[[HandoffDecision], None] | None" = None,
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
    exact_budget
        Tokens before the suffix that the target computes itself, in place of `exact_prefix`:
        `kvhub.exact` chooses them by the source's reading of the whole prompt, and
        `tokens_within` makes a budget of milliseconds one of tokens. Not with a source cache,
        which does not tell, nor with a policy.
    policy
        Decides whether to map or to let the target read the prompt itself, see `kvhub.policy`;
        None: map always.
    on_decision
        Called with what the policy decided and why.
    generate_options
        Passed to the target's `generate`, for example `do_sample=False`.

    Returns
    -------
    output_ids
        `[batch, tokens + new tokens]` int64: the prompt and what the target generated.

    Raises
    ------
    UsageError, IncompatiblePairError, VerificationError
        As for `prefill_mapped`; UsageError also for `on_decision` without a policy, and for
        `exact_budget` with one or with a source cache.
    """
    if policy is None and on_decision is not None:
        raise UsageError("on_decision needs a policy.", "Pass policy=Policy.from_package(NAME).")
    options: dict[str, Any] = {
        "attention_mask": attention_mask,
        "exact_prefix": exact_prefix,
        "exact_suffix": exact_suffix,
        "source_cache": source_cache,
    }
    if exact_budget is not None:
        if policy is not None or source_cache is not None:
            raise UsageError(
                "exact_budget goes neither with a policy nor with a source cache.",
                "Leave them out, or choose the tokens: see kvhub.exact and prefill_mapped.",
            )
        options |= _spend(exact_budget, source_model, input_ids, attention_mask, exact_suffix)
    if policy is None:
        cache = prefill_mapped(mapper, source_model, target_model, input_ids, **options)
    else:
        cache, decision = policy.prefill(mapper, source_model, target_model, input_ids, **options)
        if on_decision is not None:
            on_decision(decision)
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


def _spend(
    budget: int,
    source_model: "PreTrainedModel",
    input_ids: Tensor,
    attention_mask: Tensor | None,
    exact_suffix: int,
) -> dict[str, Any]:
    """What `prefill_mapped` needs to know of a budget of exact tokens."""
    mask = _left_padded(attention_mask, input_ids)
    stop = max(0, input_ids.shape[1] - exact_suffix)
    damage, source_cache = predicted_damage(
        source_model, input_ids[:, :stop], attention_mask=mask[:, :stop]
    )
    regions = choose_exact(damage, budget, padding=int((mask == 0).sum(1).max()))
    return {
        "exact_prefix": regions.prefix,
        "exact_positions": regions.positions,
        "source_cache": source_cache,
    }


def _cells(positions: Tensor, batch: int, start: int, stop: int) -> Tensor:
    """The first `start` cells and the positions behind them, `[batch, cells]`."""
    shape = positions.ndim == 2 and len(positions) == batch
    if not shape or bool((positions < start).any()) or bool((positions >= stop).any()):
        raise UsageError(
            f"exact_positions must be [batch, others] with {batch} rows, from {start}, behind the "
            f"exact prefix, to {stop - 1}, before the exact suffix; found {positions.tolist()}.",
            "Choose them with kvhub.exact.choose_exact.",
        )
    first = torch.arange(start, device=positions.device).expand(batch, -1)
    return torch.cat([first, positions], dim=1)


def extended_cache(
    model: "PreTrainedModel", input_ids: Tensor, mask: Tensor, cache: "Cache | None", stop: int
) -> "Cache":
    """A model's cache of at least `stop` tokens of a prompt: the given one, or a longer copy."""
    cached = 0 if cache is None else cache.get_seq_length()
    if cache is not None and cached >= stop:
        return cache
    ids = input_ids[:, cached:stop].to(model.device)
    copy = None if cache is None or cached == 0 else crop_cache(cache, 0, cached)
    return cache_of(
        prefill(model, ids, attention_mask=mask[:, :stop], cache=copy, logits_to_keep=1)
    )
