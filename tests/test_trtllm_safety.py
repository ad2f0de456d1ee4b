"""Whatever goes wrong, the engine lives, and no request has tokens of states that are not its own.

Its own are the target's, or those of `kvhub.handoff` as far as it was served.
"""

import os
import threading

import pytest
import trtllm_api as api
from kvhub.exporters.store import StoreError
from mapping import random_mapper
from test_trtllm_connector import MODULE, Pair, models, own, run
from trtllm_api import V1_2_1, V1_3_0RC12, V1_3_0RC28
from trtllm_fakes import prompts
from trtllm_host import EngineDeadError

PROMPT = prompts(45)[0]
STATES = {"applied", "fallback_reprefill", "unsupported"}


@pytest.fixture
def pair(tmp_path, monkeypatch):
    made = Pair(tmp_path, monkeypatch)
    made.mapper = random_mapper(*models())
    yield made
    for host in list(made.hosts):
        made.close(host)


def ready(pair, version=V1_2_1, settings=None, **options):
    """A target whose store has all of PROMPT from the source."""
    pair.export(**(settings or {}))
    pair.read([PROMPT], version=version)
    return pair.serve("target", version, **options)


def ask(pair, host, prompt=PROMPT, salt="", count=6):
    salt = pair.deployment.salt() if salt == "" else salt
    return run(host, [prompt], count, salt)[0]


def assert_alive(pair, host):
    """The engine serves another request, rightly, and holds no block that nobody owns."""
    prompt = prompts(30, seed=9)[0]
    request = ask(pair, host, prompt, None)
    assert request.tokens == own(prompt, request)
    assert host.leaked_blocks() == 0
    assert {line["state"] for line in pair.said} <= STATES


def counters(host):
    return host.manager.scheduler.status.counters + host.manager.workers[0].status.counters


@pytest.mark.parametrize("version", api.PRESETS, ids=lambda version: version.name)
def test_without_this_mappers_salt_nothing_is_offered(pair, version):
    host = ready(pair, version)
    others = (None, "kvhub", f"kvhub:{'0' * 16}", pair.deployment.salt("bob"), "alice")
    for salt in others:
        request = ask(pair, host, salt=salt)
        assert request.external_tokens == 0
        assert request.tokens == own(PROMPT, request)
    assert all(line["state"] != "applied" for line in pair.said)
    assert_alive(pair, host)


def damage(name, files, pair):
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        if name in ("lost", "half") and (name == "lost" or number >= 2):
            file.unlink()
        elif name == "truncated":
            os.truncate(file, len(content) - 7)
        elif name == "empty":
            os.truncate(file, 0)
        elif name in ("header", "states"):
            content[30 if name == "header" else -30] ^= 4
            file.write_bytes(content)
        elif name == "swapped" and number:
            file.write_bytes(files[0].read_bytes())
        elif name == "first":
            os.truncate(file, 99 if not number else len(content))


@pytest.mark.parametrize(
    ("name", "served", "reason"),
    [
        ("lost", 0, "miss: absent"),
        ("truncated", 0, "error: miss: damaged"),
        ("empty", 0, "error: miss: damaged"),
        ("header", 0, "error: miss: damaged"),
        ("states", 0, "error: miss: damaged"),
        ("first", 0, "error: miss: damaged"),
        ("half", 16, "miss: absent"),
        ("swapped", 8, "error: miss: damaged"),
    ],
)
def test_damaged_entries_are_misses(pair, name, served, reason):
    host = ready(pair)
    planner = host.manager.scheduler.planner
    request = host.submit(PROMPT, 6, cache_salt=pair.deployment.salt())
    parts = []
    take = planner.stage.take

    def note(owner, chunks, deadline):
        parts.extend(versions[-1][0].key for versions in chunks)
        damage(name, [pair.path / "store" / f"{key}.kvhub" for key in parts], pair)
        return take(owner, chunks, deadline)

    planner.stage.take = note
    host.run_until_idle()
    assert request.external_tokens == served
    assert request.error is None
    expected = pair.expected(PROMPT, request) if served else own(PROMPT, request)
    assert request.tokens == expected
    assert counters(host)[reason] >= 1
    (line,) = pair.said
    assert line["state"] == ("applied" if served else "fallback_reprefill")
    assert served or line["reason"] == "nothing in the store"
    assert planner.stage.held_bytes == 0 or served
    assert_alive(pair, host)


