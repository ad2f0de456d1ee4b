"""The command that repairs a mapper with small networks: parse, call, print."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvhub import console
from kvhub.cli_options import Device, Dtype, Json, MapperArgument, SourceModel, TargetModel

if TYPE_CHECKING:
    from kvhub.repairing import Repaired

__all__ = ["repair"]


def repair(
    mapper: MapperArgument,
    name: Annotated[
        str | None, typer.Option(help="Of the new one; default: NAME-repaired.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Text to train on; default: what calibration used.")
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(help="Of the text; default: as many as calibration.", min=10)
    ] = None,
    size_budget: Annotated[
        float, typer.Option(help="Bytes that networks may add, over the mapper's own.")
    ] = 0.5,
    hidden: Annotated[int, typer.Option(help="Width of a network's hidden layers.")] = 256,
    source: SourceModel = None,
    target: TargetModel = None,
    dtype: Dtype = "auto",
    device: Device = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a mapper of this name.")] = False,
    as_json: Json = False,
) -> None:
    """Train small networks on what a mapper's linear map misses; keep those that pay.

    Example: kvhub repair tiny-small-to-large --size-budget 0.5
    """
    from kvhub.repairing import RepairPlan, repair_mapper

    plan = RepairPlan(
        mapper=mapper,
        name=name,
        data=data,
        sequences=sequences,
        size_budget=size_budget,
        hidden=hidden,
        source=source,
        target=target,
        dtype=dtype,
        device=device,
        overwrite=overwrite,
    )
    found = repair_mapper(plan, console.track, console.say)
    console.emit(asdict(found), as_json, lambda: _show(found))
    if found.name is not None:
        console.say(f"Saved in {found.path}. Next: kvhub evaluate {found.name}")


def _show(found: "Repaired") -> None:
    columns = ("linear ", "keys ", "values ", "both ")
    console.table(
        "Held-out attention-output cosine with networks: "
        f"{found.size_bytes:,} to {found.repaired_size_bytes:,} bytes",
        ("target layer ", *columns, "kept"),
        [
            (
                layer["layer"],
                *(f"{layer[column.strip()]:.4f}" for column in columns),
                ", ".join(layer["kept"]),
            )
            for layer in found.layers
        ],
    )
