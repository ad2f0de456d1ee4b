"""Stores for the soak, and what goes wrong with them and with the connectors, at random.

What damages an entry puts another file in its place. A staged entry may share its memory with the
store, which nobody may write to; bits that change there after the check are not found.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvhub.exporters.store import Store, StoreError
from kvhub.exporters.store_mooncake import CALLS

CAPACITY = 8 << 20  # of the files: a fraction of what the conversations have, so that it evicts
SEGMENT = 16 << 20  # lent by each of four clients of Mooncake, which takes no less
# How often, of the calls of that kind.
PUT = dict.fromkeys(("lost", "truncated", "corrupted", "mixed up", "store raises"), 0.002)
COPY = {"lost": 0.001, "delayed": 0.0003, "store raises": 0.001}
LOADER, SAVER, STAGE = 0.05, 0.002, 0.01
DAMAGE_SECONDS = 0.3  # between two that are damaged where they are
EVENT_SECONDS = 10.0  # between two that befall a store as a whole, on average


class Faults:
    """Chooses, by a seed, and counts. `active` is unset to end them."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.active = True
        self.refused_until = 0.0  # the device is full

    def strikes(self, rates: dict[str, float]) -> str | None:
        """Which of some faults happens now, if any."""
        if not self.active:
            return None
        number = self.choose.random()
        for name, rate in rates.items():
            number -= rate
            if number < 0:
                self.counts[name] += 1
                return name
        return None

    def raising(self, name: str, rate: float, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that fails at random, before it has done anything or behind."""

        def call(*args: Any, **options: Any) -> Any:
            if not self.strikes({name: rate}):
                return function(*args, **options)
            if self.choose.random() < 0.5:
                function(*args, **options)
            raise RuntimeError(f"{name} (injected)")

        return call


class FaultyStore:
    """A store that loses, damages, delays and refuses."""

    def __init__(self, store: Store, faults: Faults, delay: float) -> None:
        self.store, self.faults, self.delay = store, faults, delay
        self._other = b"another entry"

    def put(self, key: str, buffers: Sequence[memoryview | bytes]) -> bool:
        """As the store, or not."""
        if self.faults.active and time.monotonic() < self.faults.refused_until:
            self.faults.counts["device full"] += 1
            raise StoreError("No space left on device (injected).")
        fault = self.faults.strikes(PUT)
        if fault is None:
            return self.store.put(key, buffers)
        if fault == "store raises":
            raise StoreError("This store fails (injected).")
        if fault == "lost":
            return True
        data = b"".join(bytes(memoryview(buffer).cast("B")) for buffer in buffers)
        other, self._other = self._other, data
        if fault == "truncated":
            data = data[: self.faults.choose.randrange(len(data))]
        elif fault == "corrupted":
            data = flipped(data, self.faults.choose)
        else:
            data = other
        return self.store.put(key, [data])

    def copy_to(self, key: str, file: str) -> bool:
        """As the store, or not."""
        fault = self.faults.strikes(COPY)
        if fault == "store raises":
            raise StoreError("This store fails (injected).")
        if fault == "delayed":
            time.sleep(self.delay)
        return fault != "lost" and self.store.copy_to(key, file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class Files:
    """A directory, which entries vanish from and are damaged in, and which vanishes itself."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "store"
        self.config = {"kind": "files", "path": str(self.path), "capacity_bytes": CAPACITY}
        self.stores: list[Any] = []  # opened by the connectors
        self.connections = 0
        self._whole_again = self._damage_at = 0.0

    def tick(self, faults: Faults) -> None:
        """Damage an entry now and then."""
        now = time.monotonic()
        if self._whole_again and (now > self._whole_again or not faults.active):
            self._whole_again = 0.0
            for store in self.stores:
                store.capacity_bytes = CAPACITY
        if not faults.active or now < self._damage_at:
            return
        self._damage_at = now + DAMAGE_SECONDS
        with suppress(OSError):  # an eviction may be faster
            names = [name for name in os.listdir(self.path) if name.endswith(".kvhub")]
            if names:
                victim, other = (self.path / faults.choose.choice(names) for _ in range(2))
                self._damage(faults, victim, other)

    def _damage(self, faults: Faults, victim: Path, other: Path) -> None:
        kind = faults.choose.choice(("lost", "truncated", "corrupted", "mixed up"))
        faults.counts[kind] += 1
        if kind == "lost":
            victim.unlink()
            return
        data = (other if kind == "mixed up" else victim).read_bytes()
        if kind == "truncated":
            data = data[: faults.choose.randrange(len(data))]
        elif kind == "corrupted":
            data = flipped(data, faults.choose)
        beside = self.path / "damaged"
        # No larger than before: the store counts an entry's bytes once.
        beside.write_bytes(data[: victim.stat().st_size])
        os.replace(beside, victim)

    def strike(self, faults: Faults) -> None:
        """Let something befall the whole of it."""
        kind = faults.choose.choice(("removed", "device full", "tiny capacity"))
        if kind == "device full":
            faults.refused_until = time.monotonic() + 1.0
            return
        faults.counts[f"store {kind}"] += 1
        if kind == "removed":
            shutil.rmtree(self.path, ignore_errors=True)
            if faults.choose.random() < 0.5:
                self.path.mkdir(mode=0o700, exist_ok=True)
            return
        self._whole_again = time.monotonic() + 1.0
        for store in self.stores:
            store.capacity_bytes = 1000

    def over(self) -> int:
        """By how many bytes it holds more than it may."""
        used = 0
        with suppress(OSError):
            for item in os.scandir(self.path):
                with suppress(OSError):
                    if item.name.endswith((".kvhub", ".kvhub-part")):
                        used += item.stat().st_size
        return max(0, used - CAPACITY)

    def close(self) -> None:
        """Nothing: the folder is the caller's."""


class Mooncake:
    """A server that is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.stores: list[Any] = []
        # Four clients pool connections to the server, as many as they have had calls at a time.
        self.connections = 4 * CALLS
        self._log = (folder / "mooncake.log").open("w")
        os.environ.setdefault("GLOG_minloglevel", "3")  # its clients report every failure
        self._port, self._metadata, self._metrics = _free_ports(3)
        self.config = {
            "kind": "mooncake",
            "master": f"127.0.0.1:{self._port}",
            "metadata": f"http://127.0.0.1:{self._metadata}/metadata",
            "segment_bytes": SEGMENT,
            "buffer_bytes": SEGMENT,
            "timeout_s": 2.0,
        }
        self._start_at: float | None = None
        self._start()
        while any(map(_is_free, (self._port, self._metadata))):
            time.sleep(0.1)

    def _start(self) -> None:
        options = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self._port,
            "enable_http_metadata_server": "true",
            "http_metadata_server_host": "127.0.0.1",
            "http_metadata_server_port": self._metadata,
            "metrics_host": "127.0.0.1",
            "metrics_port": self._metrics,
            "client_ttl": 3,
        }
        program = Path(sys.executable).with_name("mooncake_master")
        command = [shutil.which(program) or "mooncake_master"]
        command += [f"--{name}={value}" for name, value in options.items()]
        self._server = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def tick(self, faults: Faults) -> None:
        """Start it again in time."""
        if self._start_at and (time.monotonic() > self._start_at or not faults.active):
            self._start_at = None
            self._start()

    def strike(self, faults: Faults) -> None:
        """Let something befall the whole of it."""
        if self._start_at or faults.choose.random() < 0.5:
            faults.refused_until = time.monotonic() + 1.0
            return
        faults.counts["store killed"] += 1
        self._server.send_signal(signal.SIGKILL)
        self._server.wait()
        self._start_at = time.monotonic() + faults.choose.uniform(0.5, 3.0)

    def over(self) -> int:
        """By how many bytes it holds more than its clients lend it."""
        sizes = {"master_allocated_bytes": 0.0, "master_total_capacity_bytes": 0.0}
        with suppress(OSError, ValueError):
            url = f"http://127.0.0.1:{self._metrics}/metrics"
            with urllib.request.urlopen(url, timeout=1.0) as answer:
                for line in answer.read().decode().splitlines():
                    name, _, value = line.partition(" ")
                    if name in sizes:
                        sizes[name] = float(value)
        used, lent = sizes.values()
        return int(max(0, used - lent)) if lent else 0

    def close(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.wait()
        self._log.close()


def inject(host: Any, faults: Faults, delay: float) -> None:
    """Let the connector of an engine, and what it takes the store for, fail at random."""
    planner, transfer = host.manager.scheduler.planner, host.manager.workers[0].transfer
    stage, saver, loader = planner.stage, transfer.saver, transfer.loader
    stage.store = FaultyStore(stage.store, faults, delay)
    saver.store = FaultyStore(saver.store, faults, delay)
    saver._put = faults.raising("saver raises", SAVER, saver._put)
    saver._copy = faults.raising("saver raises", SAVER, saver._copy)
    stage.take = faults.raising("staging raises", STAGE, stage.take)
    load, failed = loader._load, []

    def once(order: Any, kernels: Any) -> None:
        """Fail at the first try only: after a second one the engine fails what is under way."""
        if failed and failed.pop() is order:
            load(order, kernels)
            return
        if faults.strikes({"loader raises": LOADER}):
            failed[:] = [order]
            if faults.choose.random() < 0.5:
                load(order, kernels)
            raise RuntimeError("loader raises (injected)")
        load(order, kernels)

    loader._load = once


def flipped(data: bytes, choose: random.Random) -> bytes:
    """The same but for one bit, or some in one place."""
    changed = bytearray(data)
    start = choose.randrange(len(data))
    for place in range(start, min(len(data), start + choose.choice((1, 256)))):
        changed[place] ^= 1 << choose.randrange(8)
    return bytes(changed)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0
