"""`kvhub repair`: networks where a mapper's linear map misses, and a new mapper with them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvhub.atomic import recover
from kvhub.errors import ConflictError, UsageError
from kvhub.pairs import Track, load_mapper_pair
from kvhub.store import find_local, find_mapper, mapper_path

if TYPE_CHECKING:
    from kvhub.mapper import KVMapper

__all__ = ["RepairPlan", "Repaired", "repair_mapper"]


@dataclass(frozen=True)
class RepairPlan:
    """Everything that decides what `kvhub repair` makes; see the command's options."""

    mapper: str
    name: str | None = None
    data: str | None = None
    sequences: int | None = None
    size_budget: float = 0.5
    hidden: int = 256
    source: str | None = None
    target: str | None = None
    dtype: str = "auto"
    device: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Repaired:
    """What came of a repair.

    Attributes
    ----------
    name, path
        Of the new mapper; None where no network pays, and then nothing was written.
    size_bytes, repaired_size_bytes
        Of the tensors before and after.
    layers
        Of each layer that was tried, as `kvhub.mlp.LayerGain`.
    """

    name: str | None
    path: str | None
    size_bytes: int
    repaired_size_bytes: int
    layers: tuple[dict[str, Any], ...]


def repair_mapper(plan: RepairPlan, track: Track, say: Callable[[str], None]) -> Repaired:
    """Train networks on what the linear map leaves over, and save a mapper with those that pay.

    Without `data` the text is what calibration used: the very sequences, so that those that it
    held out are held out here, and an evaluation's are new to both.

    Raises
    ------
    ConflictError
        The new mapper exists and `overwrite` is not set.
    UsageError
        The text cannot be found again or is to be used beyond what calibration saw of it, or as
        for `kvhub.mlp.repair`.
    NotFoundError, IncompatiblePairError, VerificationError
        Mapper, models or text are missing or do not belong together.
    """
    from kvhub.data import token_batches
    from kvhub.package import read_config

    package = find_mapper(plan.mapper)
    local = find_local(plan.mapper)
    if plan.name is None and local is None:
        raise UsageError(
            f"{plan.mapper} is on the Hub; the new mapper needs a name of its own.",
            "Choose one: --name mine-repaired",
        )
    name = plan.name or f"{package.resolve().name}-repaired"
    path = mapper_path(name)
    recover(path)
    if package.resolve() == path.resolve():
        raise UsageError(
            f"The repair would replace the mapper {name!r} that it starts from.",
            "Choose another --name.",
        )
    if path.exists() and not plan.overwrite:
        raise ConflictError(
            f"There is a mapper {name!r} already: {path}.",
            "Choose another --name, or pass --overwrite to replace it.",
        )
    calibration = read_config(package)[0].calibration
    about, settings = _text(calibration, plan)
    mapper, pair = load_mapper_pair(plan.mapper, plan.source, plan.target, plan.dtype, plan.device)
    from kvhub.mlp import repair

    batches = token_batches(
        pair.tokenizer,
        about["data"] if plan.data is None else plan.data,
        sequences=settings["sequences"],
        length=settings["length"],
    )
    with track("Train") as progress:
        repaired = repair(
            mapper,
            pair.source,
            pair.target,
            batches,
            size_budget=plan.size_budget,
            hidden=plan.hidden,
            held_out_every=calibration.get("held_out_every", 10),
            provenance={**about, "length": settings["length"]},
            progress=progress,
        )
    pays = repaired.config.repair is not None
    if pays:
        _save(repaired, path, plan, about | settings)
    else:
        say("No network gains enough on held-out sequences; nothing was written.")
    return Repaired(
        name=name if pays else None,
        path=str(path) if pays else None,
        size_bytes=mapper.size_bytes,
        repaired_size_bytes=repaired.size_bytes,
        layers=tuple(repaired.config.quality["repair"]["layers"]),
    )


def _text(calibration: dict[str, Any], plan: RepairPlan) -> tuple[dict[str, Any], dict[str, int]]:
    """What the text is, and which of its sequences to take."""
    from kvhub.data import calibrated_on, describe

    used, length = calibration.get("data"), calibration.get("length")
    if not isinstance(length, int):
        raise UsageError(
            "Calibration had no one length.", "Fit the mapper again with one --length."
        )
    if plan.data is None and (not isinstance(used, str) or calibration.get("kind") == "files"):
        raise UsageError(
            f"Calibration used {used or 'text of its own'}, and a mapper does not record where "
            "local or merged text is.",
            "Name the text to train on: --data FILE.",
        )
    data = str(used) if plan.data is None else plan.data
    seen = calibrated_on(calibration, data)
    sequences = plan.sequences or (seen or calibration)["sequences"]
    # Evaluations on this text begin behind what calibration saw of it.
    if seen is not None and (sequences > seen["sequences"] or seen.get("length") != length):
        raise UsageError(
            f"Calibration saw {seen['sequences']} sequences of {data}, of {seen.get('length')} "
            f"tokens; found {sequences} of {length}. An evaluation would not know of more.",
            "Lower --sequences, fit the mapper again on more, or name other text with --data.",
        )
    return describe(data), {"sequences": sequences, "length": length}


def _save(repaired: "KVMapper", path: Path, plan: RepairPlan, record: dict[str, Any]) -> None:
    """Save, with text that calibration had not seen on record for later evaluations."""
    from kvhub.data import calibrated_on
    from kvhub.mapper import KVMapper

    calibration = repaired.config.calibration
    if plan.data is not None and calibrated_on(calibration, plan.data) is None:
        config = replace(repaired.config, calibration=_recorded(calibration, record))
        repaired = KVMapper(config, repaired.tensors())
    repaired.save_pretrained(path, overwrite=plan.overwrite)


def _recorded(calibration: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """With a repair at the end of the records that `calibrated_on` follows."""
    if "refit" in calibration:
        return {**calibration, "refit": _recorded(calibration["refit"], record)}
    return {**calibration, "repair": record}
