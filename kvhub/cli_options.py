"""Options that several commands share."""

from enum import Enum
from typing import Annotated

import typer

__all__ = [
    "Device",
    "Dtype",
    "ExactPrefix",
    "Heads",
    "Json",
    "LambdaScale",
    "MapperArgument",
    "Method",
    "PolicyName",
    "SourceModel",
    "TargetModel",
    "Weighting",
]


class Heads(str, Enum):
    """Which source heads a target head reads."""

    all = "all"
    matched = "matched"


class LambdaScale(str, Enum):
    """Unit of the ridge penalty."""

    relative = "relative"
    per_token = "per_token"
    absolute = "absolute"


class Weighting(str, Enum):
    """How tokens count."""

    uniform = "uniform"
    attention = "attention"


class Method(str, Enum):
    """How source layers are selected."""

    probe = "probe"
    greedy = "greedy"


class PolicyName(str, Enum):
    """What decides whether a prompt is mapped."""

    always = "always"
    gate = "gate"
    probe = "probe"


MapperArgument = Annotated[
    str, typer.Argument(help="A local name, a directory, or org/repo[@version].")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Dtype = Annotated[
    str, typer.Option(help="auto, float32, bfloat16 or float16; auto is float32 on a CPU.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; default: CUDA if any.")]
SourceModel = Annotated[str | None, typer.Option(help="Where the source model is, if moved.")]
TargetModel = Annotated[str | None, typer.Option(help="Where the target model is, if moved.")]
ExactPrefix = Annotated[int, typer.Option(help="First tokens that the target computes itself.")]
