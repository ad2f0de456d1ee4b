"""What differs between two packages: configs, figures and tensors, and the version that demands."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvhub.errors import VerificationError
from kvhub.report import Estimate, Report
from kvhub.versions import Bump, propose

if TYPE_CHECKING:
    from torch import Tensor

    from kvhub.package import Manifest

__all__ = ["Change", "Difference", "MetricChange", "TensorChange", "compare_packages"]

Figure: TypeAlias = Estimate | float

# The fields of config.json that say which models' caches the mapper reads and writes, and how.
COMPATIBILITY = ("source", "target", "heads", "top_k")
# Provenance of a report that says what was measured, as opposed to on what and how.
SUBJECT = ("mapper", "heads", "top_k", "versions")


@dataclass(frozen=True)
class Change:
    """A value at a dotted path, as JSON; None where there is none."""

    path: str
    old: Any
    new: Any


@dataclass(frozen=True)
class MetricChange:
    """A figure of the reports, with its interval where it has one; None where there is none."""

    name: str
    old: Figure | None
    new: Figure | None


@dataclass(frozen=True)
class TensorChange:
    """A stored tensor that differs.

    Attributes
    ----------
    name
        With its target layer, e.g. `key_weight.3`.
    old_shape, new_shape
        None where the package has no such tensor.
    max_abs
        Largest |new - old|, in float64. None where the shapes differ.
    relative
        ||new - old|| / max(||old||, ||new||) in the Frobenius norm, in float64: 0 to 2, and the
        same in both directions. None where the shapes differ.
    """

    name: str
    old_shape: tuple[int, ...] | None
    new_shape: tuple[int, ...] | None
    max_abs: float | None
    relative: float | None


@dataclass(frozen=True)
class Difference:
    """What differs from one package to another; everything is empty where they are the same.

    Attributes
    ----------
    bump
        The part of the version that has to rise, see `kvhub.versions.propose`.
    files
        By name, with their sha256.
    compatibility
        Fields of config.json that decide which models the mapper fits.
    config
        The other fields of config.json.
    metrics
        Figures of report.json.
    evaluation
        Ways in which the two reports were measured differently, as text, sizes or protocol: with
        any, their figures say little about the mappers. Empty unless both packages have one.
    tensors
        In the order of their names and layers.
    """

    bump: Bump
    files: tuple[Change, ...]
    compatibility: tuple[Change, ...]
    config: tuple[Change, ...]
    metrics: tuple[MetricChange, ...]
    evaluation: tuple[Change, ...]
    tensors: tuple[TensorChange, ...]

    @property
    def identical(self) -> bool:
        """Whether the packages are the same, byte by byte."""
        return not self.files

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"identical": self.identical, **asdict(self)}


def compare_packages(a: Path, b: Path) -> Difference:
    """Compare a package with a later one.

    Both are verified first. Of the tensors, one of each package is in memory at a time.

    Parameters
    ----------
    a, b
        The directories.

    Raises
    ------
    NotFoundError, VerificationError
        As for `kvhub.package.verify`; also where a tensor cannot be read or is not finite.
    """
    from kvhub.package import read_config, verify

    old_manifest, new_manifest = verify(a), verify(b)
    (old_config, old_data), (new_config, new_data) = read_config(a), read_config(b)
    config = _changes(old_data, new_data)
    old_report, new_report = _report(a, old_manifest), _report(b, new_manifest)
    evaluation = []
    if old_report and new_report:
        changes = _changes(old_report.provenance, new_report.provenance)
        evaluation = [change for change in changes if _root(change) not in SUBJECT]
    return Difference(
        bump=propose(old_config, old_manifest, new_config, new_manifest),
        files=_file_changes(old_manifest, new_manifest),
        compatibility=tuple(change for change in config if _root(change) in COMPATIBILITY),
        config=tuple(change for change in config if _root(change) not in COMPATIBILITY),
        metrics=_metric_changes(old_report, new_report),
        evaluation=tuple(evaluation),
        tensors=tuple(_tensor_changes(a, old_manifest, b, new_manifest)),
    )


def _file_changes(old: "Manifest", new: "Manifest") -> tuple[Change, ...]:
    digests = [{name: sha256 for name, (sha256, _) in item.files.items()} for item in (old, new)]
    names = sorted({*old.files, *new.files})
    changes = (Change(name, digests[0].get(name), digests[1].get(name)) for name in names)
    return tuple(change for change in changes if change.old != change.new)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    before, after = dict(_leaves(old)), dict(_leaves(new))
    paths = [*before, *(path for path in after if path not in before)]
    changes = (Change(path, before.get(path), after.get(path)) for path in paths)
    return [change for change in changes if change.old != change.new]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested objects by dotted path.

    A list is one value, unless it has lists or objects in it: then every item has a place.
    """
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, (list, dict)) for item in value):
        parts = list(enumerate(value))
    else:
        yield path, value
    for key, part in parts:
        yield from _leaves(part, f"{path}.{key}" if path else str(key))


