"""What an evaluation found, as plain numbers: the content of report.json."""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvhub.atomic import write_text
from kvhub.errors import NotFoundError, VerificationError
from kvhub.gate import GateResult

__all__ = [
    "SETTINGS",
    "Estimate",
    "ExactPoint",
    "Fidelity",
    "PositionBin",
    "Report",
    "SettingMetrics",
]

SCHEMA_VERSION = 1
SETTINGS = ("target_alone", "source_alone", "mapped", "no_context")


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % bootstrap interval over sequences."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class SettingMetrics:
    """How one setting predicts the scored tokens.

    Attributes
    ----------
    nll
        Negative log likelihood of the text, in nats per token.
    perplexity
        exp(nll).
    accuracy
        Share of tokens whose most likely prediction is the text, 0 to 1.
    kl
        Kullback-Leibler divergence of this setting from target-alone,
        sum p_target log(p_target / p_setting), in nats per token.
    agreement
        Share of tokens whose most likely prediction is that of target-alone, 0 to 1.
    """

    nll: Estimate
    perplexity: Estimate
    accuracy: Estimate
    kl: Estimate
    agreement: Estimate


@dataclass(frozen=True)
class PositionBin:
    """Relative error of the mapped cache at the positions `start` to `stop` - 1.

    A layer's relative error is sqrt(sum of squared errors / sum of squared true numbers) over
    sequences, positions, heads and dims; these are averaged over layers.
    """

    start: int
    stop: int
    key_error: float
    value_error: float


@dataclass(frozen=True)
class ExactPoint:
    """The mapped setting with a budget of tokens that the target computes itself.

    Attributes
    ----------
    budget
        In tokens per sequence; `kvhub.exact` says which they are.
    share
        What that is of the prefix tokens, 0 to 1.
    nll, kl, agreement
        As in `SettingMetrics`.
    gap_recovered
        As in `Report`; None in reports of older versions, too.
    """

    budget: int
    share: float
    nll: Estimate
    kl: Estimate
    agreement: Estimate
    gap_recovered: Estimate | None = None


@dataclass(frozen=True)
class Fidelity:
    """How near the mapped cache is to the target's own, per target layer; the map alone.

    Attributes
    ----------
    key_r2, value_r2
        `[layers]`: 1 - SSE / SST over the prefix tokens, pooled over heads and dims; keys in
        content space. SST is taken about the mean of each dim. A layer that never varies has 1 if
        it is met exactly, else 0.
    key_r2_by_head, value_r2_by_head
        `[layers][kv_heads]`.
    attention_output_cosine
        `[layers]`: cosine between the attention output with the mapped prefix and with the true
        one, for the target's own queries after the prefix; mean over tokens and heads.
    attention_output_cosine_by_head
        `[layers][attention_heads]`.
    key_error_placement
        `[layers]`: squared key error along the right singular vectors of the head's query matrix,
        weighted by squared singular value, over the mean along all directions. Above 1, the error
        lies where queries look. None where there is no error.
    value_error_placement
        `[layers]`: squared value error per position, weighted by the squared attention that the
        target truly pays to it, over the mean of all positions. None where there is no error.
    positions
        Error by position, in bins that double in size.
    key_error_placement_by_head, value_error_placement_by_head
        `[layers][kv_heads]`; empty in reports of older versions.
    """

    key_r2: tuple[float, ...]
    value_r2: tuple[float, ...]
    key_r2_by_head: tuple[tuple[float, ...], ...]
    value_r2_by_head: tuple[tuple[float, ...], ...]
    attention_output_cosine: tuple[float, ...]
    attention_output_cosine_by_head: tuple[tuple[float, ...], ...]
    key_error_placement: tuple[float | None, ...]
    value_error_placement: tuple[float | None, ...]
    positions: tuple[PositionBin, ...]
    key_error_placement_by_head: tuple[tuple[float | None, ...], ...] = ()
    value_error_placement_by_head: tuple[tuple[float | None, ...], ...] = ()


