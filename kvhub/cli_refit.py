"""The command that fits a mapper again on a user's own text: parse, call, print."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvhub import console
from kvhub.cli_options import Device, Dtype, Json, MapperArgument, SourceModel, TargetModel

if TYPE_CHECKING:
    from kvhub.refitting import Refitted

__all__ = ["refit"]


def refit(
    mapper: MapperArgument,
    data: Annotated[
        str, typer.Option(help="Your text: a file or folder, or a dataset id ORG/NAME[:CONFIG].")
    ],
    name: Annotated[str | None, typer.Option(help="Of the new one; default: NAME-refit.")] = None,
    sequences: Annotated[int, typer.Option(help="Of the text; a fourth is for choosing.")] = 64,
    length: Annotated[int | None, typer.Option(help="Tokens each; default as calibrated.")] = None,
    stride: Annotated[int, typer.Option(help="Use every n-th token.")] = 1,
    strength: Annotated[
        float | None,
        typer.Option(help="Tokens that the mapper counts as; default: several are tried."),
    ] = None,
    statistics: Annotated[
        Path | None,
        typer.Option(help="What the mapper was fitted on, from kvhub fit --statistics."),
    ] = None,
    source: SourceModel = None,
    target: TargetModel = None,
    dtype: Dtype = "auto",
    device: Device = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a mapper of this name.")] = False,
    as_json: Json = False,
) -> None:
    """Fit a mapper again on your own text; saved only if held-out text of yours is better for it.

    Example: kvhub refit org/qwen3-8b-to-32b --data my_text/
    """
    from kvhub.refitting import RefitPlan, refit_mapper

    plan = RefitPlan(
        mapper=mapper,
        data=data,
        name=name,
        sequences=sequences,
        length=length,
        stride=stride,
        strength=strength,
        statistics=statistics,
        source=source,
        target=target,
        dtype=dtype,
        device=device,
        overwrite=overwrite,
    )
    found = refit_mapper(plan, console.track, console.say)
    console.emit(found.to_dict(), as_json, lambda: _show(found))
    if found.gained:
        console.say(f"Saved in {found.path}. Next: kvhub evaluate {found.name} --data {data}")


def _show(found: "Refitted") -> None:
    columns = ("KL to target ", "agreement ", "R2 keys ", "values ", "cosine ")
    console.table(
        f"{found.mapper} on {found.held_out_sequences} held-out sequences; the least KL is kept",
        ("strength, tokens ", *columns, ""),
        [
            (
                "as it is" if one.strength is None else f"{one.strength:g}",
                f"{one.kl:.4f}",
                f"{one.agreement:.3f}",
                f"{one.key_r2:.3f}",
                f"{one.value_r2:.3f}",
                f"{one.attention_output_cosine:.3f}",
                "kept" if one == found.best else "",
            )
            for one in found.candidates
        ],
    )