def _root(change: Change) -> str:
    return change.path.partition(".")[0]


def _report(directory: Path, manifest: "Manifest") -> Report | None:
    return Report.load(directory / "report.json") if "report.json" in manifest.files else None


def _metric_changes(old: Report | None, new: Report | None) -> tuple[MetricChange, ...]:
    before, after = _figures(old), _figures(new)
    names = before or after
    changes = (MetricChange(name, before.get(name), after.get(name)) for name in names)
    return tuple(change for change in changes if change.old != change.new)


def _figures(report: Report | None) -> dict[str, Figure | None]:
    """The headline figures of a report by name, always the same names in the same order."""
    if report is None:
        return {}
    figures: dict[str, Figure | None] = {
        "retention": report.retention,
        "floor_normalized_retention": report.floor_normalized_retention,
        "gap_recovered": report.gap_recovered,
        "key_r2": report.key_r2,
        "value_r2": report.value_r2,
        "attention_output_cosine": report.attention_output_cosine,
    }
    for setting, metrics in report.settings.items():
        for field in fields(metrics):
            figures[f"{setting}.{field.name}"] = getattr(metrics, field.name)
    return figures


def _tensor_changes(
    a: Path, old_manifest: "Manifest", b: Path, new_manifest: "Manifest"
) -> Iterator[TensorChange]:
    if old_manifest.tensors_digest == new_manifest.tensors_digest:
        return
    before, after = _tensor_files(a, old_manifest), _tensor_files(b, new_manifest)
    for name in sorted({*before, *after}, key=_place):
        change = _tensor_change(name, before.get(name), after.get(name))
        if change.max_abs != 0:
            yield change


def _tensor_change(name: str, before: Path | None, after: Path | None) -> TensorChange:
    import torch

    old = None if before is None else _read_tensor(before, name)
    new = None if after is None else _read_tensor(after, name)
    old_shape = None if old is None else tuple(old.shape)
    new_shape = None if new is None else tuple(new.shape)
    if old is None or new is None or old_shape != new_shape:
        return TensorChange(name, old_shape, new_shape, None, None)
    norm = torch.linalg.vector_norm
    largest = max(float(norm(old)), float(norm(new)))
    delta = new.sub_(old)
    max_abs = float(delta.abs().max()) if delta.numel() else 0.0
    relative = float(norm(delta)) / largest if largest else 0.0
    return TensorChange(name, old_shape, new_shape, max_abs, relative)


def _tensor_files(directory: Path, manifest: "Manifest") -> dict[str, Path]:
    """Where each tensor of a package is; only the headers are read."""
    from safetensors import SafetensorError, safe_open

    files: dict[str, Path] = {}
    for name in manifest.files:
        if not name.endswith(".safetensors"):
            continue
        try:
            with safe_open(directory / name, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), directory / name)
        except SafetensorError as error:
            raise VerificationError(
                f"{directory / name} is not a safetensors file: {error}.",
                "Download or save the mapper again.",
            ) from error
    return files


def _read_tensor(path: Path, name: str) -> "Tensor":
    import torch
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        # A copy even of what is float64 already: the file is mapped, and deltas are taken in place.
        tensor: Tensor = file.get_tensor(name).to(torch.float64, copy=True)
    if not bool(torch.isfinite(tensor).all()):
        raise VerificationError(f"{name} of {path} is not finite.", "Fit the mapper again.")
    return tensor


def _place(name: str) -> tuple[str, int]:
    stack, _, layer = name.rpartition(".")
    return (stack, int(layer)) if layer.isdecimal() else (name, 0)