@dataclass(frozen=True)
class Report:
    """The evaluation of a mapper.

    Attributes
    ----------
    settings
        Metrics of `target_alone`, `source_alone`, `mapped` and `no_context` on the same tokens.
    retention
        Accuracy of mapped / of target-alone. None if the target is never right.
    floor_normalized_retention
        (mapped - floor) / (target - floor) of the accuracies, with no-context as the floor. None
        unless the target is above the floor beyond noise.
    gap_recovered
        (source NLL - mapped NLL) / (source NLL - target NLL). None unless the target is better
        than the source beyond noise.
    key_r2, value_r2
        Mean over target layers, see `Fidelity`.
    attention_output_cosine
        Mean over target layers, see `Fidelity`.
    layers
        Per target layer.
    notes
        What the reader must know: why a figure is None, what was skipped.
    provenance
        Mapper, models, data, sizes, protocol and versions.
    gate
        The verdict on these figures, see `kvhub.gate`; None in reports of older versions.
    exact
        The curve of fidelity against recompute, by budget; empty unless it was asked for.
    """

    settings: Mapping[str, SettingMetrics]
    retention: Estimate | None
    floor_normalized_retention: Estimate | None
    gap_recovered: Estimate | None
    key_r2: float
    value_r2: float
    attention_output_cosine: Estimate
    layers: Fidelity
    notes: tuple[str, ...]
    provenance: Mapping[str, Any]
    gate: GateResult | None = None
    exact: tuple[ExactPoint, ...] = ()

    def __post_init__(self) -> None:
        _require_finite(asdict(self), "report")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` gives an equal report back."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self), allow_nan=False))
        data["gate"] = None if self.gate is None else self.gate.to_dict()
        return {"schema_version": SCHEMA_VERSION, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Report":
        """Read what `to_dict` wrote.

        Raises
        ------
        VerificationError
            Another schema version, unknown or missing keys, or a number that is not finite.
        """
        data = dict(data)
        version = data.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise VerificationError(
                f"This report has schema version {version}; this kvhub reads {SCHEMA_VERSION}.",
                "Upgrade kvhub, or evaluate the mapper again.",
            )
        _require_keys(cls, data)
        if set(data["settings"]) != set(SETTINGS):
            raise VerificationError(
                f"A report has the settings {list(SETTINGS)}; found {sorted(data['settings'])}.",
                "Evaluate the mapper again.",
            )
        for name in ("retention", "floor_normalized_retention", "gap_recovered"):
            data[name] = None if data[name] is None else _read(Estimate, data[name])
        data["settings"] = {name: _read_setting(data["settings"][name]) for name in SETTINGS}
        data["attention_output_cosine"] = _read(Estimate, data["attention_output_cosine"])
        data["layers"] = _read_fidelity(data["layers"])
        data["notes"] = tuple(data["notes"])
        gate = data.get("gate")
        data["gate"] = None if gate is None else GateResult.from_dict(gate)
        data["exact"] = tuple(_read_exact(point) for point in data.get("exact", ()))
        return cls(**data)

    def save(self, path: str | Path) -> None:
        """Write report.json, atomically: a reader sees the old file or the new one."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False)
        write_text(Path(path), text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """Read a file that `save` wrote.

        Raises
        ------
        NotFoundError
            There is no such file.
        VerificationError
            It is not a report, see `from_dict`.
        """
        path = Path(path)
        if not path.is_file():
            raise NotFoundError(
                f"There is no report {path}.", "Make one with `kvhub evaluate MAPPER`."
            )
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise VerificationError(
                f"{path} is not JSON: {error}.", "Evaluate the mapper again."
            ) from error
        if not isinstance(data, dict):
            raise VerificationError(
                f"{path} holds a {type(data).__name__}, not a report.", "Evaluate the mapper again."
            )
        return cls.from_dict(data)


def _require_keys(cls: type, data: Any) -> None:
    expected = {field.name for field in fields(cls)}
    # What has a default was added later, and older reports lack it.
    required = {field.name for field in fields(cls) if field.default is MISSING}
    found = set(data) if isinstance(data, dict) else set()
    if not required <= found <= expected:
        raise VerificationError(
            f"{cls.__name__} of the report: unknown keys {sorted(found - expected)}, missing keys "
            f"{sorted(required - found)}.",
            "Upgrade kvhub, or evaluate the mapper again.",
        )


def _read(cls: type, data: Any) -> Any:
    _require_keys(cls, data)
    return cls(**data)


def _read_setting(data: Any) -> SettingMetrics:
    _require_keys(SettingMetrics, data)
    return SettingMetrics(**{name: _read(Estimate, value) for name, value in data.items()})


def _read_exact(data: Any) -> ExactPoint:
    _require_keys(ExactPoint, data)
    figures = {name: _read(Estimate, data[name]) for name in ("nll", "kl", "agreement")}
    gap = data.get("gap_recovered")
    figures["gap_recovered"] = None if gap is None else _read(Estimate, gap)
    return ExactPoint(**{**data, **figures})


def _read_fidelity(data: Any) -> Fidelity:
    _require_keys(Fidelity, data)
    values: dict[str, Any] = {
        name: tuple(tuple(row) if isinstance(row, list) else row for row in rows)
        for name, rows in data.items()
    }
    values["positions"] = tuple(_read(PositionBin, row) for row in data["positions"])
    return Fidelity(**values)


def _require_finite(value: Any, where: str) -> None:
    """Refuse NaN and infinity: such a figure was never measured, and JSON cannot hold it."""
    if isinstance(value, dict):
        for name, part in value.items():
            _require_finite(part, f"{where}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            _require_finite(part, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise VerificationError(
            f"{where} should be a finite number, found {value}.",
            "Check the models' dtype (bfloat16 or float32) and the mapper's calibration.",
        )