@pytest.mark.parametrize("fault", ["StoreError", "OSError", "RuntimeError", "slow", "closed"])
def test_a_store_that_fails(pair, fault):
    host = ready(pair, settings={"lookup_seconds": 0.05 if fault == "slow" else 10.0})
    planner, store = host.manager.scheduler.planner, host.manager.scheduler.store
    release = threading.Event()

    def copy_to(key, file):
        if fault == "slow":
            release.wait(10)
            return False
        with open(file, "w") as opened:
            opened.write("half")
        raise {"StoreError": StoreError, "OSError": OSError, "RuntimeError": RuntimeError}[fault](
            fault
        )

    if fault == "closed":
        store.close()
    else:
        store.copy_to = copy_to
    request = ask(pair, host)
    release.set()
    assert request.tokens == own(PROMPT, request)
    assert request.external_tokens == 0
    names = {
        "slow": "miss: late",
        "OSError": "error: miss: damaged",
        "RuntimeError": "error: offer",
    }
    assert counters(host)[names.get(fault, "error: miss: store")]
    assert_alive(pair, host)
    assert not planner._owners
    assert planner.stage.held_bytes == 0


def failing(method, times):
    """Raise the first times, then work."""
    left = [times]

    def call(*args, **options):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("injected")
        return method(*args, **options)

    return call


def test_a_load_that_raises_once_is_tried_again(pair):
    host = ready(pair)
    loader = host.manager.workers[0].transfer.loader
    loader._map = failing(loader._map, 1)
    request = ask(pair, host)
    assert request.tokens == pair.expected(PROMPT, request) != own(PROMPT, request)
    assert counters(host)["error: load"] == 1
    assert_alive(pair, host)


@pytest.mark.parametrize(
    ("version", "target"),
    [
        *((version, "loader._map") for version in api.PRESETS),
        (V1_2_1, "load"),
        (V1_3_0RC28, "loader.load"),
    ],
)
def test_a_load_that_fails_fails_its_request(pair, version, target):
    host = ready(pair, version)
    transfer = host.manager.workers[0].transfer
    *owner, name = target.split(".")
    owner = transfer.loader if owner else transfer
    setattr(owner, name, failing(getattr(owner, name), 2 if name == "_map" else 1))
    request = ask(pair, host)
    assert "could not be loaded" in request.error
    assert all(line["state"] != "applied" for line in pair.said)
    saved = pair.entries
    # V1 has kept blocks that nobody filled: those too must not be taken for states.
    again = ask(pair, host)
    assert again.error or again.tokens == pair.expected(PROMPT, again)
    assert (again.error is None) == (not version.stores_unfilled)
    assert pair.entries == saved
    longer = [*PROMPT[:40], 1, 2, 3]
    other = ask(pair, host, longer)
    assert other.error or other.tokens == pair.expected(longer, other)
    assert_alive(pair, host)


def test_a_load_that_fails_under_overlap_ends_loudly(pair):
    host = ready(pair, overlap=True)
    loader = host.manager.workers[0].transfer.loader
    loader._map = failing(loader._map, 2)
    request = host.submit(PROMPT, 6, cache_salt=pair.deployment.salt())
    with pytest.raises(EngineDeadError):
        host.run_until_idle()
    assert request.error


@pytest.mark.parametrize("version", [V1_2_1, V1_3_0RC28])
@pytest.mark.parametrize("where", ["scheduled", "_load", "output", "_blocks", "next_iteration"])
def test_a_promise_that_could_not_be_ordered_is_an_error(pair, monkeypatch, version, where):
    host = ready(pair, version)
    scheduler = host.manager.scheduler
    if where == "_blocks":
        module = __import__(MODULE, fromlist=["_blocks"])
        monkeypatch.setattr(module, where, failing(module._blocks, 1))
    elif where == "output":
        build = scheduler.build_connector_meta
        outputs = [object()]
        scheduler.build_connector_meta = lambda found: build(outputs.pop() if outputs else found)
    else:
        monkeypatch.setattr(scheduler.planner, where, failing(getattr(scheduler.planner, where), 1))
    request = ask(pair, host)
    assert "could not be loaded" in request.error
    assert request.external_tokens == 40
    again = ask(pair, host)
    assert again.error or again.tokens == pair.expected(PROMPT, again)
    assert_alive(pair, host)
    assert not scheduler.planner._requests
    assert not scheduler.planner._owners


