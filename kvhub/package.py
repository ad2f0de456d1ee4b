"""A mapper as a directory: written atomically, and every byte verified when it is read.

config.json         the truth: MapperConfig, kvhub's version, the tensors' dtype
model.safetensors   the tensors, one per target layer; sharded with an index above 5 GB
manifest.json       sha256 and size of every other file
report.json         the evaluation, once there is one
README.md           the card, rendered from the others and never parsed
plots/*.png         the report's plots
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvhub import __version__
from kvhub.atomic import new_directory
from kvhub.errors import NotFoundError, VerificationError
from kvhub.mapper import KVMapper
from kvhub.mapper_config import MapperConfig, tensor_shapes

__all__ = ["Manifest", "load", "read_config", "save", "verify"]

MAX_SHARD_SIZE = "5GB"
# Files that git or the Hub's client add to a directory and that say nothing about the mapper.
# status.json and kvhub.sig speak about the package, so its manifest cannot list them.
IGNORED = re.compile(r"\.gitattributes|\.gitignore|\.cache/.*|\.git/.*|status\.json|kvhub\.sig")
REQUIRED = ("config.json", "manifest.json")


@dataclass(frozen=True)
class Manifest:
    """What a package holds: `{path: (sha256, size in bytes)}`, itself left out."""

    files: dict[str, tuple[str, int]]

    @classmethod
    def of(cls, directory: Path) -> "Manifest":
        """Hash every file of a directory."""
        return cls(
            {
                name: (_sha256(directory / name), (directory / name).stat().st_size)
                for name in sorted(_names(directory))
            }
        )

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read manifest.json; VerificationError if it is not one."""
        data = _read_json(directory / "manifest.json")
        files = data.get("files")
        entries = files.items() if isinstance(files, dict) else ()
        sound = set(data) == {"files"} and all(
            isinstance(entry, dict)
            and set(entry) == {"sha256", "size"}
            and isinstance(entry["sha256"], str)
            and isinstance(entry["size"], int)
            and not Path(name).is_absolute()
            and ".." not in Path(name).parts
            and name != "manifest.json"
            and not IGNORED.fullmatch(name)
            for name, entry in entries
        )
        if not sound or not entries:
            raise VerificationError(
                f"{directory / 'manifest.json'} is not a manifest.", "Download the mapper again."
            )
        return cls({name: (entry["sha256"], entry["size"]) for name, entry in entries})

    @property
    def digest(self) -> str:
        """One sha256 for the whole package, over its sorted paths and their sha256."""
        return _digest(self.files)

    @property
    def content_digest(self) -> str:
        """The same without the card, which changes with every version's name."""
        return _digest({name: entry for name, entry in self.files.items() if name != "README.md"})

    @property
    def tensors_digest(self) -> str:
        """The same of the tensors' files alone."""
        return _digest(
            {name: entry for name, entry in self.files.items() if ".safetensors" in name}
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, the manifest's own left out."""
        return sum(size for _, size in self.files.values())

    def write(self, directory: Path) -> None:
        files = {name: {"sha256": sha, "size": size} for name, (sha, size) in self.files.items()}
        _write_json(directory / "manifest.json", {"files": files})


def save(
    mapper: KVMapper,
    path: Path,
    *,
    report: dict[str, Any] | None = None,
    plots: dict[str, bytes] | None = None,
    overwrite: bool = False,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
    """Write a mapper's package.

    Parameters
    ----------
    mapper
        Its tensors keep their dtype.
    path
        The directory to make.
    report
        The content of report.json, from `Report.to_dict`.
    plots
        PNG files by name.
    overwrite
        Replace a package that is there.
    max_shard_size
        Above which the tensors are spread over several files.

    Raises
    ------
    ConflictError
        `path` exists and `overwrite` is not set.
    VerificationError
        A tensor is not finite.
    """
    for name, tensor in mapper.tensors().items():
        if not bool(torch.isfinite(tensor).all()):
            raise VerificationError(f"{name} is not finite.", "Fit again with a larger penalty.")
    from kvhub.cards import render_card

    with new_directory(path, overwrite=overwrite) as directory:
        config = {
            **mapper.config.to_dict(),
            "kvhub_version": __version__,
            "dtype": str(mapper.key_weight.dtype).removeprefix("torch."),
        }
        _write_json(directory / "config.json", config)
        _write_tensors(directory, mapper, max_shard_size)
        if report is not None:
            _write_json(directory / "report.json", report)
        for name, png in (plots or {}).items():
            (directory / "plots").mkdir(exist_ok=True)
            (directory / "plots" / name).write_bytes(png)
        card = render_card(path.name, config, report, sorted(plots or {}))
        (directory / "README.md").write_text(card, encoding="utf-8")
        Manifest.of(directory).write(directory)


def verify(directory: Path) -> Manifest:
    """Check that a package holds exactly the files of its manifest, with their content.

    Raises
    ------
    NotFoundError
        There is no package.
    VerificationError
        A file is missing, extra, truncated or edited.
    """
    _require_package(directory)
    manifest = Manifest.read(directory)
    found = set(_names(directory))
    if found != set(manifest.files):
        raise VerificationError(
            f"{directory} does not hold what its manifest lists: missing "
            f"{sorted(set(manifest.files) - found)}, extra {sorted(found - set(manifest.files))}.",
            "Download or save the mapper again.",
        )
    for name, (sha256, size) in manifest.files.items():
        file = directory / name
        if file.stat().st_size != size:
            raise VerificationError(
                f"{file} is truncated or edited: expected {size} bytes, found "
                f"{file.stat().st_size}.",
                "Download or save the mapper again.",
            )
        digest = _sha256(file)
        if digest != sha256:
            raise VerificationError(
                f"{file} was edited or damaged: expected sha256 {sha256}, found {digest}.",
                "Download or save the mapper again.",
            )
    return manifest


def read_config(directory: Path) -> tuple[MapperConfig, dict[str, Any]]:
    """config.json as a MapperConfig, and whole as it stands; nothing else is read."""
    _require_package(directory)
    data = _read_json(directory / "config.json")
    stripped = {key: data[key] for key in data if key not in ("kvhub_version", "dtype")}
    if len(data) != len(stripped) + 2:
        raise VerificationError(
            f"{directory / 'config.json'} lacks kvhub_version or dtype.",
            "Download or fit the mapper again.",
        )
    return MapperConfig.from_dict(stripped), data


def load(directory: Path) -> KVMapper:
    """Read a package after verifying all of it; the tensors keep their stored dtype.

    Raises
    ------
    NotFoundError, VerificationError
        As for `verify`; also where tensors do not fit config.json or are not finite.
    """
    manifest = verify(directory)
    config, data = read_config(directory)
    shapes = tensor_shapes(config)
    dtype = getattr(torch, str(data["dtype"]), None)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise VerificationError(
            f"config.json has dtype {data['dtype']!r}; expected a floating dtype of torch.",
            "Download or fit the mapper again.",
        )
    tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    missing = {f"{name}.{layer}" for name, shape in shapes.items() for layer in range(shape[0])}
    for file in sorted(manifest.files):
        if not file.endswith(".safetensors"):
            continue
        try:
            part = load_file(directory / file)
        except SafetensorError as error:
            raise VerificationError(
                f"{directory / file} is not a safetensors file: {error}.",
                "Download or save the mapper again.",
            ) from error
        for key, tensor in part.items():
            name, _, layer = key.rpartition(".")
            if key not in missing:
                raise VerificationError(
                    f"{file} holds a tensor {key!r} that config.json has no place for.",
                    "Download or fit the mapper again.",
                )
            place = tensors[name][int(layer)]
            if tensor.shape != place.shape or tensor.dtype != dtype:
                raise VerificationError(
                    f"{key} should be {dtype} {list(place.shape)}; found {tensor.dtype} "
                    f"{list(tensor.shape)}.",
                    "Download or fit the mapper again.",
                )
            if not bool(torch.isfinite(tensor).all()):
                raise VerificationError(f"{key} is not finite.", "Fit the mapper again.")
            place.copy_(tensor)
            missing.remove(key)
    if missing:
        raise VerificationError(
            f"{directory} lacks {len(missing)} tensors, among them {min(missing)}.",
            "Download or save the mapper again.",
        )
    return KVMapper(config, tensors)


def _write_tensors(directory: Path, mapper: KVMapper, max_shard_size: str) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    # One tensor per target layer: a whole stack can be larger than a shard.
    tensors: dict[str, Tensor] = {
        f"{name}.{layer}": part.cpu().clone()
        for name, tensor in mapper.tensors().items()
        for layer, part in enumerate(tensor)
    }
    plan = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    for file, names in plan.filename_to_tensors.items():
        shard = {name: tensors[name] for name in names}
        save_file(shard, directory / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        _write_json(directory / "model.safetensors.index.json", index)


def _require_package(directory: Path) -> None:
    for name in REQUIRED:
        if not (directory / name).is_file():
            raise NotFoundError(
                f"{directory} is not a mapper package: it has no {name}.",
                "List the local mappers with `kvhub list`, or fit one with `kvhub fit`.",
            )


def _names(directory: Path) -> Iterator[str]:
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name != "manifest.json" and not IGNORED.fullmatch(name):
            yield name


def _digest(files: dict[str, tuple[str, int]]) -> str:
    lines = "".join(f"{sha256} {name}\n" for name, (sha256, _) in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise VerificationError(
            f"{path} is not JSON: {error}.", "Download or save the mapper again."
        ) from error
    if not isinstance(data, dict):
        raise VerificationError(f"{path} does not hold a JSON object.")
    return data


def _write_json(path: Path, data: dict[str, Any]) -> None:
    # allow_nan=False: NaN is not JSON, and a figure that is NaN was never measured.
    text = json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
