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
    backend: Annotated[str, typer.Option(help="What to write for: onnx or trtllm.")],
    out: Annotated[Path, typer.Option(help="The directory to make.")],
    dtype: Annotated[
        ExportDtype | None,
        typer.Option(help="Of the weights; default: the mapper's, trtllm: the target's cache's."),
    ] = None,
    source_revision: Annotated[
        str | None,
        typer.Option(help="Commit of the source model, where the mapper does not say it."),
    ] = None,
    target_revision: Annotated[
        str | None,
        typer.Option(help="Commit of the target model, where the mapper does not say it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a mapper for another runtime, tested against the mapper before it appears.

    Example: kvhub export tiny-middle-to-large --backend onnx --out exported
    """
    from kvhub.exporters import dtype_for, require_exportable
    from kvhub.exporters import export as write_export

    require_exportable(backend, out)  # before a large mapper is read for nothing
    import torch

    from kvhub.mapper import KVMapper

    loaded = KVMapper.from_pretrained(mapper)
    wanted = dtype_for(loaded, backend) if dtype is None else getattr(torch, dtype.value)
    path = write_export(
        loaded,
        backend,
        out,
        dtype=wanted,
        source_revision=source_revision,
        target_revision=target_revision,
    )
    files = {
        file.relative_to(path).as_posix(): file.stat().st_size
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
    result = {
        "backend": backend,
        "path": str(path),
        "dtype": str(wanted).removeprefix("torch."),
        "tested": True,
        "files": files,
        "size_bytes": sum(files.values()),
    }
    console.emit(
        result,
        as_json,
        lambda: console.table(str(path), ("file", "bytes "), list(files.items())),
    )
