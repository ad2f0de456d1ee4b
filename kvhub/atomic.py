"""Writing directories and files so that a reader sees the old one or the new one, never a mix.

A directory is built beside its place and renamed into it. Replacing one takes two renames, since
POSIX has no portable exchange; `recover` undoes a replacement that was killed between them.
"""

import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvhub.errors import ConflictError

__all__ = ["new_directory", "new_file", "recover", "write_text"]

BUILDING = ".building-"
REPLACED = ".replaced-"


@contextmanager
def new_directory(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory that becomes `path` when the block ends without an error.

    Raises
    ------
    ConflictError
        `path` is there already, before or by the end of the block, and `overwrite` is not set.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path)
    _require_free(path, overwrite)
    building = Path(tempfile.mkdtemp(dir=path.parent, prefix=_building(path)))
    try:
        yield building
        _require_free(path, overwrite)
        _finish(building)
        replaced = path.with_name(f".{path.name}{REPLACED}{os.getpid()}")
        if path.exists():
            path.rename(replaced)
        building.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def recover(path: Path) -> None:
    """Mend what processes that were killed left of a directory or file.

    A directory whose replacement stopped half way is put back, and what was never finished goes.
    """
    name = glob.escape(path.name)
    for old in sorted(path.parent.glob(f".{name}{REPLACED}*")):
        if not path.exists():
            time.sleep(0.1)  # somebody may be between the two renames just now
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(path)
    for left in path.parent.glob(f".{name}{BUILDING}*-*"):
        if _is_running(left.name.rpartition(BUILDING)[2].partition("-")[0]):
            continue
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _building(path: Path) -> str:
    """How the name of what this process builds for `path` begins."""
    return f".{path.name}{BUILDING}{os.getpid()}-"


def _is_running(process: str) -> bool:
    """Whether a process of this number exists; on another host's disk that may be chance."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_building(path))
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _allow(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file, or leave the old one."""
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _require_free(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise ConflictError(
            f"{path} exists already.", "Choose another name, or pass --overwrite to replace it."
        )


def _finish(directory: Path) -> None:
    """Flush every file to the disk, so that the rename does not come before the content."""
    for path in (directory, *directory.rglob("*")):
        _allow(path)
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _allow(path: Path) -> None:
    """Give a temporary, which is private, the rights that a new file or directory has here."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
