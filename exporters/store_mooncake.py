"""A store of many nodes: Mooncake Store over TCP, where each engine lends a part of its memory.

Written for and tested with mooncake-transfer-engine-non-cuda 0.3.13, and its server on one node:

    mooncake_master --enable_http_metadata_server=true

The server decides what is evicted. Its client reconnects by itself, and after a restart of the
server, which loses all entries, offers its memory again.
"""

import ctypes
import importlib.util
import logging
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvhub.exporters.store import StoreError, write_new

from kvhub.errors import UsageError

__all__ = ["MooncakeStore"]

logger = logging.getLogger(__name__)

# The store may be shared with others than kvhub.
PREFIX = "kvhub/"
# Calls at a time. Each holds a buffer of its entry's size in the client, and a thread if it hangs.
CALLS = 4
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
# Mooncake's return codes: what it has no room for, and what it does not have.
NO_ROOM, NOT_FOUND, NO_SERVER = -200, -704, (-900, -901)


class MooncakeStore:
    """Entries in the memory of all nodes.

    Where the server cannot be reached this opens all the same; calls then raise `StoreError` at
    once, and after pauses of 0.5 to 8 seconds one of them tries again.

    Connecting and closing hold Python's lock, as Mooncake is written: for a fraction of a second
    as a rule; for about `timeout_s` where the server accepts connections and does not answer. In
    closing, which the end of the process does too, for some three seconds, or twenty.

    Parameters
    ----------
    master
        `host:port` of the server.
    segment_bytes
        The memory that this process lends, allocated at once. 0 lends nothing.
    buffer_bytes
        For transfers, allocated at once: at least four times the size of an entry.
    metadata
        Where clients find each other: a URL, or `P2PHANDSHAKE`. Default: port 8080 of the
        server's host, its own metadata server.
    hostname
        Where the others reach this process. Default: the address that it reaches the server from.
    timeout_s
        Bound on every call.

    Raises
    ------
    UsageError
        A parameter that cannot work, or Mooncake cannot be imported.
    """

    def __init__(
        self,
        master: str,
        segment_bytes: int,
        buffer_bytes: int = 256 << 20,
        metadata: str | None = None,
        hostname: str | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        host, _, port = master.rpartition(":")
        if not host or not port.isdecimal():
            raise UsageError(f"master must be host:port, found {master!r}.")
        for name, value, least in (
            ("segment_bytes", segment_bytes, 0),
            ("buffer_bytes", buffer_bytes, 1),
        ):
            if type(value) is not int or value < least:
                raise UsageError(f"{name} must be an int from {least}, found {value!r}.")
        if not timeout_s > 0:
            raise UsageError(f"timeout_s must be positive, found {timeout_s}.")
        self._master, self._address = master, (host.strip("[]"), int(port))
        self._metadata = metadata or f"http://{host}:8080/metadata"
        self._hostname, self._timeout = hostname, timeout_s
        self._segment_bytes, self._buffer_bytes = segment_bytes, buffer_bytes
        # Otherwise it waits for half a minute and tries for two. Who sets them knows better.
        os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(math.ceil(1000 * timeout_s)))
        os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(math.ceil(timeout_s)))
        os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
        self._make_client = _load()
        self._client: Any = None
        self._slots = threading.BoundedSemaphore(CALLS)
        self._lock = threading.RLock()  # of all below, and held while connecting
        self._counts: Counter[str] = Counter()
        self._pause, self._retry_at = FIRST_PAUSE, 0.0
        self._closed = False
        try:
            self._connected()
        except StoreError as error:
            logger.warning("kvhub: %s", error)

    def put(self, key: str, buffers: Sequence[memoryview | bytes]) -> bool:
        """As for `kvhub.exporters.store.Store`."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if sum(map(len, views)) > self._buffer_bytes // CALLS:
            self._count("rejected")
            return False
        code = self._call("put", lambda client: client.put_parts(PREFIX + key, *views))
        if code == NO_ROOM:
            self._count("rejected")
            return False
        self._require(code, "put")
        self._count("puts")
        return True

    def get(self, key: str) -> memoryview | None:
        """As for `kvhub.exporters.store.Store`."""
        found = self._call("get", lambda client: _read(client, PREFIX + key))
        if isinstance(found, bytearray):
            self._count("hits")
            return memoryview(found)
        self._require(found, "get")
        if found:
            raise StoreError(
                f"Mooncake has an entry that it could not transfer: {key}.",
                "The process that holds it may be gone or slow, or buffer_bytes too small.",
            )
        self._count("misses")
        return None

    def copy_to(self, key: str, file: str) -> bool:
        """As for `kvhub.exporters.store.Store`."""
        found = self.get(key)
        if found is not None:
            try:
                write_new(file, found)
            except OSError as error:
                raise StoreError(f"{file} cannot be written: {error}.") from error
        return found is not None

    def contains(self, key: str) -> bool:
        """As for `kvhub.exporters.store.Store`."""
        code = self._call("contains", lambda client: client.is_exist(PREFIX + key))
        self._require(code, "contains")
        return bool(code)

    def remove(self, key: str) -> None:
        """As for `kvhub.exporters.store.Store`."""
        # Forced: otherwise what was read in the last seconds stays.
        code = self._call("remove", lambda client: client.remove(PREFIX + key, True))
        if code != NOT_FOUND:
            self._require(code, "remove")

    def close(self) -> None:
        """As for `kvhub.exporters.store.Store`. What this process lent is lost to the others."""
        with self._lock:
            # Dropped and not closed: calling a closed client crashes, and a call may be under way.
            # The last one to refer to the client closes it.
            self._closed, self._client = True, None

    def stats(self) -> dict[str, int]:
        """As for `kvhub.exporters.store.Store`.

        Since opening: `puts`, `hits`, `misses`, `rejected`, `errors`.
        """
        counted = ("puts", "hits", "misses", "rejected", "errors")
        return {name: self._counts[name] for name in counted}

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _call(self, what: str, function: Callable[[Any], Any]) -> Any:
        """What a function of the client returns, if it does in time.

        On a thread of its own: Mooncake's own bounds add up. The thread is no daemon: cut off at
        exit, while it is inside of Mooncake, it would abort the process.
        """
        until = time.monotonic() + self._timeout
        client = self._connected()
        if not self._slots.acquire(timeout=max(0.0, until - time.monotonic())):
            raise self._failed(f"did not answer {CALLS} calls within {self._timeout:g} s")
        results: list[Any] = []
        done = threading.Event()

        def run() -> None:
            try:
                results.append(function(client))
            finally:
                self._slots.release()
                done.set()

        try:
            threading.Thread(target=run, name=f"kvhub-mooncake-{what}").start()
        except RuntimeError as error:  # no more threads, or the interpreter is ending
            self._slots.release()
            raise StoreError(f"Mooncake was not asked: {error}.") from error
        if not done.wait(max(0.0, until - time.monotonic())):
            raise self._failed(f"did not answer {what} within {self._timeout:g} s")
        if not results:
            raise self._failed(f"raised in {what}; its traceback is on stderr")
        return results[0]

    def _connected(self) -> Any:
        with self._lock:
            if self._closed:
                raise StoreError("This Mooncake store is closed.", "Open it again.")
            wait = self._retry_at - time.monotonic()
            if wait > 0:
                raise StoreError(f"Mooncake at {self._master} failed; tried again in {wait:.1f} s.")
            if self._client is None:
                try:
                    # First without Mooncake, which would hold Python's lock while it waits.
                    with socket.create_connection(self._address, self._timeout) as connection:
                        own = connection.getsockname()[0]
                except OSError as error:
                    raise self._failed(f"cannot be reached: {error}") from error
                client = self._make_client()
                hostname = self._hostname or own
                sizes = self._segment_bytes, self._buffer_bytes
                code = client.setup(hostname, self._metadata, *sizes, "tcp", "", self._master)
                if code:
                    raise self._failed(f"and metadata at {self._metadata} refused: code {code}")
                self._client = client
            return self._client

    def _require(self, code: int, what: str) -> None:
        """Raise for the codes of errors."""
        if code in NO_SERVER:
            raise self._failed(f"cannot be reached by {what}: code {code}")
        if code < 0:
            self._count("errors")
            raise StoreError(f"Mooncake at {self._master} failed in {what}: code {code}.")
        self._pause = FIRST_PAUSE

    def _failed(self, what: str) -> StoreError:
        """The error to raise, after which calls pause so that they do not wait one by one."""
        with self._lock:
            self._counts["errors"] += 1
            now = time.monotonic()
            if now >= self._retry_at:
                self._retry_at = now + self._pause
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return StoreError(
            f"Mooncake at {self._master} {what}.",
            "Start: mooncake_master --enable_http_metadata_server=true",
        )


def _read(client: Any, key: str) -> bytearray | int:
    """A copy of an entry; or what `is_exist` says, since a miss and a failure both give None."""
    handle = client.get_buffer(key)
    if handle is None:
        code: int = client.is_exist(key)
        return code
    # A copy, because the handle occupies a part of the client's buffer.
    return bytearray(handle)


def _load() -> Callable[[], Any]:
    """The class of Mooncake's clients.

    Raises
    ------
    UsageError
        It cannot be imported.
    """
    try:
        _load_cuda_runtime()
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise UsageError(
            f"Mooncake cannot be imported: {error}.",
            "Install: pip install mooncake-transfer-engine-non-cuda nvidia-cuda-runtime-cu12, and "
            "Debian's libibverbs1.",
        ) from error
    client: Callable[[], Any] = MooncakeDistributedStore
    return client


def _load_cuda_runtime() -> None:
    # Mooncake's wheel links to it, also the one without CUDA, and finds it only where the system's
    # linker does or where it is loaded already.
    try:
        spec = importlib.util.find_spec("nvidia.cuda_runtime")
    except ModuleNotFoundError:
        return
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        library = Path(folder, "lib", "libcudart.so.12")
        if library.exists():
            ctypes.CDLL(str(library))