INNER = {
    "offer": "scheduler.planner",
    "finished": "scheduler.planner",
    "scheduled": "scheduler.planner",
    "next_iteration": "scheduler.planner",
    "save": "transfer",
    "saved": "transfer",
}


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("overlap", [False, True])
def test_callbacks_that_raise_inside_keep_the_loop_alive(pair, name, overlap):
    host = ready(pair, overlap=overlap)
    transfer = host.manager.workers[0].transfer
    owner = transfer if INNER[name] == "transfer" else host.manager.scheduler.planner
    setattr(owner, name, failing(getattr(owner, name), 3))
    request = ask(pair, host, salt=None, count=12)
    assert request.tokens == own(PROMPT, request)
    assert sum(counters(host)[key] for key in counters(host) if key.startswith("error: "))
    assert_alive(pair, host)


def test_a_saver_that_raises(pair):
    pair.export()
    host = pair.serve("source")
    saver = host.manager.workers[0].transfer.saver
    saver.store.put = failing(saver.store.put, 2)
    run(host, [PROMPT], 3)
    saver.close()
    assert counters(host)["error: save"] == 2
    assert len(pair.entries) == 3
    assert saver._bytes == 0
    assert not saver._reading
    assert host.leaked_blocks() == 0
    pair.close(host)


@pytest.mark.parametrize("version", [V1_2_1, V1_3_0RC28], ids=["1.2.1", "1.3.0rc28"])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancellations(pair, version, steps):
    pair.export()
    pair.read([PROMPT], version=version)
    before = pair.entries
    host = pair.serve("target", version, chunked=True, max_num_tokens=16)
    prompt = PROMPT + prompts(60, seed=3)[0]
    request = host.submit(prompt, 20, cache_salt=pair.deployment.salt())
    plain = host.submit(prompts(50, seed=4)[0], 20)
    for _ in range(steps):
        host.step()
    host.cancel(request)
    host.cancel(plain)
    host.run_until_idle()
    assert (request.finish_reason, plain.finish_reason) == ("cancelled", "cancelled")
    assert host.leaked_blocks() == 0
    planner = host.manager.scheduler.planner
    assert not planner._requests
    for _ in range(3):
        assert_alive(pair, host)
    assert planner.stage.held_bytes == 0
    if version.stores_unfilled:
        return  # the engine itself reuses blocks that it never filled
    again = ask(pair, host, prompt)
    assert again.tokens == pair.expected(prompt, again, mapped=40)
    assert pair.entries >= before


@pytest.mark.parametrize("version", [V1_2_1, V1_3_0RC12])
def test_adapters_and_media_are_unsupported(pair, version):
    host = ready(pair, version)
    before = pair.entries
    salt = pair.deployment.salt()
    (adapted,) = run(host, [PROMPT], 3, salt, lora_task_id=7)
    media = host.submit(PROMPT, 3, cache_salt=salt)
    media.multimodal_hashes = [[1, 2]]
    host.run_until_idle()
    assert [line["state"] for line in pair.said] == ["unsupported"] * 2
    assert [line["reason"] for line in pair.said] == ["LoRA", "multimodal"]
    assert adapted.external_tokens == media.external_tokens == 0
    assert pair.entries == before


def test_get_finished_gives_back_what_it_was_given_and_once(pair):
    host = ready(pair)
    worker = host.manager.workers[0]
    saver = worker.transfer.saver
    saver._reading["busy"] = saver._reading[7] = 1
    assert worker.get_finished([7, 8], []) == ([8], [])
    assert worker.get_finished([], []) == ([], [])
    saver._reading.clear()
    assert worker.get_finished([], [9]) == ([7], [])
    assert worker.get_finished([], []) == ([], [])


def test_a_pool_that_is_registered_again(pair):
    host = ready(pair)
    worker = host.manager.workers[0]
    first, threads = worker.transfer, threading.active_count()
    host.manager.register(host.engine)
    assert worker.transfer is not first
    assert not first.saver._thread.is_alive()
    assert threading.active_count() == threads
    request = ask(pair, host)
    assert request.tokens == pair.expected(PROMPT, request)


def test_nothing_is_left_behind(pair):
    pair.export()
    counts = []
    for _ in range(3):
        pair.read([PROMPT])
        host = pair.serve("target")
        ask(pair, host)
        for _ in range(3):
            assert_alive(pair, host)
        assert host.manager.scheduler.planner.stage.held_bytes == 0
        pair.close(host)
        left = [path.name for path in (pair.path / "stage").iterdir()]
        assert left == ["lock"]
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert counts[1] == counts[2]
