"""From names to objects: what the commands do, without anything about how it looks."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvhub.atomic import recover
from kvhub.compatibility import Heads, require_pair, require_same
from kvhub.errors import ConflictError, UsageError
from kvhub.recipe import locate_model
from kvhub.spec import ModelSpec
from kvhub.store import find_mapper, home, mapper_names, mapper_path, work_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvhub.comparison import Comparison, Timing
    from kvhub.mapper import KVMapper
    from kvhub.report import Report
    from kvhub.ridge import LambdaScale
    from kvhub.stats import Statistics

__all__ = [
    "FitPlan",
    "LoadedPair",
    "bench_mapper",
    "compare_on_text",
    "environment",
    "evaluate_mapper",
    "fit_mapper",
    "list_store",
    "load_pair",
    "read_spec",
]

Track = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
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


@dataclass(frozen=True)
class LoadedPair:
    """Both models of a pair with their tokenizer."""

    source: "PreTrainedModel"
    target: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"


def read_spec(model: str) -> ModelSpec:
    """The spec of a model, under the name that the user gave."""
    return replace(ModelSpec.from_pretrained(locate_model(model)), model_id=model)


def load_pair(source: str, target: str, dtype: str, device: str | None) -> LoadedPair:
    """Load both models and the target's tokenizer."""
    from kvhub.models import load_model, load_tokenizer

    return LoadedPair(
        load_model(locate_model(source), dtype=dtype, device=device),
        load_model(locate_model(target), dtype=dtype, device=device),
        load_tokenizer(locate_model(target)),
    )


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
    pair = load_pair(plan.source, plan.target, plan.dtype, device)
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


def evaluate_mapper(
    name: str,
    track: Track,
    *,
    data: str | None,
    sequences: int,
    length: int | None,
    exact_prefix: int,
    dtype: str,
    device: str | None,
    source: str | None = None,
    target: str | None = None,
) -> "tuple[Report, Path]":
    """Evaluate a mapper and put report and plots into its package.

    Without `data` the text is what calibration used, behind what it saw. Only
    a mapper in the local store or a directory can take the report; its tensors do not change.
    """
    from kvhub.data import describe, evaluation_stream, token_batches
    from kvhub.evaluation import evaluate
    from kvhub.package import read_config, save
    from kvhub.plots import draw_plots

    path = find_mapper(name)
    calibration = read_config(path)[0].calibration
    data, start, length = evaluation_stream(calibration, data, length)
    mapper, pair = _loaded(name, source, target, dtype, device)
    batches = token_batches(pair.tokenizer, data, sequences=sequences, length=length, start=start)
    with track("Evaluate") as progress:
        report = evaluate(
            mapper,
            pair.source,
            pair.target,
            batches,
            exact_prefix=exact_prefix,
            provenance={"mapper": path.name, **describe(data), "start": start},
            progress=progress,
        )
    plots = draw_plots(report, mapper.config, scores=mapper.config.quality["selection_scores"])
    save(mapper, path, report=report.to_dict(), plots=plots, overwrite=True)
    return report, path


def compare_on_text(
    name: str,
    prompt: str,
    *,
    max_new_tokens: int,
    exact_prefix: int,
    source: str | None,
    target: str | None,
    dtype: str,
    device: str | None,
) -> "tuple[Comparison, dict[str, str]]":
    """Continue a text in three ways; also the new text of each, by way."""
    from kvhub.comparison import compare

    mapper, pair = _loaded(name, source, target, dtype, device)
    ids = pair.tokenizer(prompt, return_tensors="pt")["input_ids"]
    if ids.shape[1] < 2:
        raise UsageError(
            f"The prompt has {ids.shape[1]} tokens; a hand-off needs at least 2.",
            "Give a longer --prompt.",
        )
    found = compare(
        mapper,
        pair.source,
        pair.target,
        ids,
        max_new_tokens=max_new_tokens,
        exact_prefix=exact_prefix,
    )
    texts = {
        way: str(pair.tokenizer.decode(getattr(found, way).output_ids, skip_special_tokens=True))
        for way in ("target", "mapped", "source")
    }
    return found, texts


def bench_mapper(
    name: str,
    lengths: list[int],
    repeats: int,
    track: Track,
    *,
    source: str | None,
    target: str | None,
    dtype: str,
    device: str | None,
) -> "list[Timing]":
    """Time a mapper against its target's prefill."""
    from kvhub.comparison import time_handoff

    mapper, pair = _loaded(name, source, target, dtype, device)
    with track("Time") as progress:
        return time_handoff(
            mapper, pair.source, pair.target, lengths, repeats=repeats, progress=progress
        )


def _loaded(
    name: str, source: str | None, target: str | None, dtype: str, device: str | None
) -> "tuple[KVMapper, LoadedPair]":
    """A mapper and its two models, which may have been moved."""
    from kvhub.package import load

    mapper = load(find_mapper(name))
    config = mapper.config
    pair = load_pair(
        source or config.source.model_id, target or config.target.model_id, dtype, device
    )
    return mapper.to(pair.target.device), pair


def list_store() -> list[dict[str, Any]]:
    """The mappers in the local store, from their configs."""
    from kvhub.package import Manifest, read_config

    found = []
    for name in mapper_names():
        path = find_mapper(name)
        config = read_config(path)[0]
        found.append(
            {
                "name": name,
                "path": str(path),
                "source": config.source.model_id,
                "target": config.target.model_id,
                "top_k": config.top_k,
                "heads": config.heads,
                "held_out_r2": config.quality["held_out_r2"],
                "size_bytes": Manifest.read(path).size_bytes,
            }
        )
    return found


def environment() -> dict[str, Any]:
    """Versions and hardware."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("kvhub", "torch", "transformers", "safetensors", "huggingface-hub", "onnx"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    found["cpu_threads"] = torch.get_num_threads()
    cuda = torch.cuda.is_available()
    found["cuda_devices"] = [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count() * cuda)
    ]
    found["home"] = str(home())
    return found
