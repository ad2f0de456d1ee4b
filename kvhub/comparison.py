"""What a hand-off gives and costs beside its alternatives, on this machine.

Target alone reads the whole prompt itself; source alone just goes on. The hand-off's own cost is
the exact prefix plus the map, since the source's cache is there already.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.cache import cache_of, move_cache, prefill
from kvhub.errors import UsageError
from kvhub.exact import EXACT_PREFIX, choose_exact, predicted_damage
from kvhub.generation import generate_from, prefill_mapped
from kvhub.mapper import KVMapper

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvhub.policy import HandoffDecision, Policy

__all__ = ["Comparison", "Continuation", "Timing", "compare", "time_handoff"]


@dataclass(frozen=True)
class Continuation:
    """What one way of going on wrote.

    Attributes
    ----------
    output_ids
        The new tokens.
    context_seconds
        Time until the context is in the cache.
    generate_seconds
        Time for the new tokens, the hold-back included.
    """

    output_ids: list[int]
    context_seconds: float
    generate_seconds: float


@dataclass(frozen=True)
class Comparison:
    """The same prompt continued in three ways.

    Attributes
    ----------
    prompt_tokens
        How long it is.
    target, mapped, source
        Target alone, the hand-off, and source alone. The hand-off is not mapped where the
        decision says so: then its context is the target's own, and its time the probe's besides.
    decision
        Of the policy; None if there was none.
    """

    prompt_tokens: int
    target: Continuation
    mapped: Continuation
    source: Continuation
    decision: "HandoffDecision | None" = None


@dataclass(frozen=True)
class Timing:
    """Medians in seconds for one context length."""

    tokens: int
    map_seconds: float
    handoff_seconds: float
    prefill_seconds: float

    @property
    def speedup(self) -> float:
        """Prefilling again, divided by the whole hand-off: exact prefix and map."""
        return self.prefill_seconds / self.handoff_seconds

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "speedup": self.speedup}


def compare(
    mapper: KVMapper,
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    input_ids: Tensor,
    *,
    max_new_tokens: int = 64,
    exact_prefix: int = EXACT_PREFIX,
    exact_budget: int | None = None,
    policy: "Policy | None" = None,
) -> Comparison:
    """Continue `input_ids` `[1, tokens]` greedily: target alone, handed off, and source alone.

    With `exact_budget` the hand-off has so many exact tokens, as in `handoff`.
    """
    if exact_budget is not None and policy is not None:
        raise UsageError("exact_budget does not go with a policy.", "Leave one of them out.")
    context = input_ids[:, :-1]
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}

    def continued(generate: Callable[[Any], Tensor], read: Callable[[], Any]) -> Continuation:
        cache, context_seconds = _timed(read)
        output_ids, generate_seconds = _timed(lambda: generate(cache))
        new = output_ids[0, input_ids.shape[1] :].tolist()
        return Continuation(new, context_seconds, generate_seconds)

    def alone(model: "PreTrainedModel") -> Continuation:
        return continued(
            lambda cache: generate_from(model, input_ids, cache, **options),
            lambda: cache_of(prefill(model, context.to(model.device), logits_to_keep=1)),
        )

    how: dict[str, Any] = {"exact_prefix": exact_prefix}
    if exact_budget is None:
        how["source_cache"] = cache_of(
            prefill(source_model, context.to(source_model.device), logits_to_keep=1)
        )
    else:
        damage, how["source_cache"] = predicted_damage(source_model, context)
        regions = choose_exact(damage, exact_budget)
        how |= {"exact_prefix": regions.prefix, "exact_positions": regions.positions}
    decisions: list[HandoffDecision] = []

    def hand_over() -> Any:
        models = (mapper, source_model, target_model)
        if policy is None:
            return prefill_mapped(*models, input_ids, **how)
        cache, decision = policy.prefill(*models, input_ids, **how)
        decisions.append(decision)
        if decision.mapped:
            return cache
        return cache_of(prefill(target_model, context.to(target_model.device), logits_to_keep=1))

    mapped = continued(
        lambda cache: generate_from(target_model, input_ids, cache, **options), hand_over
    )
    decided = decisions[0] if decisions else None
    return Comparison(input_ids.shape[1], alone(target_model), mapped, alone(source_model), decided)


def time_handoff(
    mapper: KVMapper,
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    lengths: Sequence[int],
    *,
    repeats: int = 5,
    exact_prefix: int = EXACT_PREFIX,
    progress: Callable[[int, int], None] | None = None,
) -> list[Timing]:
    """Time the map and the target's prefill over context lengths, interleaved, medians.

    The context is random tokens: neither side's time depends on what they say. Prefill is the
    target's body without the vocabulary's matrix, as in the paper.
    """
    timings = []
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(mapper.config.source.vocab_size, mapper.config.target.vocab_size)
    for done, tokens in enumerate(lengths):
        ids = torch.randint(0, vocabulary, (1, tokens + 1), generator=generator)
        context = ids[:, :-1].to(source_model.device)
        cache = cache_of(prefill(source_model, context, logits_to_keep=1))
        on_mapper = move_cache(cache, mapper.key_weight.device)

        def hand_over(ids: Tensor = ids, cache: Any = cache) -> Any:
            return prefill_mapped(
                mapper,
                source_model,
                target_model,
                ids,
                exact_prefix=exact_prefix,
                source_cache=cache,
            )

        def read_again(ids: Tensor = ids) -> Any:
            return prefill(target_model, ids[:, :-1].to(target_model.device), logits_to_keep=1)

        def map_alone(cache: Any = on_mapper) -> Any:
            return mapper(cache)

        actions: tuple[Callable[[], Any], ...] = (map_alone, hand_over, read_again)
        times: list[list[float]] = [[] for _ in actions]
        for repeat in range(repeats + 1):
            for action, measured in zip(actions, times, strict=True):
                seconds = _timed(action)[1]
                if repeat > 0:  # the first round only warms up
                    measured.append(seconds)
        timings.append(Timing(tokens, *(statistics.median(measured) for measured in times)))
        if progress is not None:
            progress(done + 1, len(lengths))
    return timings


def _timed(action: Callable[[], Any]) -> tuple[Any, float]:
    _synchronize()
    started = time.perf_counter()
    result = action()
    _synchronize()
    return result, time.perf_counter() - started


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
