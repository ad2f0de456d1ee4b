"""How well predictions match a text and a reference model, and what a mapper retains of them."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kvhub.bootstrap import Bootstrap, positive_ratio
from kvhub.report import SETTINGS, Estimate, ExactPoint, SettingMetrics

__all__ = [
    "SCORES",
    "attention_output_cosine",
    "exact_curve",
    "floor_normalized_retention",
    "gap_recovered",
    "retention",
    "score_predictions",
    "setting_metrics",
    "sums_table",
]

SCORES = ("nll", "accuracy", "kl", "agreement")
# Logits that are copied to float32 at once: 64 MiB.
MAX_LOGITS = 2**24
Columns = tuple[int, int]  # of which one is subtracted from the other


def score_predictions(logits: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
    """Score predictions against the text and against a reference model's predictions.

    Parameters
    ----------
    logits
        `[batch, tokens, vocabulary]`, any float dtype.
    reference
        `[batch, tokens, vocabulary of the reference]`: target-alone's logits. Where one vocabulary
        has more (padded) rows, KL and agreement are over the common ones.
    labels
        `[batch, tokens]` int64: the token that each prediction is for.

    Returns
    -------
    sums
        `[batch, 4]` float64 on the CPU, summed over tokens in the order of `SCORES`: NLL in nats,
        correct predictions, KL(reference || logits) in nats, agreements. The logarithms are of
        float32 logits, or of float64 ones.
    """
    batch, tokens, _ = logits.shape
    common = min(logits.shape[-1], reference.shape[-1])
    step = max(1, MAX_LOGITS // (batch * max(logits.shape[-1], reference.shape[-1])))
    sums = torch.zeros(batch, len(SCORES), dtype=torch.float64)
    for start in range(0, tokens, step):
        span = slice(start, min(start + step, tokens))
        own = _wide(logits[:, span])
        other = _wide(reference[:, span].to(own.device))
        text = labels[:, span].to(own.device)
        nll = -own.log_softmax(-1).gather(-1, text[..., None])[..., 0]
        log_q = own[..., :common].log_softmax(-1)
        log_p = other[..., :common].log_softmax(-1)
        p = log_p.exp()
        # Some models mask ids with -inf: those have p = 0 and must add nothing. The sum is never
        # negative but for rounding.
        kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1).clamp(min=0)
        agree = log_q.argmax(-1) == log_p.argmax(-1)
        scores = torch.stack([nll, own.argmax(-1) == text, kl, agree], dim=-1)
        sums += scores.cpu().to(torch.float64).sum(1)
    return sums


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def sums_table(
    tokens: int, cosine: Tensor, scores: Mapping[str, Tensor], exact: Sequence[Tensor] = ()
) -> Tensor:
    """Lay out one batch's sums for the bootstrap: the figures below read these columns.

    Parameters
    ----------
    tokens
        Scored tokens of each sequence.
    cosine
        `[batch]` float64: attention-output cosine of each sequence.
    scores
        `[batch, 4]` of each of `SETTINGS`, from `score_predictions`.
    exact
        The same of the mapped setting with each budget of exact tokens.

    Returns
    -------
    table
        `[batch, columns]` float64: scored tokens, cosine times tokens, then the scores, then
        those by budget.
    """
    counts = torch.full_like(cosine, tokens)
    head = torch.stack([counts, cosine * counts], dim=1)
    return torch.cat([head, *(scores[setting] for setting in SETTINGS), *exact], dim=1)


def _column(setting: str, score: str) -> int:
    return 2 + SETTINGS.index(setting) * len(SCORES) + SCORES.index(score)


def _per_token(column: int) -> Callable[[Tensor], Tensor]:
    return lambda sums: sums[..., column] / sums[..., 0]


def attention_output_cosine(bootstrap: Bootstrap) -> Estimate:
    """Average over scored tokens, heads and layers."""
    return bootstrap.estimate(_per_token(1))


def setting_metrics(bootstrap: Bootstrap, setting: str) -> SettingMetrics:
    """Return all about one of `SETTINGS`; perplexity is exp of the mean NLL."""
    figures = {score: bootstrap.estimate(_per_token(_column(setting, score))) for score in SCORES}
    nll = _per_token(_column(setting, "nll"))
    return SettingMetrics(**figures, perplexity=bootstrap.estimate(lambda sums: nll(sums).exp()))


def exact_curve(bootstrap: Bootstrap, shares: Mapping[int, float]) -> tuple[ExactPoint, ...]:
    """Return what each budget gives, in the table's order; shares by budget."""
    points = []
    for index, (budget, share) in enumerate(shares.items()):
        first = 2 + (len(SETTINGS) + index) * len(SCORES)
        figures = {
            score: bootstrap.estimate(_per_token(first + SCORES.index(score)))
            for score in ("nll", "kl", "agreement")
        }
        gap = _gap_recovered(bootstrap, first + SCORES.index("nll"))
        points.append(ExactPoint(budget, share, **figures, gap_recovered=gap))
    return tuple(points)


