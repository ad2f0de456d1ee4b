"""Mooncake as a store: two processes share entries, and no failure of its server blocks them."""

import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kvhub.exporters import store_mooncake
from kvhub.exporters.store import StoreError, open_store
from kvhub.exporters.store_mooncake import CALLS, MooncakeStore

from kvhub.errors import UsageError

ENTRY = 100_000
TIMEOUT_S = 60  # for what must not take for ever

needs_mooncake = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None,
    reason="needs mooncake-transfer-engine-non-cuda",
)

# Does what it reads, line by line, and says what came of it.
CLIENT = """
import hashlib, json, os, random, sys, threading
from kvhub.exporters.store import StoreError, open_store

store = open_store(json.loads(sys.argv[1]))
def put(key, seed, size):
    data = random.Random(seed).randbytes(size)
    return store.put(key, [data[:100], memoryview(bytearray(data[100:]))])
def get(key):
    found = store.get(key)
    return found and hashlib.sha256(found).hexdigest()
def used(key):
    for _ in range(100):
        store.get(key)
    return [len(os.listdir("/proc/self/fd")), threading.active_count()]
calls = {"put": put, "get": get, "used": used}
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    name, *args = json.loads(line)
    try:
        result = calls.get(name, getattr(store, name, None))(*args)
    except StoreError as error:
        result = {"error": str(error)}
    print(json.dumps(result), flush=True)
"""


def digest(seed, size=ENTRY):
    return hashlib.sha256(random.Random(seed).randbytes(size)).hexdigest()


def failed(result):
    return isinstance(result, dict)


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def within(condition):
    """Ask again until it holds."""
    until = time.monotonic() + TIMEOUT_S
    while not (result := condition()):
        assert time.monotonic() < until, "this took for ever"
        time.sleep(0.1)
    return result


