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
    """Tensors of all target layers, of which the first layers are done.

    Attributes
    ----------
    tensors
        By name, on the CPU.
    digest
        Of the mapper that the alignment started from, and of its settings.
    errors
        Per target layer that is done: relative held-out error before, and after each step.
    """

    tensors: dict[str, Tensor]
    digest: str
    errors: list[list[float]] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        mapper: KVMapper,
        settings: dict[str, Any],
        tensors: dict[str, Tensor],
        path: Path | None,
    ) -> "AlignmentState":
        """What `save` wrote there for this mapper and these settings, or nothing done yet.

        Raises
        ------
        ConflictError
            The file belongs to another mapper or other settings.
        VerificationError
            It is not a whole file.
        """
        digest = _digest(mapper, settings)
        if path is None or not path.is_file():
            return cls(tensors, digest)
        tensors, header = read_tensor_file(path, "Delete it to start over.")
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
