"""What an exported directory is tested for where it will serve, before it does.

    python selftest.py [--model DIR] [--side source|target] [--json]

Versions, weights, the map (Triton's kernels and plain torch) on this device, the layout of pools,
the store, and a model's own keys. It needs no engine. The status is 1 if a check failed.
"""

import argparse
import json
import platform
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from kvhub.exporters.chain import shard_key
from kvhub.exporters.entry import decode, encode
from kvhub.exporters.selftest_map import check_map, mapping_of
from kvhub.exporters.selftest_model import check_files, check_rope, side_of
from kvhub.exporters.serving import DTYPES, Deployment, heads_of, load_deployment, load_plan
from kvhub.exporters.staging import Part, Stage
from kvhub.exporters.status import Status
from kvhub.exporters.store import open_store
from torch import Tensor

from kvhub.errors import KVHubError, UsageError, VerificationError

__all__ = ["Result", "check_store", "check_weights", "main", "run_checks"]

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 9)
PACKAGES = ("torch", "triton", "numpy", "safetensors", "transformers", "tensorrt_llm")
STAGING_SECONDS = 30.0  # for one entry: enough for any store that could serve


@dataclass(frozen=True)
class Result:
    """What became of a check: `passed`, `failed` or `skipped`; what was found, what to do."""

    name: str
    state: str
    found: str
    hint: str = ""


class Skipped(Exception):
    """There is nothing to check here; it says why."""


def run_checks(
    path: Path, models: Sequence[Path] = (), side: str | None = None
) -> Iterator[Result]:
    """Run every check of an exported directory, one after the other.

    Parameters
    ----------
    path
        The directory.
    models
        Directories of Hugging Face models to compare with: the source's, the target's, or both.
    side
        Which of the two they are; None to tell by their configs.
    """
    yield _run("versions", _versions)
    try:
        deployment = load_deployment(path)
    except (KVHubError, KeyError) as error:
        yield _failed("directory", error)
        return
    yield _run("weights", lambda: check_weights(deployment))
    ranks = deployment.settings.target_tp
    for rank in range(ranks):
        of_rank = f" of rank {rank}" if ranks > 1 else ""
        for kernels in (True, False):
            name = ("kernels" if kernels else "map in torch") + of_rank
            yield _run(name, lambda: _map(deployment, rank, kernels=kernels))  # noqa: B023
    yield _run("store", lambda: check_store(deployment))
    for model in models:
        yield from _models(deployment, model, side)
    if not models:
        hint = "Run again with --model DIR, once for each of the two models."
        yield Result("model", SKIPPED, "no model was given to compare RoPE with", hint)


def check_weights(deployment: Deployment) -> str:
    """The weights are those of `kvhub.json`, and both fit each other.

    Raises
    ------
    VerificationError
        They are not, or a number is not finite.
    """
    whole = replace(deployment, settings=replace(deployment.settings, target_tp=1))
    plan = load_plan(whole, "cpu", 0)
    shape = [plan.target_layers, plan.groups, plan.features, plan.outputs]
    for name in ("key_weight", "value_weight", "key_bias", "value_bias"):
        tensor: Tensor = getattr(plan, name)
        wanted = shape if name.endswith("weight") else [*shape[:2], shape[3]]
        finite = bool(torch.isfinite(tensor).all())
        if list(tensor.shape) != wanted or not finite:
            raise VerificationError(
                f"Expected {name} to be {wanted} finite numbers, found {list(tensor.shape)}, "
                f"{'all' if finite else 'not all'} finite.",
                "Export the mapper again.",
            )
    for name, tensor in plan.repair.items():
        if not bool(torch.isfinite(tensor).all()):
            raise VerificationError(
                f"Expected {name} to be finite numbers, found others.", "Export the mapper again."
            )
    dtype = str(plan.dtype).removeprefix("torch.")
    return f"{plan.parameters:,} numbers, {dtype}, digest {deployment.digest}"


