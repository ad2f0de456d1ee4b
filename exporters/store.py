"""Where cache entries are kept between engines: a contract that several stores fulfil."""

import os
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Protocol

from kvhub.errors import KVHubError, UsageError

__all__ = ["Store", "StoreError", "open_store", "write_new"]


class StoreError(KVHubError):
    """A store is gone, full or too slow. Callers take it as a miss."""


class Store(Protocol):
    """Entries by key. A store may lose any of them at any time; it never mixes them up.

    Every method may be called from any thread, takes bounded time, and raises `StoreError` where
    the store fails.
    """

    def put(self, key: str, buffers: Sequence[memoryview | bytes]) -> bool:
        """Keep the joined buffers; an entry that is there already stays as it is.

        False where there is no room, as for what is larger than the store.
        """

    def get(self, key: str) -> memoryview | None:
        """An entry, or None. It can be read as long as it is referred to, evicted or not."""

    def copy_to(self, key: str, file: str) -> bool:
        """Make an entry a file of the caller's own, which must not exist; False if it is absent.

        The file is not to be written to: it may share its memory with the store.
        """

    def contains(self, key: str) -> bool:
        """Whether `get` would have found it just now."""

    def remove(self, key: str) -> None:
        """Forget an entry, if it is there."""

    def close(self) -> None:
        """Let go of the store. What `get` gave stays valid; the other methods fail from now on."""

    def stats(self) -> dict[str, int]:
        """Counters since opening, and sizes, of this store."""


def open_store(config: Mapping[str, Any]) -> Store:
    """Open the store that a configuration asks for.

    Parameters
    ----------
    config
        `kind`, and the parameters of that kind: `files` of
        `kvhub.exporters.store_files.FileStore`, `mooncake` of
        `kvhub.exporters.store_mooncake.MooncakeStore`.

    Raises
    ------
    UsageError
        No such kind, or parameters that it does not have, or misses.
    StoreError
        It cannot be opened.
    """
    from kvhub.exporters.store_files import FileStore
    from kvhub.exporters.store_mooncake import MooncakeStore

    kinds = {"files": FileStore, "mooncake": MooncakeStore}
    options = {**config}
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise UsageError(f"Unknown kind of store {kind!r}; expected one of: {', '.join(kinds)}.")
    parameters = signature(kinds[kind])
    try:
        parameters.bind(**options)
    except TypeError as error:
        raise UsageError(
            f"A store of kind {kind!r} has the parameters {', '.join(parameters.parameters)}: "
            f"{error}."
        ) from error
    store: Store = kinds[kind](**options)
    return store


def write_new(file: str, content: memoryview) -> None:
    """Write a file that does not exist yet; after an error it is not there.

    Raises
    ------
    OSError
        It exists, or cannot be written.
    """
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        while content:
            content = content[os.write(opened, content) :]
    except OSError:
        os.unlink(file)
        raise
    finally:
        os.close(opened)
