"""What a running alignment has so far: in memory, and in a file to go on from."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

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
    errors
        For keys and values, per target layer that is done: relative held-out error before, after.
    """

    tensors: dict[str, Tensor]
    errors: dict[str, list[list[float]]] = field(default_factory=lambda: {"keys": [], "values": []})

    @classmethod
    def start(cls, mapper: KVMapper) -> "AlignmentState":
        """Nothing done yet."""
        return cls({name: tensor.detach().cpu().clone() for name, tensor in _items(mapper)})

    @classmethod
    def resume(cls, path: Path, mapper: KVMapper) -> "AlignmentState":
        """What `save` wrote for this mapper.

        Raises
        ------
        ConflictError
            The file belongs to another mapper.
        VerificationError
            It is not a whole file.
        """
        tensors, header = read_tensor_file(path, "Delete it to start over.")
        if header.get("mapper") != _digest(mapper):
            raise ConflictError(
                f"{path} belongs to the alignment of another mapper.", "Delete it to start over."
            )
        return cls(tensors, header["errors"])

    def save(self, path: Path, mapper: KVMapper) -> None:
        """Write one safetensors file, atomically; `mapper` is what the alignment started from."""
        header = {"mapper": _digest(mapper), "errors": self.errors}
        write_tensor_file(path, self.tensors, header)


def _items(mapper: KVMapper) -> list[tuple[str, Tensor]]:
    return list(mapper.tensors().items())


def _digest(mapper: KVMapper) -> str:
    digest = hashlib.sha256(json.dumps(mapper.config.to_dict(), sort_keys=True).encode())
    for name, tensor in _items(mapper):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
