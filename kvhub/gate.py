"""Whether a mapper is good enough to be trusted, by thresholds that each have a reason.

The verdict speaks about text like that of the evaluation. It is written into every report, so that
a package says by itself whether it may be used; see docs/gate.md for what the thresholds catch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from kvhub.errors import VerificationError

if TYPE_CHECKING:
    from kvhub.report import Estimate, Report

__all__ = ["Criterion", "Gate", "GateResult", "check_gate"]

REASONS = {
    "kl_over_source": (
        "If the mapped target's predictions are no nearer to the target's own than the source's "
        "are, the source alone gives the same for nothing."
    ),
    "gap_recovered": (
        "A mapped target that predicts the text no better than the source alone is not worth "
        "handing over to."
    ),
    "attention_output_cosine": (
        "What attention reads must point where it should. The paper's two failing pairs were at "
        "most at 0.59 (a repair raised them by 0.41 and 0.48); the pairs that come with kvhub are "
        "at 0.94 to 0.99."
    ),
    "key_r2": (
        "Keys far worse than a constant are the paper's red flag: on the task's text its two "
        "failing pairs had -3.2 and -7.8, and about -0.2 once repaired."
    ),
}


@dataclass(frozen=True)
class Gate:
    """The thresholds; the defaults are those that `kvhub evaluate` writes into a package.

    Attributes
    ----------
    max_kl_over_source
        KL of the mapped target from the target, over that of source-alone from the target.
    min_gap_recovered
        Of the NLL gap between source and target. Left out where the target is not better than
        the source: then there is no gap, and `max_kl_over_source` decides.
    min_attention_output_cosine
        Of the map alone, mean over layers and heads.
    min_key_r2
        Of the map alone in content space, mean over layers.
    """

    max_kl_over_source: float = 1.0
    min_gap_recovered: float = 0.0
    min_attention_output_cosine: float = 0.65
    min_key_r2: float = -1.0


@dataclass(frozen=True)
class Criterion:
    """One threshold and how a report stands to it.

    Attributes
    ----------
    name
        One of `REASONS`.
    value
        The figure.
    bound
        What is held against the threshold: the worse end of the 95 % interval, or the value itself
        where the report has no interval for it.
    threshold
        What `bound` is held against.
    upper
        Whether `bound` must be at most the threshold, else at least.
    passed
        Whether it is.
    reason
        Why there is such a threshold.
    """

    name: str
    value: float
    bound: float
    threshold: float
    upper: bool
    passed: bool
    reason: str


@dataclass(frozen=True)
class GateResult:
    """A report held against a gate; it passes if all criteria do."""

    criteria: tuple[Criterion, ...]

    @property
    def passed(self) -> bool:
        return all(criterion.passed for criterion in self.criteria)

    @property
    def failures(self) -> tuple[Criterion, ...]:
        return tuple(criterion for criterion in self.criteria if not criterion.passed)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with the verdict spelled out; `from_dict` gives an equal result back."""
        criteria = [asdict(criterion) for criterion in self.criteria]
        return {"passed": self.passed, "criteria": criteria}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "GateResult":
        """Read what `to_dict` wrote.

        Raises
        ------
        VerificationError
            Other keys, no criterion, or a verdict that its criteria do not give.
        """
        names = {field.name for field in fields(Criterion)}
        keys = set(data) if isinstance(data, dict) else set()
        rows = data["criteria"] if keys == {"passed", "criteria"} else []
        sound = isinstance(rows, list) and all(
            isinstance(row, dict) and set(row) == names for row in rows
        )
        if not rows or not sound:
            raise VerificationError(
                f"The report's gate should have a verdict and criteria of {sorted(names)}; found "
                f"{data}.",
                "Evaluate the mapper again.",
            )
        result = cls(tuple(Criterion(**row) for row in rows))
        if data["passed"] is not result.passed:
            raise VerificationError(
                f"The report's gate says passed = {data['passed']}, its criteria say "
                f"{result.passed}.",
                "Evaluate the mapper again.",
            )
        return result


def check_gate(report: "Report", gate: Gate | None = None) -> GateResult:
    """Hold a report against a gate.

    Parameters
    ----------
    report
        From `kvhub.evaluation.evaluate`.
    gate
        The thresholds; None for the default ones.

    Returns
    -------
    result
        The worse end of an interval must pass, so that few or scattered sequences do not.
    """
    gate = gate or Gate()
    mapped, source = report.settings["mapped"].kl, report.settings["source_alone"].kl
    criteria = [
        _at_most(
            "kl_over_source",
            _ratio(mapped.value, source.value),
            _ratio(mapped.high, source.low),
            gate.max_kl_over_source,
        )
    ]
    if report.gap_recovered is not None:
        criteria.append(_at_least("gap_recovered", report.gap_recovered, gate.min_gap_recovered))
    cosine = report.attention_output_cosine
    criteria += [
        _at_least("attention_output_cosine", cosine, gate.min_attention_output_cosine),
        _at_least("key_r2", report.key_r2, gate.min_key_r2),
    ]
    return GateResult(tuple(criteria))


LARGEST_RATIO = 1e9  # JSON has no infinity; a source that is the target itself leaves KL 0


def _ratio(mapped: float, source: float) -> float:
    if mapped == 0:
        return 0.0
    return min(LARGEST_RATIO, mapped / source) if source > 0 else LARGEST_RATIO


def _at_most(name: str, value: float, bound: float, threshold: float) -> Criterion:
    return Criterion(name, value, bound, threshold, True, bound <= threshold, REASONS[name])


def _at_least(name: str, figure: "Estimate | float", threshold: float) -> Criterion:
    value, bound = (figure, figure) if isinstance(figure, float) else (figure.value, figure.low)
    return Criterion(name, value, bound, threshold, False, bound >= threshold, REASONS[name])
