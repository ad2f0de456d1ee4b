"""One safetensors file with a JSON header of ours: what a long run leaves to go on from."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvhub.atomic import new_file
from kvhub.errors import VerificationError

__all__ = ["read_tensor_file", "write_tensor_file"]


def write_tensor_file(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Write tensors, contiguous and on the CPU, and a header, atomically."""
    with new_file(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", "kvhub": json.dumps(header)})


def read_tensor_file(path: Path, hint: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file, which is empty where it has none of ours.

    Raises
    ------
    VerificationError
        The file is truncated or is no safetensors file; with `hint`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("kvhub", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise VerificationError(
            f"{path} is not a whole safetensors file: {error}.", hint
        ) from error
    return tensors, header
