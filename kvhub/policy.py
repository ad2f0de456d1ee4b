"""Whether to map this prompt, or to let the target read it again.

The package's gate says what a mapper is worth on text like that of its evaluation. The probe looks
at the live prompt: the target reads the prompt's last tokens on top of the mapped cache, where it
would have to go on anyway, and so does the source on its own. With x the prompt and m tokens read,

    excess = 1/m sum_t [log p_source(x_t | x_<t) - log p_mapped target(x_t | x_<t)]

is how much worse the mapped target foretells what is known already. Above `max_excess` the mapped
context has lost what the source still has, and the target reads the prompt itself. How well gate
and probe foretell the damage, and what else was tried, is in docs/gate.md.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.cache import build_cache, prefill
from kvhub.errors import UsageError, VerificationError
from kvhub.gate import Gate, GateResult, check_gate
from kvhub.generation import EXACT_PREFIX, extended_cache, prefill_mapped
from kvhub.report import Report
from kvhub.store import find_mapper

if TYPE_CHECKING:
    from transformers import Cache, DynamicCache, PreTrainedModel

    from kvhub.mapper import KVMapper

__all__ = ["HandoffDecision", "Policy", "nll_excess"]

PROBE_TOKENS = 32
# Nats per token: more than rounding and chance do to a mapper that costs nothing.
MAX_EXCESS = 0.05


@dataclass(frozen=True)
class HandoffDecision:
    """What a policy decided about one hand-off, and why.

    Attributes
    ----------
    mapped
        Whether the cache is mapped; else the target reads the whole prompt itself.
    reason
        For people.
    excess
        What the probe found, in nats per token, of the batch's worst row; None if nothing was
        probed.
    """

    mapped: bool
    reason: str
    excess: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Policy:
    """What must hold for a prompt to be mapped.

    Attributes
    ----------
    gate
        The verdict on the mapper, see `from_package`; None: not asked for.
    probe_tokens
        How many of the prompt's last tokens both models read to compare; 0: no probe. They stay
        in the target's cache as it computed them, so of the target's work nothing is lost.
    max_excess
        Of the probe, in nats per token.
    """

    gate: GateResult | None = None
    probe_tokens: int = PROBE_TOKENS
    max_excess: float = MAX_EXCESS

    def __post_init__(self) -> None:
        if self.probe_tokens < 0:
            raise UsageError(f"probe_tokens must not be negative; found {self.probe_tokens}.")

    @classmethod
    def from_package(
        cls,
        name_or_path: str | Path,
        *,
        gate: Gate | None = None,
        probe_tokens: int = PROBE_TOKENS,
        max_excess: float = MAX_EXCESS,
    ) -> "Policy":
        """The policy of a mapper, with the verdict on its report.

        Parameters
        ----------
        name_or_path
            As for `KVMapper.from_pretrained`.
        gate
            Thresholds of your own; None for those that the report was held against.
        probe_tokens, max_excess
            As for `Policy`.

        Raises
        ------
        NotFoundError
            There is no such mapper, or it was never evaluated.
        VerificationError
            Its report is not one.

        A report on text of your own makes one as well: `Policy(check_gate(Report.load(path)))`.
        """
        report = Report.load(find_mapper(str(name_or_path)) / "report.json")
        verdict = report.gate if gate is None else None
        return cls(verdict or check_gate(report, gate), probe_tokens, max_excess)

    def prefill(
        self,
        mapper: "KVMapper",
        source_model: "PreTrainedModel",
        target_model: "PreTrainedModel",
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        exact_prefix: int = EXACT_PREFIX,
        exact_suffix: int = 1,
        source_cache: "Cache | None" = None,
    ) -> "tuple[DynamicCache, HandoffDecision]":
        """The mapped cache of a prompt, or an empty one if the target is to read it itself.

        Parameters
        ----------
        mapper, source_model, target_model, input_ids, attention_mask
            As for `prefill_mapped`.
        exact_prefix, exact_suffix, source_cache
            As for `prefill_mapped`. With a probe the suffix is at least its tokens and one more,
            and is in the cache already but for the prompt's last token.

        Returns
        -------
        target_cache, decision
            One decision for the whole batch.

        Raises
        ------
        UsageError, IncompatiblePairError, VerificationError
            As for `prefill_mapped` and `nll_excess`.
        """
        empty = build_cache([], [])
        if self.gate is not None and not self.gate.passed:
            return empty, HandoffDecision(False, f"the gate is not met: {_failures(self.gate)}")
        if self.probe_tokens == 0:
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
            reason = "nothing was asked for" if self.gate is None else "the gate is met"
            return cache, HandoffDecision(True, reason)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        tokens = input_ids.shape[1]
        stop = tokens - max(exact_suffix, self.probe_tokens + 1)
        if stop - int((mask == 0).sum(1).max()) <= exact_prefix:
            reason = f"too short for a probe of {self.probe_tokens} tokens, and soon read again"
            return empty, HandoffDecision(False, reason)
        source_cache = extended_cache(source_model, input_ids, mask, source_cache, stop)
        cache = prefill_mapped(
            mapper,
            source_model,
            target_model,
            input_ids,
            attention_mask=attention_mask,
            exact_prefix=exact_prefix,
            exact_suffix=tokens - stop,
            source_cache=source_cache,
        )
        excess = nll_excess(source_model, target_model, source_cache, cache, input_ids, mask)
        decision = self.judge(excess)
        return (cache if decision.mapped else empty), decision

    def judge(self, excess: Tensor) -> HandoffDecision:
        """Decide by what `nll_excess` found, `[batch]`: the worst row decides for all."""
        worst = float(excess.max())
        mapped = worst <= self.max_excess
        reason = (
            f"the mapped target foretells the prompt's last tokens {worst:+.3f} nats per token "
            f"worse than the source, {'within' if mapped else 'above'} {self.max_excess:g}"
        )
        return HandoffDecision(mapped, reason, worst)


@torch.no_grad()
def nll_excess(
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    source_cache: "Cache",
    target_cache: "Cache",
    input_ids: Tensor,
    attention_mask: Tensor,
) -> Tensor:
    """How much worse the mapped target foretells a prompt's last tokens than the source does.

    Parameters
    ----------
    source_model, target_model
        They may be on different devices.
    source_cache
        Of at least the tokens in `target_cache`; it is not changed.
    target_cache
        Mapped, of fewer than `tokens - 1` tokens; it is extended in place to `tokens - 1`.
    input_ids, attention_mask
        `[batch, tokens]` int64, the whole prompt; no padding behind the cached tokens.

    Returns
    -------
    excess
        `[batch]` float64 on the CPU: NLL of the tokens from `cached + 1` on, in nats per token,
        of the mapped target less that of the source.

    Raises
    ------
    VerificationError
        A likelihood is not finite.
    """
    cached = target_cache.get_seq_length()
    # Not copied: a cache that grows replaces its tensors and leaves these alone.
    start = build_cache(
        (layer.keys[..., :cached, :] for layer in source_cache.layers),
        (layer.values[..., :cached, :] for layer in source_cache.layers),
    )
    nll = []
    for model, cache in ((target_model, target_cache), (source_model, start)):
        tokens = input_ids[:, cached:].to(model.device)
        logits = prefill(
            model, tokens[:, :-1], attention_mask=attention_mask[:, :-1], cache=cache
        ).logits
        logprobs = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None])
        nll.append(-logprobs[..., 0].mean(1).double().cpu())
    excess: Tensor = nll[0] - nll[1]
    if not bool(torch.isfinite(excess).all()):
        raise VerificationError(
            f"The likelihood of the prompt is not finite: {excess.tolist()}.",
            "Load the models in bfloat16 or float32.",
        )
    return excess


def _failures(gate: GateResult) -> str:
    return ", ".join(f"{c.name} {c.bound:.3g} against {c.threshold:g}" for c in gate.failures)
