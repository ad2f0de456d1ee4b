"""`kvhub fit`: calibrate or read statistics, select, fit and save."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvhub.atomic import recover
from kvhub.compatibility import Heads, require_pair, require_same
from kvhub.errors import ConflictError, UsageError
from kvhub.pairs import Track, load_pair, read_spec
from kvhub.store import mapper_path, work_path

if TYPE_CHECKING:
    from kvhub.mapper import KVMapper
    from kvhub.ridge import LambdaScale
    from kvhub.stats import Statistics

__all__ = ["FitPlan", "fit_mapper"]

ROWS_PER_BATCH = 1024  # tokens per batch: enough that adding to a Gram costs little beside it


@dataclass(frozen=True)
class FitPlan:
    """Everything that decides what `kvhub fit` makes; see the command's options."""

    name: str
    source: str
    target: str
    top_k: int = 8
    heads: Heads = "all"
    ridge_lambda: float = 1e-3
    lambda_scale: "LambdaScale" = "relative"
    weighting: Literal["uniform", "attention"] = "uniform"
    selection: Literal["probe", "greedy"] = "probe"
    data: str = "HuggingFaceFW/fineweb-edu:sample-10BT"
    sequences: int = 500
    length: int = 1024
    stride: int = 1
    dtype: str = "auto"
    device: str | None = None
    statistics: Path | None = None
    overwrite: bool = False
    explicit: frozenset[str] = frozenset()  # what the user asked for, not a recipe or a default


def fit_mapper(plan: FitPlan, track: Track, say: Callable[[str], None]) -> "KVMapper | None":
    """Calibrate, select, fit and save; None on the ranks of `torchrun` that only calibrate.

    Raises
    ------
    ConflictError
        The mapper exists and `overwrite` is not set.
    IncompatiblePairError
        The pair, or the statistics file, does not fit.
    UsageError
        Too few tokens for the features.
    """
    path = mapper_path(plan.name)
    recover(path)
    if path.exists() and not plan.overwrite:
        raise ConflictError(
            f"There is a mapper {plan.name!r} already: {path}.",
            "Choose another --name, or pass --overwrite to replace it.",
        )
    statistics = _statistics(plan, track, say)
    if statistics is None:
        return None
    from kvhub.models import torch_dtype
    from kvhub.package import save
    from kvhub.ridge import fit
    from kvhub.selection import select_layers

    if plan.heads == "matched":
        statistics = statistics.matched()
    with track("Select source layers") as progress:
        selection = select_layers(statistics, plan.top_k, method=plan.selection, progress=progress)
    with track("Fit") as progress:
        mapper = fit(
            statistics,
            selection,
            heads=plan.heads,
            ridge_lambda=plan.ridge_lambda,
            lambda_scale=plan.lambda_scale,
            dtype=torch_dtype(plan.dtype, plan.device or "cpu"),
            progress=progress,
        )
    if not mapper.config.quality["comfortable_rows"]:
        say(
            f"Warning: {mapper.config.ridge['effective_tokens']:.0f} tokens for "
            f"{mapper.config.ridge['features']} features; ten times as many would be safe."
        )
    save(mapper, path, overwrite=plan.overwrite)
    for left in work_path(plan.name).parent.glob(f"{plan.name}.calibration*"):
        left.unlink()
    return mapper


def _statistics(plan: FitPlan, track: Track, say: Callable[[str], None]) -> "Statistics | None":
    """Read the statistics file if there is one, else calibrate, and write it if one was named."""
    from kvhub.ridge import require_rows
    from kvhub.selection import require_top_k
    from kvhub.stats import Statistics

    source, target = read_spec(plan.source), read_spec(plan.target)
    require_pair(source, target, plan.heads)
    require_top_k(plan.top_k, source.num_layers)
    if plan.statistics is not None and plan.statistics.exists():
        statistics = Statistics.load(plan.statistics)
        require_same(statistics.source, source, "source")
        require_same(statistics.target, target, "target")
        _require_settings(statistics, plan)
        say(f"Using the statistics in {plan.statistics}; no model is loaded.")
        return statistics
    import torch

    from kvhub.calibration import calibrate
    from kvhub.data import describe, token_batches

    features = plan.top_k * source.kv_dim // (1 if plan.heads == "all" else target.kv_heads)
    require_rows(0.9 * plan.sequences * plan.length / plan.stride, features, plan.top_k)
    rank, world_size = _join_ranks()
    device = plan.device
    if device is None and world_size > 1 and torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    pair = load_pair(source, target, plan.dtype, device)
    batches = token_batches(
        pair.tokenizer,
        plan.data,
        sequences=plan.sequences,
        length=plan.length,
        batch_size=max(1, ROWS_PER_BATCH // plan.length),
        rank=rank,
        world_size=world_size,
    )
    with track("Calibrate") as progress:
        statistics = calibrate(
            pair.source,
            pair.target,
            batches,
            source_spec=source,
            target_spec=target,
            heads=plan.heads,
            weighting=plan.weighting,
            stride=plan.stride,
            provenance={**describe(plan.data), "length": plan.length},
            checkpoint=work_path(plan.name).with_name(f"{plan.name}.calibration"),
            progress=progress,
        )
    if world_size > 1:
        torch.distributed.destroy_process_group()
    if rank > 0:
        return None
    if plan.statistics is not None:
        statistics.save(plan.statistics)
    return statistics


def _require_settings(statistics: "Statistics", plan: FitPlan) -> None:
    """Raise UsageError where a calibration was made otherwise than this fit is asked for."""
    made: dict[str, Any] = {**statistics.provenance, "weighting": statistics.weighting}
    asked: dict[str, Any] = {"weighting": plan.weighting}
    for name in ("sequences", "length", "stride"):
        if name in plan.explicit:
            asked[name] = getattr(plan, name)
    if "data" in plan.explicit:
        from kvhub.data import describe

        asked["data"] = describe(plan.data)["data"]
    other = {name: value for name, value in asked.items() if made.get(name) != value}
    if other:
        differences = ", ".join(
            f"{name} {made.get(name)} there and {value} here" for name, value in other.items()
        )
        raise UsageError(
            f"The statistics in {plan.statistics} were made otherwise: {differences}.",
            "Leave these options out, or calibrate again into another --statistics file.",
        )


def _join_ranks() -> tuple[int, int]:
    """Join the process group of `torchrun`, if it started this process."""
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    import torch

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
