"""`kvhub fit`: calibrate or read statistics, select, fit, align and save."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvhub.atomic import recover
from kvhub.compatibility import Heads, require_pair, require_same
from kvhub.errors import ConflictError, UsageError
from kvhub.pairs import LoadedPair, Track, load_pair, read_spec
from kvhub.spec import ModelSpec
from kvhub.store import mapper_path, work_path

if TYPE_CHECKING:
    from kvhub.data import TokenBatch
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
    align: bool = True  # to the attention output; where statistics are given, only if asked for
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
    """Calibrate, select, fit, align and save; None on the ranks of `torchrun` but the first.

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
    source, target = read_spec(plan.source), read_spec(plan.target)
    require_pair(source, target, plan.heads)
    from kvhub.models import torch_dtype
    from kvhub.package import save
    from kvhub.ridge import fit, with_held_out_r2
    from kvhub.selection import require_top_k, select_layers

    require_top_k(plan.top_k, source.num_layers)
    reading, align = None, plan.align
    if plan.statistics is not None and plan.statistics.exists():
        statistics = _read_statistics(plan, source, target)
        align = align and "align" in plan.explicit
        say(
            f"Using the statistics in {plan.statistics}"
            + ("." if align else "; no model is loaded, and nothing is aligned (--align does).")
        )
    else:
        reading = _Reading.open(plan, source, target)
        statistics = reading.calibrate(track)
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
    if align:
        reading = reading or _Reading.open(plan, source, target)
        mapper = with_held_out_r2(reading.align(mapper, track, say), statistics)
    if reading is not None and not reading.close():
        return None
    if not mapper.config.quality["comfortable_rows"]:
        say(
            f"Warning: {mapper.config.ridge['effective_tokens']:.0f} tokens for "
            f"{mapper.config.ridge['features']} features; ten times as many would be safe."
        )
    save(mapper, path, overwrite=plan.overwrite)
    for suffix in (".calibration*", ".alignment.*"):
        for left in work_path(plan.name).parent.glob(f"{plan.name}{suffix}"):
            left.unlink()
    return mapper


@dataclass(frozen=True)
class _Reading:
    """The two models, and the text that they read, as often as it is asked for."""

    plan: FitPlan
    source: ModelSpec
    target: ModelSpec
    pair: LoadedPair
    batches: "list[TokenBatch]"
    rank: int
    world_size: int

    @classmethod
    def open(cls, plan: FitPlan, source: ModelSpec, target: ModelSpec) -> "_Reading":
        """Load the models; under `torchrun` join its ranks."""
        import torch

        from kvhub.data import token_batches
        from kvhub.ridge import require_rows

        features = plan.top_k * source.kv_dim // (1 if plan.heads == "all" else target.kv_heads)
        require_rows(0.9 * plan.sequences * plan.length / plan.stride, features, plan.top_k)
        rank, world_size = _join_ranks()
        device = plan.device
        if device is None and world_size > 1 and torch.cuda.is_available():
            device = f"cuda:{os.environ['LOCAL_RANK']}"
        pair = load_pair(source, target, plan.dtype, device)
        # This rank's share of the text.
        batches = token_batches(
            pair.tokenizer,
            plan.data,
            sequences=plan.sequences,
            length=plan.length,
            batch_size=max(1, ROWS_PER_BATCH // plan.length),
            rank=rank,
            world_size=world_size,
        )
        return cls(plan, source, target, pair, list(batches), rank, world_size)

    def calibrate(self, track: Track) -> "Statistics":
        """The statistics of all ranks, saved where the plan says."""
        from kvhub.calibration import calibrate
        from kvhub.data import describe

        plan = self.plan
        with track("Calibrate") as progress:
            statistics = calibrate(
                self.pair.source,
                self.pair.target,
                self.batches,
                source_spec=self.source,
                target_spec=self.target,
                heads=plan.heads,
                weighting=plan.weighting,
                stride=plan.stride,
                provenance={**describe(plan.data), "length": plan.length},
                checkpoint=work_path(plan.name).with_name(f"{plan.name}.calibration"),
                progress=progress,
            )
        if plan.statistics is not None and self.rank == 0:
            statistics.save(plan.statistics)
        return statistics

    def align(self, mapper: "KVMapper", track: Track, say: Callable[[str], None]) -> "KVMapper":
        """The mapper fitted to the attention output, as far as held-out sequences like it."""
        from kvhub.alignment import align

        # Ranks that went on from different passes would wait for each other for ever.
        resumable = self.world_size == 1
        path = work_path(self.plan.name).with_name(f"{self.plan.name}.alignment")
        found = align(
            mapper,
            self.pair.source,
            self.pair.target,
            self.batches,
            checkpoint=path if resumable else None,
            track=track,
        )
        before, after = (
            f"KL {one.kl[1]:.4f} ({one.kl[0]:.4f} with no token exact)"
            for one in (found.tried[0], found.best)
        )
        if found.best is found.tried[0]:
            say(f"Aligning did not help on held-out text: {before} as it was. Left out.")
        else:
            say(f"Aligned on held-out text: {before} before, {after} after.")
        return found.best.mapper

    def close(self) -> bool:
        """Leave the ranks; whether this one goes on."""
        if self.world_size > 1:
            import torch

            torch.distributed.destroy_process_group()
        return self.rank == 0


def _read_statistics(plan: FitPlan, source: ModelSpec, target: ModelSpec) -> "Statistics":
    """The plan's statistics file, if it is one of this pair and these settings."""
    from kvhub.stats import Statistics

    statistics = Statistics.load(Path(str(plan.statistics)))
    require_same(statistics.source, source, "source")
    require_same(statistics.target, target, "target")
    _require_settings(statistics, plan)
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