def check_store(deployment: Deployment) -> str:
    """An entry of the real size through the configured store and into staging, and back out.

    Raises
    ------
    VerificationError, StoreError, UsageError
        It did not come back as it was, or a store or directory cannot be used.
    """
    settings, side = deployment.settings, deployment.target
    heads = heads_of(side.kv_heads, settings.target_tp, 0)
    shape = (side.num_layers, 2, heads[1] - heads[0], settings.chunk_tokens, side.head_dim)
    states = torch.randint(0, 100, shape).to(DTYPES[settings.target_kv_dtype])
    size = states.numel() * states.element_size()
    key = shard_key(secrets.token_hex(16), *heads)  # nobody else's
    store = open_store(settings.store)
    try:
        if not store.put(key, encode(states, key, heads)):
            raise VerificationError(
                f"Expected the store to keep an entry of {size:,} bytes, found no room for one.",
                "Give it a larger capacity in settings.json.",
            )
        found = store.get(key)
        if found is None or not _equal(decode(found, key), states):
            raise VerificationError(
                f"Expected the entry of {size:,} bytes that was put into the store, found "
                f"{'none' if found is None else 'another one'}.",
                "Is the store's server running, and one of this version?",
            )
        status = Status()
        stage = Stage(store, settings.staging_path, settings.staging_bytes, status)
        try:
            part = Part(key, settings.target_kv_dtype, shape)
            staged = stage.take("selftest", [[[part]]], time.monotonic() + STAGING_SECONDS)
        finally:
            stage.close()
        if not staged:
            raise VerificationError(
                f"Expected the entry to be staged, found {dict(status.counters)}.",
                "See staging_path and staging_bytes in settings.json.",
            )
        store.remove(key)
    finally:
        store.close()
    return f"{settings.store.get('kind')}: an entry of {size:,} bytes came back as it was"


def main(arguments: Sequence[str], path: Path) -> int:
    """Run the command on an exported directory and return its status."""
    parser = argparse.ArgumentParser(
        prog="selftest.py", description="Test this directory where it will serve."
    )
    parser.add_argument(
        "--model",
        dest="models",
        action="append",
        type=Path,
        default=[],
        metavar="DIR",
        help="a Hugging Face model to compare RoPE with; may be repeated",
    )
    parser.add_argument("--side", choices=("source", "target"), help="which model that is")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    results = []
    for result in run_checks(path, options.models, options.side):
        results.append(result)
        if not options.json:
            hint = f"\n        {result.hint}" if result.hint else ""
            sys.stdout.write(f"{result.state:8}{result.name}: {result.found}{hint}\n")
            sys.stdout.flush()
    failed = [result.name for result in results if result.state == FAILED]
    if options.json:
        content = {"passed": not failed, "checks": [asdict(result) for result in results]}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    elif failed:
        sys.stdout.write(f"Do not serve: {', '.join(failed)} failed.\n")
    return 1 if failed else 0


def _run(name: str, check: Callable[[], str]) -> Result:
    try:
        return Result(name, PASSED, check())
    except Skipped as reason:
        return Result(name, SKIPPED, str(reason))
    except Exception as error:  # what fails is what this is here to say, whatever it was
        return _failed(name, error)


def _failed(name: str, error: Exception) -> Result:
    if isinstance(error, KVHubError):
        return Result(name, FAILED, error.message, error.hint)
    found = f"expected no error, found {type(error).__name__}: {error}"
    return Result(name, FAILED, found, "Do not serve with this directory here.")


def _versions() -> str:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        # Not imported for it: TensorRT-LLM takes half a minute.
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    found["torch"] = str(torch.__version__)
    parts = tuple(int(part) for part in found["torch"].split(".")[:2])
    if sys.version_info < OLDEST_PYTHON or parts < OLDEST_TORCH:
        raise VerificationError(
            f"Expected Python 3.10 and torch 2.9, or newer; found {found['python']} and "
            f"{found['torch']}.",
            "Use the container of TensorRT-LLM 1.2.1 or newer.",
        )
    device = "no GPU"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        device = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    return ", ".join(f"{name} {number}" for name, number in found.items()) + f"; {device}"


def _map(deployment: Deployment, rank: int, *, kernels: bool) -> str:
    settings = deployment.settings
    plan = load_plan(deployment, "cuda" if torch.cuda.is_available() else "cpu", rank)
    try:
        mapping = mapping_of(plan, settings.workspace_bytes, kernels=kernels)
    except UsageError as error:
        if kernels:  # then plain torch maps, which is checked too
            raise Skipped(f"{error.message} Plain torch maps.") from error
        raise
    found: str = check_map(plan, settings, mapping)
    return found


def _models(deployment: Deployment, model: Path, wanted: str | None) -> Iterator[Result]:
    try:
        name = side_of(deployment, model, wanted)
    except KVHubError as error:
        yield _failed(f"model {model}", error)
        return
    side = deployment.source if name == "source" else deployment.target
    yield _run(f"files of the {name}", lambda: check_files(side, model))
    yield _run(f"rope of the {name}", lambda: _rope(deployment, name, model))


def _rope(deployment: Deployment, name: str, model: Path) -> str:
    side = deployment.source if name == "source" else deployment.target
    try:
        found: str = check_rope(side, model)
    except ImportError as error:
        raise Skipped(
            f"transformers cannot be imported, so RoPE was not compared: {error}"
        ) from error
    return found


def _equal(first: Tensor, second: Tensor) -> bool:
    """Bit for bit; float8 knows no comparison everywhere."""
    return first.dtype == second.dtype and torch.equal(
        first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)
    )
