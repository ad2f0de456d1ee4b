"""An engine's own states, copied behind its work and given to the store by a thread."""

import queue
import threading
from collections import Counter
from typing import Any

import torch
from kvhub.exporters.chain import shard_key
from kvhub.exporters.entry import encode
from kvhub.exporters.planner import Save
from kvhub.exporters.pool import FLOAT8, Pool
from kvhub.exporters.status import Status
from kvhub.exporters.store import Store
from torch import Tensor

from kvhub.errors import VerificationError

__all__ = ["Saver"]


class Saver:
    """Saves for one rank; neither the engine's stream nor its loop waits for it.

    Parameters
    ----------
    store, status
        Where entries go, and where failures are counted.
    pool
        The engine's.
    limit_bytes
        Bound on copies that the store does not have yet; what comes above is not saved.
    """

    def __init__(self, store: Store, status: Status, pool: Pool, limit_bytes: int) -> None:
        self.store, self.status, self.pool = store, status, pool
        self.limit_bytes = limit_bytes
        self.stream: Any = None
        if pool.device.type == "cuda":
            self.stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._queue: queue.Queue[tuple[Save, Tensor, Any] | None] = queue.Queue()
        self._lock = threading.Lock()
        self._reading: Counter[int | str] = Counter()
        self._bytes = 0
        self._thread = threading.Thread(target=self._run, name="kvhub-save", daemon=True)
        self._thread.start()

    def save(self, save: Save) -> None:
        """Copy a chunk once the current stream is there; or count that there was no room."""
        size = self.pool.chunk_bytes
        with self._lock:
            if self._bytes + size > self.limit_bytes:
                self.status.count("not saved: too much on its way")
                return
            self._bytes += size
            self._reading[save.name] += 1
        try:
            item = (save, *self._copy(save))
        except Exception as error:  # states that are not saved are computed once more, no worse
            self.status.failure("save", error)
            self._was_read(save)
            self._was_kept()
        else:
            self._queue.put(item)

    def reading(self, name: int | str) -> bool:
        """Whether a request's blocks are still being copied."""
        with self._lock:
            return name in self._reading

    def close(self) -> None:
        """Finish what was begun."""
        self._queue.put(None)
        self._thread.join()

    def _copy(self, save: Save) -> tuple[Tensor, Any]:
        if self.stream is None:
            return self.pool.read(save.start, save.blocks), None
        self.stream.wait_stream(torch.cuda.current_stream(self.pool.device))
        with torch.cuda.stream(self.stream):
            states = self.pool.read(save.start, save.blocks).to("cpu", non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return states, event

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            save, states, event = item
            try:
                try:
                    if event is not None:
                        event.synchronize()
                finally:  # else the request's blocks would never be free again
                    self._was_read(save)
                self._put(save, states)
            except Exception as error:  # a thread that ends would keep all later states in memory
                self.status.failure("save", error)
            self._was_kept()

    def _put(self, save: Save, states: Tensor) -> None:
        wide = states.float() if states.dtype == FLOAT8 else states
        if not bool(torch.isfinite(wide).all()):
            raise VerificationError(f"The states of request {save.name} are not finite.")
        key = shard_key(save.key, *self.pool.heads)
        kept = self.store.put(key, encode(states, key, self.pool.heads))
        self.status.count("saved" if kept else "not saved: no room")

    def _was_read(self, save: Save) -> None:
        with self._lock:
            self._reading[save.name] -= 1
            if not self._reading[save.name]:
                del self._reading[save.name]

    def _was_kept(self) -> None:
        with self._lock:
            self._bytes -= self.pool.chunk_bytes
