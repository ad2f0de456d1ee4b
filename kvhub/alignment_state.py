"""What a running alignment has so far: in memory, and in a file to go on from."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvhub.errors import ConflictError
from kvhub.mapper import KVMapper
from kvhub.tensor_file import read_tensor_file, write_tensor_file

__all__ = ["AlignmentState"]


@dataclass
class AlignmentState:
    """A mapper's tensors, of which the first regressions are done.

    Attributes
    ----------
    tensors
        By name, on the CPU.
    digest
        Of the mapper that the alignment started from, and of its settings.
    errors
        For keys and values, per target layer that is done: relative held-out error before, after.
    """

    tensors: dict[str, Tensor]
    digest: str
    errors: dict[str, list[list[float]]] = field(default_factory=lambda: {"keys": [], "values": []})

    @classmethod
    def start(cls, mapper: KVMapper, settings: dict[str, Any]) -> "AlignmentState":
        """Nothing done yet."""
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in mapper.tensors().items()}
        return cls(tensors, _digest(mapper, settings))

    @classmethod
    def resume(cls, path: Path, mapper: KVMapper, settings: dict[str, Any]) -> "AlignmentState":
        """What `save` wrote for this mapper and these settings.

        Raises
        ------
        ConflictError
            The file belongs to another mapper or other settings.
        VerificationError
            It is not a whole file.
        """
        tensors, header = read_tensor_file(path, "Delete it to start over.")
        digest = _digest(mapper, settings)
        if header.get("digest") != digest:
            raise ConflictError(
                f"{path} belongs to the alignment of another mapper, or to one with other settings "
                f"than {settings}.",
                "Delete it to start over.",
            )
        return cls(tensors, digest, header["errors"])

    def save(self, path: Path) -> None:
        """Write one safetensors file, atomically."""
        write_tensor_file(path, self.tensors, {"digest": self.digest, "errors": self.errors})


def _digest(mapper: KVMapper, settings: dict[str, Any]) -> str:
    facts = [mapper.config.to_dict(), settings]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in mapper.tensors().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
