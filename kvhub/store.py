"""The local store: mappers by name under `$KVHUB_HOME/mappers`, default `~/.cache/kvhub`."""

import logging
import os
import re
from pathlib import Path

from kvhub.atomic import recover
from kvhub.errors import NotFoundError, UsageError

__all__ = ["find_local", "find_mapper", "home", "mapper_names", "mapper_path", "work_path"]

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def home() -> Path:
    """Where kvhub keeps what it makes."""
    return Path(os.environ.get("KVHUB_HOME") or Path.home() / ".cache" / "kvhub")


def mapper_path(name: str) -> Path:
    """The place of a local mapper, whether it is there or not.

    Raises
    ------
    UsageError
        The name cannot be one: it would leave the store.
    """
    if not NAME.fullmatch(name) or name.endswith("."):
        raise UsageError(
            f"{name!r} cannot be a mapper's name: expected letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit.",
            "For example qwen3-8b-to-32b.",
        )
    return home() / "mappers" / name


def work_path(name: str) -> Path:
    """Where unfinished work on a mapper is kept, so that it can be resumed."""
    return home() / "work" / mapper_path(name).name


def mapper_names() -> list[str]:
    """The names of the local mappers, sorted."""
    folder = home() / "mappers"
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if NAME.fullmatch(path.name))


def find_mapper(name: str, public_key: Path | None = None) -> Path:
    """The directory of a mapper given by its local name, its path or as `org/repo[@version]`.

    A name in the local store comes first, then an existing directory, then the Hub. With a key
    the mapper must be signed by its owner, which is checked before anything else of it is read.

    Raises
    ------
    NotFoundError
        There is none.
    AuthError, NetworkError, VerificationError
        Of mappers on the Hub, see `kvhub.hub.pull`.
    """
    path = find_local(name)
    if path is not None:
        if public_key is not None:
            from kvhub.signing import verify_signature

            verify_signature(path, public_key)
        return path
    from kvhub.versions import is_reference, parse_reference

    if is_reference(name):
        from kvhub.hub import download, download_signed, resolve

        resolved = resolve(parse_reference(name))
        path = download(resolved) if public_key is None else download_signed(resolved, public_key)
        for warning in resolved.warnings:
            logger.warning(warning)
        return path
    known = ", ".join(mapper_names()) or "none"
    raise NotFoundError(
        f"No mapper {name!r}: neither in the local store ({home() / 'mappers'}; it has: "
        f"{known}) nor a directory.",
        "Fit one with `kvhub fit NAME`, see `kvhub list`, or name one on the Hub: org/repo.",
    )


def find_local(name_or_path: str) -> Path | None:
    """The directory of a mapper in the local store or anywhere else on disk, or None."""
    if NAME.fullmatch(name_or_path):
        path = home() / "mappers" / name_or_path
        recover(path)
        if path.is_dir():
            return path
    directory = Path(name_or_path).expanduser()
    return directory if directory.is_dir() else None
