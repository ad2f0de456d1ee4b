"""Entries that are promised to an engine: read from the store, checked, and held until loaded.

An engine takes a promise for certain and has no way to be told that it cannot be kept. So entries
are files of this process's own, in memory, before they are promised: neither an eviction nor the
end of the store takes them away, and every rank of the engine can map them.
"""

import fcntl
import mmap
import os
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvhub.exporters.entry import decode
from kvhub.exporters.status import Status
from kvhub.exporters.store import Store, StoreError
from torch import Tensor

from kvhub.errors import UsageError, VerificationError

__all__ = ["Part", "Stage", "open_entry"]

THREADS = 8  # reading and checking a chunk is a checksum's work, which holds no lock


@dataclass(frozen=True)
class Part:
    """An entry that is wanted: some KV heads of a chunk.

    Attributes
    ----------
    key
        In the store.
    dtype, shape
        Of its states, `[layers, 2, heads, tokens, head_dim]`.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]


class Stage:
    """Files of promised entries, in a directory that is this process's own.

    Parameters
    ----------
    store
        Where entries come from.
    path
        The directory that holds those of all processes; None for one in shared memory.
    capacity_bytes
        Bound on the files of this process.
    status
        Where misses are counted.
    """

    def __init__(self, store: Store, path: str | None, capacity_bytes: int, status: Status) -> None:
        root = Path(path or f"/dev/shm/kvhub-stage-{os.geteuid()}")
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise UsageError(
                f"{root} must belong to user {os.geteuid()} and be writable by no other; found "
                f"user {found.st_uid} and mode {stat.S_IMODE(found.st_mode):o}.",
                "Choose another staging_path, or chmod 700 it.",
            )
        self.store, self.capacity_bytes, self.status = store, capacity_bytes, status
        self.path = root / f"{os.getpid()}-{time.monotonic_ns():x}"
        with (root / "lock").open("w") as lock:
            # Engines start together: none may take the other's new directory for abandoned.
            fcntl.flock(lock, fcntl.LOCK_EX)
            _remove_abandoned(root)
            self.path.mkdir(mode=0o700)
            owner = os.open(self.path / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._disown = weakref.finalize(self, os.close, owner)
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvhub-stage")
        self._lock = threading.Lock()
        self._held: dict[str, dict[str, int]] = {}  # bytes of files, by owner
        self._bytes = 0  # of all of them
        self._serial = 0

    def take(
        self, owner: str, chunks: Sequence[Sequence[Sequence[Part]]], deadline: float
    ) -> list[tuple[int, list[str]]]:
        """Stage leading chunks, each in the first of its versions that the store has whole.

        Parameters
        ----------
        owner
            Who holds them until `release`.
        chunks
            Per chunk its versions in order of preference, each of one or more parts.
        deadline
            In seconds of `time.monotonic`; what is not there by then is a miss.

        Returns
        -------
        staged
            Per staged chunk the number of its version and the files of its parts. It ends before
            the first chunk of which nothing came in time.
        """
        with self._lock:
            self._held.setdefault(owner, {})
        staged: list[tuple[int, list[str]]] = []
        for start in range(0, len(chunks), 4 * THREADS):
            window = chunks[start : start + 4 * THREADS]
            futures = [
                self._threads.submit(self._first, owner, versions, deadline) for versions in window
            ]
            wait(futures, max(0.0, deadline - time.monotonic()))
            for future in futures:
                found = self._result(future)
                if found is None:
                    for other in futures:
                        other.cancel()
                    return staged
                staged.append(found)
        return staged

    def release(self, owner: str) -> None:
        """Let go of what an owner holds; also of what is still being read for it."""
        with self._lock:
            files = self._held.pop(owner, {})
            self._bytes -= sum(files.values())
        for file in files:
            with suppress(FileNotFoundError):
                os.unlink(file)

    @property
    def held_bytes(self) -> int:
        """Of all files."""
        with self._lock:
            return self._bytes

    def close(self) -> None:
        """Remove everything."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._disown()
        shutil.rmtree(self.path, ignore_errors=True)

    def _result(
        self, future: "Future[tuple[int, list[str]] | None]"
    ) -> tuple[int, list[str]] | None:
        if not future.done():
            self.status.count("miss: late")
            return None
        return future.result()

    def _first(
        self, owner: str, versions: Sequence[Sequence[Part]], deadline: float
    ) -> tuple[int, list[str]] | None:
        for number, parts in enumerate(versions):
            files = []
            for part in parts:
                file = self._part(owner, part, deadline)
                if file is None:
                    break
                files.append(file)
            else:
                return number, files
        return None

    def _part(self, owner: str, part: Part, deadline: float) -> str | None:
        """A file with a checked entry, or None and the reason counted."""
        if time.monotonic() > deadline:
            self.status.count("miss: late")
            return None
        with self._lock:
            self._serial += 1
            file = str(self.path / f"{self._serial:x}")
        try:
            if not self.store.copy_to(part.key, file):
                self.status.count("miss: absent")
                return None
            if not self._hold(owner, file):
                return None
            states = open_entry(file, part.key)
            found = (str(states.dtype).removeprefix("torch."), tuple(states.shape))
            if found != (part.dtype, part.shape):
                raise VerificationError(
                    f"Entry {part.key} is {found[0]} {list(found[1])}; expected {part.dtype} "
                    f"{list(part.shape)}."
                )
        except StoreError as error:
            self.status.failure("miss: store", error)
        except (VerificationError, OSError, ValueError) as error:
            self.status.failure("miss: damaged", error)
            with suppress(StoreError):
                self.store.remove(part.key)
        else:
            return file
        self._drop(owner, file)
        return None

    def _hold(self, owner: str, file: str) -> bool:
        size = os.stat(file).st_size
        with self._lock:
            if owner in self._held and self._bytes + size <= self.capacity_bytes:
                self._held[owner][file] = size
                self._bytes += size
                return True
            late = owner not in self._held
        os.unlink(file)
        self.status.count("miss: late" if late else "miss: staging is full")
        return False

    def _drop(self, owner: str, file: str) -> None:
        with self._lock:
            self._bytes -= self._held.get(owner, {}).pop(file, 0)
        with suppress(FileNotFoundError):
            os.unlink(file)


def open_entry(file: str, key: str, *, checked: bool = False) -> Tensor:
    """The states of a staged entry, as a view of the file.

    Parameters
    ----------
    file, key
        Of the entry.
    checked
        The checksum of its states has been compared since it was staged.

    Raises
    ------
    VerificationError
        It is damaged or another one.
    OSError, ValueError
        It cannot be mapped.
    """
    with open(file, "rb") as opened:
        # A private map can be written to as tensors demand, and nobody sees it.
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    states: Tensor = decode(memoryview(mapped), key, checked=checked)
    return states


def _remove_abandoned(root: Path) -> None:
    """Remove what killed processes left behind: nobody holds their lock."""
    for path in root.iterdir():
        try:
            with (path / "owner").open("r+") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:  # killed before it had one
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # alive, or not ours
