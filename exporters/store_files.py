"""A store in one directory, shared by the processes of a node, by default in shared memory.

    <key>.kvhub           an entry; complete, for it gets this name when it is
    <random>.kvhub-part   an entry being written; its writer holds a lock on it while it lives
    kvhub.lock            a lock, and an upper bound on bytes and number of all files above

Other files in the directory are neither touched nor counted. A process may be killed at any
point: the system drops its locks, an unfinished file without one is removed when room is needed
or a store opened, and the bound is raised before a file appears and lowered after one is gone.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvhub.exporters.store import StoreError, write_new

from kvhub.errors import UsageError

__all__ = ["FileStore"]

# As `kvhub.exporters.chain` makes them, and no wider: what is named so may be deleted.
KEY = re.compile(r"[0-9a-f]{32}(-[0-9]+-[0-9]+)?")
# Flat: file systems index their directories, and an eviction, which reads all of it, takes 10 us
# per entry.
ENTRY = re.compile(rf"{KEY.pattern}\.kvhub")
PART = re.compile(r"[0-9a-f]{32}\.kvhub-part")
USED = struct.Struct("<QQ")  # bytes, files
# Evicting leaves this much room, so that few puts need to read the directory.
FREED = 0.05
TOUCH_SECONDS = 1.0
LOCK_SECONDS = 5.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class FileStore:
    """Entries as files, the least recently used evicted first.

    Parameters
    ----------
    capacity_bytes
        Bound on the sizes of all entries, unfinished ones too. Where processes disagree, each
        keeps to its own.
    path
        The directory, made if it is not there. Default: `/dev/shm/kvhub-<user id>`.
    max_entries
        Bound on their number.

    Raises
    ------
    UsageError
        A bound that is not positive, or a directory that others can write to.
    StoreError
        The directory cannot be made or read.
    """

    def __init__(
        self, capacity_bytes: int, path: str | Path | None = None, max_entries: int = 1 << 15
    ) -> None:
        for name, value in (("capacity_bytes", capacity_bytes), ("max_entries", max_entries)):
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} must be a positive int, found {value!r}.")
        self.path = Path(path or f"/dev/shm/kvhub-{os.geteuid()}").absolute()
        self.capacity_bytes, self.max_entries = capacity_bytes, max_entries
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._closed = False
        with self._failing("opened"):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.stat()
        # Who can write here can put a prompt's states under another's key.
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise UsageError(
                f"{self.path} must belong to user {os.geteuid()} and be writable by no other; "
                f"found user {found.st_uid} and mode {stat.S_IMODE(found.st_mode):o}.",
                "Choose another path, or chmod 700 it.",
            )
        with self._failing("opened"), self._locked() as lock:
            self._make_room(lock, 0, 0)

    def put(self, key: str, buffers: Sequence[memoryview | bytes]) -> bool:
        """As for `kvhub.exporters.store.Store`."""
        path = self._path(key)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        size = sum(map(len, views))
        with self._failing(f"given {key}"):
            if self._touched(path):
                return True
            part = self.path / f"{secrets.token_hex(16)}.kvhub-part"
            file = self._reserve(part, size)
            if file is None:
                self._count("rejected")
                return False
            try:
                for view in views:
                    while view:
                        view = view[os.write(file, view) :]
                # No fsync: after a crash of the machine a cache may be empty, and what a file
                # system made of unfinished entries does not pass their checksums.
                with self._locked() as lock:
                    if path.exists():
                        self._unlink(lock, part)
                    else:
                        os.rename(part, path)
                        self._count("puts")
            except BaseException:
                with suppress(OSError, StoreError), self._locked() as lock:
                    self._unlink(lock, part)
                raise
            finally:
                os.close(file)
        return True

    def get(self, key: str) -> memoryview | None:
        """As for `kvhub.exporters.store.Store`. The memory is the caller's own: writes stay his."""
        path = self._path(key)
        with self._failing(f"asked for {key}"):
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                self._count("misses")
                return None
            try:
                found = os.fstat(file)
                self._touch(file, found)
                buffer = _mapped(file, found.st_size)
            finally:
                os.close(file)
        self._count("hits")
        return buffer

    def copy_to(self, key: str, file: str) -> bool:
        """As for `kvhub.exporters.store.Store`. On one file system a link, which costs nothing."""
        with self._failing(f"asked for {key}"):
            try:
                os.link(self._path(key), file, follow_symlinks=False)
                self._touch(Path(file), os.stat(file))
            except FileNotFoundError:
                self._count("misses")
                return False
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
            else:
                self._count("hits")
                return True
        found = self.get(key)
        if found is not None:
            with self._failing(f"copied from {key}"):
                write_new(file, found)
        return found is not None

    def contains(self, key: str) -> bool:
        """As for `kvhub.exporters.store.Store`."""
        with self._failing(f"asked for {key}"):
            return self._path(key).exists()

    def remove(self, key: str) -> None:
        """As for `kvhub.exporters.store.Store`."""
        path = self._path(key)
        with self._failing(f"told to remove {key}"), self._locked() as lock:
            self._unlink(lock, path)

    def close(self) -> None:
        """As for `kvhub.exporters.store.Store`. The entries stay for others."""
        self._closed = True

    def stats(self) -> dict[str, int]:
        """As for `kvhub.exporters.store.Store`.

        `bytes` and `files` of all processes, each an upper bound; of this store since opening:
        `puts`, `hits`, `misses`, `evicted`, `rejected`.
        """
        with self._failing("asked for its size"):
            lock = os.open(self.path / "kvhub.lock", os.O_RDONLY | os.O_CLOEXEC)
            try:
                size, files = _read(lock) or (0, 0)
            finally:
                os.close(lock)
        counted = ("puts", "hits", "misses", "evicted", "rejected")
        return {"bytes": size, "files": files, **{name: self._counts[name] for name in counted}}

    def _path(self, key: str) -> Path:
        if not KEY.fullmatch(key):
            raise UsageError(f"Keys match {KEY.pattern}, found {key!r}.")
        return self.path / f"{key}.kvhub"

    def _count(self, name: str) -> None:
        with self._counting:
            self._counts[name] += 1

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        if self._closed:
            raise StoreError(f"The store in {self.path} is closed.", "Open it again.")
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"The store in {self.path} failed when {what}: {error}.",
                "Make room on its device, or choose another path.",
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The lock file, locked. Opened anew each time: threads and forked processes have theirs.

        Waiting is bounded, as the holder may be stopped.
        """
        # It may have been cleared away.
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.path / "kvhub.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            until = time.monotonic() + LOCK_SECONDS
            while not _try_lock(lock):
                if time.monotonic() > until:
                    raise StoreError(
                        f"{self.path} has been locked for {LOCK_SECONDS:g} s.",
                        "A process that holds it may be stopped: see /proc/locks.",
                    )
                time.sleep(0.0005)
            yield lock
        finally:
            os.close(lock)

    def _reserve(self, part: Path, size: int) -> int | None:
        """An unfinished file with its size counted, open and locked; None if there is no room."""
        with self._locked() as lock:
            used = _read(lock)
            if used is None or not self._fits(used[0] + size, used[1] + 1):
                if not self._fits(size, 1):
                    return None
                used = self._make_room(lock, size, 1)
                if not self._fits(used[0] + size, used[1] + 1):
                    return None
            _write(lock, used[0] + size, used[1] + 1)
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                if not _try_lock(file):
                    raise OSError(errno.EWOULDBLOCK, "a new file is locked", str(part))
                # It has its size from the start, so that whoever sums up sizes counts it whole.
                os.ftruncate(file, size)
            except BaseException:
                os.close(file)
                self._unlink(lock, part)
                raise
            return file

    def _fits(self, size: int, files: int) -> bool:
        return size <= self.capacity_bytes and files <= self.max_entries

    def _make_room(self, lock: int, size: int, files: int) -> tuple[int, int]:
        """Remove what dead writers left and, if need be, entries; the bytes and files now."""
        entries, used, count = [], 0, 0
        with os.scandir(self.path) as items:
            for item in items:
                entry = ENTRY.fullmatch(item.name)
                ours = entry or PART.fullmatch(item.name)
                if not ours or not item.is_file(follow_symlinks=False):
                    continue
                with suppress(FileNotFoundError):  # the directory may be cleared away meanwhile
                    found = item.stat(follow_symlinks=False)
                    if not entry and _abandoned(item.path):
                        os.unlink(item.path)
                        continue
                    if entry:
                        entries.append((found.st_mtime_ns, item.path, found.st_size))
                    used, count = used + found.st_size, count + 1
        if not self._fits(used + size, count + files):
            most_bytes = max(size, int(self.capacity_bytes * (1 - FREED)))
            most_files = max(files, int(self.max_entries * (1 - FREED)))
            for _, path, freed in sorted(entries):
                if used + size <= most_bytes and count + files <= most_files:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)
                self._count("evicted")
                used, count = used - freed, count - 1
        _write(lock, used, count)
        return used, count

    def _unlink(self, lock: int, path: Path) -> None:
        try:
            size = path.stat().st_size
            os.unlink(path)
        except FileNotFoundError:
            return
        used = _read(lock)
        if used is not None:
            _write(lock, max(0, used[0] - size), max(0, used[1] - 1))

    def _touched(self, path: Path) -> bool:
        try:
            self._touch(path, path.stat())
        except FileNotFoundError:
            return False
        return True

    def _touch(self, file: int | Path, found: os.stat_result) -> None:
        # Not on every use: writing the time costs more than reading it, and one second is finer
        # than the order of eviction needs.
        if abs(time.time() - found.st_mtime) > TOUCH_SECONDS:
            os.utime(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _abandoned(path: str) -> bool:
    """Whether no process holds the lock of an unfinished file."""
    # Its writer's process id would not tell: ids are used again, and differ between containers
    # that share the directory.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _try_lock(file)
    finally:
        os.close(file)


def _read(lock: int) -> tuple[int, int] | None:
    """Bytes and files as the lock file says; None if it is new or damaged."""
    data = os.pread(lock, USED.size, 0)
    if len(data) < USED.size:
        return None
    size, files = USED.unpack(data)
    return size, files


def _write(lock: int, size: int, files: int) -> None:
    os.pwrite(lock, USED.pack(size, files), 0)


def _mapped(file: int, size: int) -> memoryview:
    """A private map of a file. It needs no descriptor, unlike `mmap.mmap` before Python 3.13.

    An engine holds thousands of entries of a long prompt at a time, and may be allowed no more
    than a thousand descriptors.
    """
    if not size:
        return memoryview(b"")
    flags = mmap.MAP_PRIVATE | 0x4000  # MAP_NORESERVE: it is written to by mistake only
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    owner = (ctypes.c_char * size).from_address(address)
    # Not at exit, where other threads may still read it.
    weakref.finalize(owner, _libc.munmap, address, size).atexit = False
    return memoryview(owner).cast("B")
