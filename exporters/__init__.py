"""Run a mapper outside of PyTorch: the backends that `kvhub export` writes for."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.errors import ConflictError, UsageError

if TYPE_CHECKING:
    import torch

    from kvhub.mapper import KVMapper

__all__ = ["EXPORTERS", "export", "require_exportable"]

# Each module has a function export_<name>(plan, path) that writes a directory, tests what it wrote
# and only then lets it appear.
EXPORTERS = {"onnx": "kvhub.exporters.onnx_graph"}


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


def export(
    mapper: "KVMapper", backend: str, path: Path, *, dtype: "torch.dtype | None" = None
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
        Of weights and caches; None for the mapper's.

    Raises
    ------
    UsageError
        An unknown backend, a dtype that it does not take, or its packages are not installed.
    ConflictError
        Something is at `path` already.
    VerificationError
        The mapper does not fit that dtype, or what was written does not map as it does.
    """
    require_exportable(backend, path)
    from kvhub.exporters.plan import make_plan

    write = getattr(import_module(EXPORTERS[backend]), f"export_{backend}")
    result: Path = write(make_plan(mapper, dtype=dtype), path)
    return result
