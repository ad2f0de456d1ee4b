"""The command that writes a mapper for another runtime: parse, call, print."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvhub import console
from kvhub.cli_options import Json, MapperArgument

__all__ = ["export"]


class ExportDtype(str, Enum):
    """What an exported mapper computes and caches in."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


def export(
    mapper: MapperArgument,
    backend: Annotated[str, typer.Option(help="What to write for: onnx.")],
    out: Annotated[Path, typer.Option(help="The directory to make.")],
    dtype: Annotated[
        ExportDtype | None, typer.Option(help="Of weights and caches; default: the mapper's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a mapper for another runtime, tested against the mapper before it appears.

    Example: kvhub export tiny-middle-to-large --backend onnx --out exported
    """
    from kvhub.exporters import export as write_export
    from kvhub.exporters import require_exportable

    require_exportable(backend, out)  # before a large mapper is read for nothing
    import torch

    from kvhub.mapper import KVMapper

    loaded = KVMapper.from_pretrained(mapper)
    wanted = None if dtype is None else getattr(torch, dtype.value)
    path = write_export(loaded, backend, out, dtype=wanted)
    files = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
    result = {
        "backend": backend,
        "path": str(path),
        "dtype": str(wanted or loaded.key_weight.dtype).removeprefix("torch."),
        "tested": True,
        "files": files,
        "size_bytes": sum(files.values()),
    }
    console.emit(
        result,
        as_json,
        lambda: console.table(str(path), ("file", "bytes "), list(files.items())),
    )
