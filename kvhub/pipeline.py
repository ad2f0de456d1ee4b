"""What the other commands do with a mapper's name, without anything about how it looks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvhub.atomic import new_directory
from kvhub.errors import NotFoundError, UsageError
from kvhub.pairs import Track, load_mapper_pair
from kvhub.store import find_local, find_mapper, home, mapper_names

if TYPE_CHECKING:
    from kvhub.comparison import Comparison, Timing
    from kvhub.report import Report
    from kvhub.roofline import Prediction

__all__ = [
    "bench_mapper",
    "compare_on_text",
    "default_repo_id",
    "environment",
    "evaluate_mapper",
    "list_store",
    "local_mapper",
]


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
    exact_budgets: Sequence[int] = (),
    source: str | None = None,
    target: str | None = None,
) -> "tuple[Report, Path]":
    """Evaluate a mapper and put report and plots into its package.

    Without `data` the text is what calibration used, behind what it saw. A mapper from the Hub
    does not change: its report goes into `reports/` beside the local store. The report holds the
    verdict of the default gate.
    """
    from dataclasses import replace

    from kvhub.data import describe, evaluation_stream, token_batches
    from kvhub.evaluation import evaluate
    from kvhub.gate import check_gate
    from kvhub.package import read_config, save
    from kvhub.plots import draw_plots

    path = find_mapper(name)
    calibration = read_config(path)[0].calibration
    data, start, length = evaluation_stream(calibration, data, length)
    mapper, pair = load_mapper_pair(name, source, target, dtype, device)
    batches = token_batches(pair.tokenizer, data, sequences=sequences, length=length, start=start)
    with track("Evaluate") as progress:
        report = evaluate(
            mapper,
            pair.source,
            pair.target,
            batches,
            exact_prefix=exact_prefix,
            exact_budgets=exact_budgets,
            provenance={"mapper": path.name, **describe(data), "start": start},
            progress=progress,
        )
    report = replace(report, gate=check_gate(report))
    plots = draw_plots(report, mapper.config, scores=mapper.config.quality["selection_scores"])
    if find_local(name) is not None:
        save(mapper, path, report=report.to_dict(), plots=plots, overwrite=True)
        return report, path
    path = home() / "reports" / name.replace("/", "--")
    with new_directory(path, overwrite=True) as directory:
        report.save(directory / "report.json")
        for file, png in plots.items():
            (directory / file).write_bytes(png)
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
    exact_budget: int | None = None,
    policy: Literal["always", "gate", "probe"] = "always",
) -> "tuple[Comparison, dict[str, str]]":
    """Continue a text in three ways; also the new text of each, by way."""
    from kvhub.comparison import compare
    from kvhub.policy import PROBE_TOKENS, Policy

    decide = None
    if policy != "always":
        tokens = PROBE_TOKENS if policy == "probe" else 0
        decide = Policy.from_package(name, probe_tokens=tokens)
    mapper, pair = load_mapper_pair(name, source, target, dtype, device)
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
        exact_budget=exact_budget,
        policy=decide,
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
) -> "tuple[list[Timing], tuple[Prediction, ...]]":
    """Time a mapper against its target's prefill; beside it, what GPUs should take.

    No predictions for a mapper with networks: the roofline is of the kernels, which refuse it.
    """
    from kvhub.comparison import time_handoff
    from kvhub.estimates import estimate

    mapper, pair = load_mapper_pair(name, source, target, dtype, device)
    with track("Time") as progress:
        timings = time_handoff(
            mapper, pair.source, pair.target, lengths, repeats=repeats, progress=progress
        )
    config = mapper.config
    if config.repair is not None:
        return timings, ()
    specs, parameters = (config.source, config.target), pair.target.num_parameters()
    found = estimate(*specs, config.heads, config.top_k, parameters, lengths)
    return timings, found.predictions


def local_mapper(name: str) -> Path:
    """The directory of a local mapper, which is what can be published.

    Raises
    ------
    NotFoundError
        There is none of this name.
    """
    path = find_local(name)
    if path is None:
        known = ", ".join(mapper_names()) or "none"
        raise NotFoundError(
            f"No local mapper {name!r}; the local store has: {known}.",
            "Fit one with `kvhub fit NAME`, or give its directory.",
        )
    return path


def default_repo_id(name: str) -> str:
    """`USER/NAME` on the Hub, for whoever is logged in.

    Raises
    ------
    AuthError, NetworkError
        Nobody is, or the Hub cannot be asked.
    """
    from kvhub.hub import client, translated

    with translated("asking the Hub who you are"):
        return f"{client().whoami()['name']}/{name}"


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
