"""Run a mapper outside of PyTorch: the backends that `kvhub export` writes for."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.errors import ConflictError, UsageError

if TYPE_CHECKING:
    import torch

    from kvhub.mapper import KVMapper
    from kvhub.mapper_config import MapperConfig

__all__ = ["EXPORTERS", "dtype_for", "export", "require_exportable"]

# Each module has a function export_<name>(plan, path) that writes a directory, tests what it wrote
# and only then lets it appear. One with a default_dtype(config) is not for the mapper's own dtype.
EXPORTERS = {
    "onnx": "kvhub.exporters.onnx_graph",
    "trtllm": "kvhub.exporters.trtllm",
    "vllm": "kvhub.exporters.vllm",
}


def require_exportable(backend: str, path: Path) -> None:
    """Check what can be checked before a mapper is read.

    Raises
    ------
    UsageError
        There is no such backend.
    ConflictError
        Something is at `path` already.
    """
    if backend not in EXPORTERS:
        raise UsageError(
            f"Unknown backend {backend!r}; expected one of: {', '.join(sorted(EXPORTERS))}.",
            f"For example: --backend {min(EXPORTERS)}",
        )
    if path.exists():
        raise ConflictError(f"{path} exists already.", "Choose another directory, or remove it.")


def dtype_for(mapper: "KVMapper", backend: str) -> "torch.dtype":
    """What a mapper is exported in if nothing else is asked for."""
    module = import_module(EXPORTERS[backend])
    if hasattr(module, "default_dtype"):
        default: torch.dtype = module.default_dtype(mapper.config)
        return default
    return mapper.key_weight.dtype


def export(
    mapper: "KVMapper",
    backend: str,
    path: Path,
    *,
    dtype: "torch.dtype | None" = None,
    source_revision: str | None = None,
    target_revision: str | None = None,
) -> Path:
    """Write a mapper for a backend and test what was written.

    Parameters
    ----------
    mapper
        Left as it is.
    backend
        A name in `EXPORTERS`.
    path
        The directory to make; after an error it is not there.
    dtype
        Of weights and caches; None for what `dtype_for` gives.
    source_revision, target_revision
        Which weights the models are, where the mapper does not say.

    Raises
    ------
    UsageError
        An unknown backend, a dtype that it does not take, or its packages are not installed; or a
        revision that contradicts the mapper's.
    ConflictError
        Something is at `path` already.
    VerificationError
        The mapper does not fit that dtype, or what was written does not map as it does.
    """
    require_exportable(backend, path)
    from kvhub.exporters.plan import make_plan

    plan = make_plan(mapper, dtype=dtype or dtype_for(mapper, backend))
    revisions = {"source": source_revision, "target": target_revision}
    plan = replace(plan, config=_with_revisions(plan.config, revisions))
    write = getattr(import_module(EXPORTERS[backend]), f"export_{backend}")
    result: Path = write(plan, path)
    return result


def _with_revisions(config: "MapperConfig", revisions: dict[str, str | None]) -> "MapperConfig":
    specs = {}
    for side, revision in revisions.items():
        spec = getattr(config, side)
        if revision is not None and spec.revision not in (None, revision):
            raise UsageError(
                f"The mapper was fitted for {spec.model_id} at {spec.revision}; found {side} "
                f"revision {revision}.",
                f"Leave --{side}-revision out, or fit a mapper for that revision.",
            )
        specs[side] = replace(spec, revision=revision or spec.revision)
    return replace(config, **specs)