def retention(bootstrap: Bootstrap, notes: list[str]) -> Estimate | None:
    """Return accuracy of mapped / of target-alone; None if the target is never right."""
    mapped, target = _column("mapped", "accuracy"), _column("target_alone", "accuracy")
    if bootstrap.estimate(_per_token(target)).value == 0:
        notes.append("retention is not defined: the target is never right.")
        return None
    return bootstrap.estimate(lambda sums: positive_ratio(sums[..., mapped], sums[..., target]))


def floor_normalized_retention(bootstrap: Bootstrap, notes: list[str]) -> Estimate | None:
    """Return (mapped - floor) / (target - floor) of the accuracies; the floor is no-context."""
    mapped, floor, target = (
        _column(setting, "accuracy") for setting in ("mapped", "no_context", "target_alone")
    )
    share = _share(bootstrap, (mapped, floor), (target, floor))
    if share is None:
        reason = "the target's accuracy is not above its accuracy without context"
        difference = _difference(bootstrap, target, floor)
        notes.append(_undefined("floor_normalized_retention", reason, difference))
    return share


def gap_recovered(bootstrap: Bootstrap, notes: list[str]) -> Estimate | None:
    """Return (source - mapped) / (source - target) of the NLLs."""
    share = _gap_recovered(bootstrap, _column("mapped", "nll"))
    if share is None:
        source, target = (_column(setting, "nll") for setting in ("source_alone", "target_alone"))
        reason = "the source's NLL is not above the target's"
        notes.append(_undefined("gap_recovered", reason, _difference(bootstrap, source, target)))
    return share


def _gap_recovered(bootstrap: Bootstrap, mapped: int) -> Estimate | None:
    """The same for any column of NLLs."""
    source, target = (_column(setting, "nll") for setting in ("source_alone", "target_alone"))
    return _share(bootstrap, (source, mapped), (source, target))


def _share(bootstrap: Bootstrap, part: Columns, whole: Columns) -> Estimate | None:
    """One difference over another; None where the other is not positive beyond noise."""
    if _difference(bootstrap, *whole).low <= 0:
        return None
    (a, b), (c, d) = part, whole
    return bootstrap.estimate(
        lambda sums: positive_ratio(sums[..., a] - sums[..., b], sums[..., c] - sums[..., d])
    )


def _difference(bootstrap: Bootstrap, above: int, below: int) -> Estimate:
    """Of two columns, per token."""
    return bootstrap.estimate(lambda sums: (sums[..., above] - sums[..., below]) / sums[..., 0])


def _undefined(name: str, reason: str, difference: Estimate) -> str:
    return (
        f"{name} is not defined: {reason} beyond noise (difference {difference.value:.4g}, 95 % "
        f"interval {difference.low:.4g} to {difference.high:.4g})."
    )