class Client:
    """A process with a store of its own."""

    def __init__(self, config, log):
        command = [sys.executable, "-c", CLIENT, json.dumps(config)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        self.process = subprocess.Popen(command, text=True, **pipes)
        assert self._answer() == "ready"

    def __call__(self, *call):
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        # Killed when it hangs, so that reading ends.
        timer = threading.Timer(TIMEOUT_S, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        assert line, f"{self.process.args[-1]}: the client died or hung"
        return json.loads(line)

    def kill(self):
        self.process.kill()
        with self.process:
            pass


class Cluster:
    """A server of Mooncake's on ports of its own, and clients of it."""

    def __init__(self, folder):
        self.log = open(folder / "log", "w")  # noqa: SIM115
        self.port, self.metadata, self.metrics = free_ports(3)
        self.clients, self.server = [], None

    def start(self):
        program = Path(sys.executable).with_name("mooncake_master")
        options = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "enable_http_metadata_server": "true",
            "http_metadata_server_host": "127.0.0.1",
            "http_metadata_server_port": self.metadata,
            "metrics_host": "127.0.0.1",
            "metrics_port": self.metrics,
            "client_ttl": 3,
        }
        command = [shutil.which(program) or "mooncake_master"]
        command += [f"--{name}={value}" for name, value in options.items()]
        self.server = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        within(lambda: all(map(self.listens, (self.port, self.metadata))))

    def listens(self, port):
        assert self.server.poll() is None, Path(self.log.name).read_text()
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    def config(self, **options):
        return {
            "kind": "mooncake",
            "master": f"127.0.0.1:{self.port}",
            "metadata": f"http://127.0.0.1:{self.metadata}/metadata",
            "segment_bytes": 16 << 20,
            "buffer_bytes": 16 << 20,
            "timeout_s": 2.0,
            **options,
        }

    def client(self, **options):
        self.clients.append(Client(self.config(**options), self.log))
        return self.clients[-1]

    def kill(self):
        self.server.kill()
        self.server.wait()

    def close(self):
        for client in self.clients:
            client.kill()
        if self.server:
            self.kill()
        self.log.close()


@pytest.fixture
def stopped_cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(stopped_cluster):
    stopped_cluster.start()
    return stopped_cluster


@needs_mooncake
def test_what_one_process_puts_another_gets(cluster):
    first, second = cluster.client(), cluster.client(segment_bytes=0)
    assert second("get", "a-0-4") is None
    assert not second("contains", "a-0-4")
    assert first("put", "a-0-4", 1, ENTRY)
    assert first("put", "a-0-4", 2, ENTRY)  # stays as it is
    assert second("get", "a-0-4") == digest(1)
    assert second("contains", "a-0-4")
    assert second("put", "b", 3, ENTRY)  # into the memory that the first one lends
    assert first("get", "b") == digest(3)
    assert second("used", "b") == second("used", "b")
    assert second("remove", "b") is None
    assert second("remove", "b") is None
    assert first("get", "b") is None
    assert not first("put", "c", 4, 5 << 20)  # more than a quarter of the buffer
    counted = {"puts": 2, "hits": 1, "misses": 1, "rejected": 1, "errors": 0}
    assert first("stats") == counted
    assert first("close") is None
    assert failed(first("get", "b"))
    assert failed(first("put", "b", 1, ENTRY))
    assert first("close") is None
    # What the first one lent went with it.
    within(lambda: second("get", "a-0-4") is None)


@needs_mooncake
def test_a_full_store_loses_entries_and_mixes_none_up(cluster):
    first, second = cluster.client(), cluster.client(segment_bytes=0)
    size = 2 << 20
    kept = [first("put", f"{seed}", seed, size) for seed in range(30)]
    assert {*kept} == {True, False} or all(kept)
    found = [second("get", f"{seed}") for seed in range(30)]
    assert all(result in (None, digest(seed, size)) for seed, result in enumerate(found))
    assert 0 < sum(result is not None for result in found) <= 8
    within(lambda: first("put", "later", 99, size))
    assert second("get", "later") == digest(99, size)


@needs_mooncake
def test_a_killed_server_is_an_error_and_its_restart_mends_it(cluster):
    first, second = cluster.client(), cluster.client()
    assert first("put", "a", 1, ENTRY)
    assert second("get", "a") == digest(1)
    for _ in range(2):
        cluster.kill()
        for client in (first, second):
            for call in (("get", "a"), ("put", "b", 2, ENTRY), ("contains", "a"), ("remove", "a")):
                assert failed(client(*call))
        cluster.start()
        within(lambda: first("get", "a") is None)  # lost with the server
        for writer, reader, key in ((first, second, "b"), (second, first, "c")):
            # What is put while the clients come back may be lost again.
            within(lambda w=writer, k=key: w("put", k, 2, ENTRY) is True)
            within(
                lambda w=writer, r=reader, k=key: w("put", k, 2, ENTRY) and r("get", k) == digest(2)
            )
    assert first("stats")["errors"] > 0


def stop(process):
    """Stop a child, and be sure of it: a thread of it may still have answered the next request."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


@needs_mooncake
def test_a_server_that_hangs_blocks_nobody(cluster):
    client = cluster.client()
    assert client("put", "a", 1, ENTRY)
    stop(cluster.server)
    try:
        for _ in range(20):
            assert failed(client("get", "a"))
            assert failed(client("put", "b", 2, ENTRY))
    finally:
        os.kill(cluster.server.pid, signal.SIGCONT)
    within(lambda: client("put", "b", 2, ENTRY) is True)
    assert client("get", "b") == digest(2)


@needs_mooncake
def test_a_killed_holder_of_entries_blocks_nobody(cluster):
    holder, reader = cluster.client(), cluster.client(segment_bytes=0)
    for seed in range(4):
        assert holder("put", f"{seed}", seed, ENTRY)
    assert reader("get", "0") == digest(0)
    stop(holder.process)
    assert failed(reader("get", "1"))
    holder.kill()
    within(lambda: all(reader("get", f"{seed}") is None for seed in range(4)))
    cluster.client()
    within(lambda: reader("put", "5", 5, ENTRY) is True)
    assert reader("get", "5") == digest(5)


@needs_mooncake
def test_a_server_may_start_after_its_clients(stopped_cluster):
    client = stopped_cluster.client()
    assert failed(client("get", "a"))
    stopped_cluster.start()
    within(lambda: client("put", "a", 1, ENTRY) is True)
    assert client("get", "a") == digest(1)


class FakeMooncake:
    """A client in memory that hangs while `going` is not set."""

    going, data, code = threading.Event(), {}, 0

    def setup(self, *args):
        return self.code

    def put_parts(self, key, *parts):
        self.going.wait()
        self.data.setdefault(key, b"".join(parts))
        return self.code

    def get_buffer(self, key):
        self.going.wait()
        return self.data.get(key)

    def is_exist(self, key):
        return self.code or int(key in self.data)


@pytest.fixture
def fake(monkeypatch):
    class Fake(FakeMooncake):
        going, data = threading.Event(), {}

    Fake.going.set()
    monkeypatch.setattr(store_mooncake, "_load", lambda: Fake)
    monkeypatch.setattr(store_mooncake, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(store_mooncake, "LONGEST_PAUSE", 0.02)
    yield Fake
    Fake.going.set()


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_client_that_hangs_costs_few_threads_and_no_caller(fake, server):
    store = MooncakeStore(server, 0, timeout_s=0.05)
    assert store.put("a", [b"1", b"2"])
    assert store.get("a") == b"12"
    before = threading.active_count()
    fake.going.clear()
    for _ in range(3 * CALLS):
        with pytest.raises(StoreError, match=r"did not answer|tried again"):
            store.get("a")
        time.sleep(0.03)
    assert threading.active_count() == before + CALLS
    store.close()
    store.close()
    fake.going.set()
    within(lambda: threading.active_count() == before)
    with pytest.raises(StoreError, match="closed"):
        store.get("a")


@pytest.mark.parametrize("code", [-900, -901, -800])
def test_a_failure_is_no_miss(fake, server, code):
    store = MooncakeStore(server, 0)
    assert store.get("a") is None
    fake.code = code
    for action in (lambda: store.get("a"), lambda: store.contains("a")):
        with pytest.raises(StoreError, match=f"code {code}"):
            action()
        time.sleep(0.03)
    fake.code = 0
    fake.data["kvhub/a"] = None
    with pytest.raises(StoreError, match="could not transfer"):
        store.get("a")
    assert store.stats()["errors"] == 2


def test_calls_pause_after_a_failure(fake, server, monkeypatch):
    monkeypatch.setattr(store_mooncake, "FIRST_PAUSE", 1000.0)
    fake.code = -1
    store = MooncakeStore(server, 0)
    fake.code = 0
    for _ in range(3):
        with pytest.raises(StoreError, match="tried again in"):
            store.get("a")


def test_a_client_that_raises_is_an_error(fake, server, monkeypatch):
    store = MooncakeStore(server, 0)
    monkeypatch.setattr(fake, "is_exist", lambda self, key: {}["missing"])
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with pytest.raises(StoreError, match="raised in contains"):
        store.contains("a")


def test_without_mooncake_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(UsageError, match="pip install mooncake-transfer-engine-non-cuda"):
        MooncakeStore("127.0.0.1:1", 0)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"master": "localhost"}, {"master": "localhost:http"}, {"segment_bytes": -1}),
        *({"segment_bytes": "1"}, {"buffer_bytes": 0}, {"timeout_s": 0}, {"size": 1}),
    ],
)
def test_parameters_that_cannot_work_are_refused(wrong):
    config = {"kind": "mooncake", "master": "127.0.0.1:1", "segment_bytes": 0, **wrong}
    with pytest.raises(UsageError, match=next(iter(wrong))):
        open_store(config)
