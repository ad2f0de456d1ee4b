"""A directory of entries keeps to its capacity and never mixes bytes up, whoever is killed."""

import fcntl
import hashlib
import os
import random
import subprocess
import sys
import threading

import pytest
import torch
from kvhub.exporters import store_files
from kvhub.exporters.entry import decode, encode
from kvhub.exporters.store import StoreError, open_store
from kvhub.exporters.store_files import FileStore

from kvhub.errors import UsageError, VerificationError

SIZE = 10_000


def key(number):
    return f"{number:032x}"


def content(number, size=SIZE):
    return random.Random(number).randbytes(size)


def sizes(path):
    return [file.stat().st_size for file in path.glob("*.kvhub*")]


def parts(path):
    return [*path.glob("*.kvhub-part")]


def held(store, numbers):
    return [number for number in numbers if store.contains(key(number))]


@pytest.fixture
def store(tmp_path):
    return FileStore(5 * SIZE, tmp_path / "store")


def test_an_entry_comes_back_and_stays_as_it_is(store):
    first, second = content(1)[:100], memoryview(content(1)[100:])
    assert store.get(key(1)) is None
    assert not store.contains(key(1))
    assert store.put(key(1), [first, second])
    assert store.put(key(1), [b"another"])
    assert store.contains(key(1))
    assert store.get(key(1)) == content(1)
    store.remove(key(1))
    store.remove(key(1))
    assert store.get(key(1)) is None
    counted = {"puts": 1, "hits": 1, "misses": 2, "evicted": 0, "rejected": 0}
    assert store.stats() == {"bytes": 0, "files": 0, **counted}


def test_states_come_back(store):
    states = torch.randn(2, 2, 1, 8, 16).bfloat16()
    store.put(key(1), encode(states, key(1), (0, 1)))
    found = decode(store.get(key(1)), key(1))
    assert torch.equal(found, states)
    found.zero_()  # the caller's own memory
    assert torch.equal(decode(store.get(key(1)), key(1)), states)


def test_processes_and_users_see_what_they_should(store):
    assert FileStore(5 * SIZE, store.path).put(key(1), [content(1)])
    assert store.get(key(1)) == content(1)
    assert store.path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in store.path.iterdir()} == {0o600}


def test_shards_are_entries_of_their_own(store):
    for shard in ("", "-0-1", "-1-2"):
        assert store.put(key(1) + shard, [shard.encode()])
    assert [store.get(key(1) + shard) for shard in ("", "-0-1", "-1-2")] == [b"", b"-0-1", b"-1-2"]


def test_the_least_recently_used_go_first(store):
    for number in range(5):
        store.put(key(number), [content(number)])
        os.utime(store.path / f"{key(number)}.kvhub", (0, 1000 * number))
    store.get(key(0))
    store.put(key(1), [content(1)])
    store.contains(key(2))  # asking whether it is there is no use
    store.put(key(5), [content(5)])
    store.put(key(6), [content(6)])
    # Evicting makes room for a little more than asked for.
    assert held(store, range(7)) == [0, 1, 4, 5, 6]
    assert store.stats()["evicted"] == 2
    store.put(key(7), [content(7)])
    assert 4 not in held(store, range(8))
    assert sum(sizes(store.path)) == store.stats()["bytes"] == 4 * SIZE


def test_what_is_larger_than_the_store_is_not_kept_and_costs_nobody_his_entry(store):
    for number in range(5):
        assert store.put(key(number), [content(number)])
    assert not store.put(key(5), [bytes(5 * SIZE + 1)])
    assert held(store, range(6)) == [0, 1, 2, 3, 4]
    assert store.put(key(5), [bytes(5 * SIZE)])
    assert held(store, range(6)) == [5]
    assert store.stats()["rejected"] == 1


def test_the_number_of_files_is_bounded(tmp_path):
    store = FileStore(1 << 20, tmp_path / "store", max_entries=10)
    for number in range(35):
        assert store.put(key(number), [b"", b"x" * number])
        assert len(sizes(store.path)) <= 10
    assert store.get(key(34)) == b"x" * 34
    store.put(key(99), [])
    assert store.get(key(99)) == b""


def test_a_smaller_store_in_the_same_place_shrinks_it(store):
    for number in range(5):
        store.put(key(number), [content(number)])
    FileStore(2 * SIZE, store.path)
    assert sum(sizes(store.path)) <= 2 * SIZE


READER = """
import sys
from kvhub.exporters.store_files import FileStore
buffers = [FileStore(50_000, sys.argv[1]).get(key) for key in sys.argv[2:]]
print("mapped", flush=True)
sys.stdin.readline()
import hashlib
print(*(hashlib.sha256(buffer).hexdigest() for buffer in buffers))
"""


def test_an_evicted_entry_stays_readable_here_and_in_other_processes(store):
    for number in range(3):
        store.put(key(number), [content(number)])
    mapped = [store.get(key(number)) for number in range(3)]
    command = [sys.executable, "-c", READER, str(store.path), *map(key, range(3))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout.readline() == b"mapped\n"
        for number in range(10, 16):
            store.put(key(number), [content(number)])
        assert held(store, range(3)) == []
        store.close()
        found, _ = reader.communicate(b"\n", timeout=60)
    expected = [hashlib.sha256(content(number)).hexdigest() for number in range(3)]
    assert found.decode().split() == expected
    assert mapped == [content(number) for number in range(3)]


def test_buffers_cost_no_descriptors_and_no_memory_once_dropped(store):
    def used():
        with open("/proc/self/maps") as maps:
            mapped = sum(str(store.path) in line for line in maps)
        return len(os.listdir("/proc/self/fd")), mapped

    for number in range(5):
        store.put(key(number), [content(number)])
    before = used()
    buffers = [store.get(key(number % 6)) for number in range(1000)]
    assert used()[0] == before[0]
    views = [buffer[1:] for buffer in buffers if buffer]
    del buffers
    assert all(bytes(view[:9]) for view in views)
    del views
    assert used() == before
    for _ in range(100):
        store.put(key(7), [content(7)])
        store.remove(key(7))
    assert used() == before


def test_a_damaged_entry_is_found_when_it_is_decoded(store):
    states = torch.randn(2, 2, 1, 8, 16)
    store.put(key(1), encode(states, key(1), (0, 1)))
    path = store.path / f"{key(1)}.kvhub"
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1], whole[:-1] + b"\0\0", bytes(len(whole))):
        path.write_bytes(damaged)
        with pytest.raises(VerificationError):
            decode(store.get(key(1)), key(1))
    store.remove(key(1))
    assert store.put(key(1), encode(states, key(1), (0, 1)))
    assert torch.equal(decode(store.get(key(1)), key(1)), states)


@pytest.mark.parametrize("call", ["open", "write", "ftruncate", "rename"])
def test_a_full_disk_is_an_error_and_leaves_nothing(store, monkeypatch, call):
    real, left = getattr(os, call), [3]

    def failing(file, *args, **kwargs):
        if call == "write" and left[0]:  # fills up only after a part has been written
            left[0] -= 1
            return real(file, args[0][:1000])
        if call == "open" and not str(file).endswith("-part"):
            return real(file, *args, **kwargs)
        raise OSError(28, "No space left on device")

    store.put(key(0), [content(0)])
    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        for number in range(1, 20):
            left[0] = 3
            with pytest.raises(StoreError, match="No space left") as caught:
                store.put(key(number), [content(number)])
            assert caught.value.hint
    assert held(store, range(20)) == [0]
    assert store.put(key(1), [content(1)])
    assert store.get(key(1)) == content(1)
    assert parts(store.path) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_what_does_not_belong_to_the_store_is_not_touched(tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    foreign = ["notes.txt", "model.safetensors", f"{key(1)}.kvhub.bak", "A B.kvhub", ".x.kvhub"]
    foreign += ["x.kvhub-part", "kvhub", "model.kvhub", f"{'f' * 32}.kvhub-partial"]
    for name in foreign:
        (home / name).write_bytes(content(0))
        os.utime(home / name, (0, 0))
    folder, link = (home / f"{key(number)}.kvhub" for number in (77, 78))
    folder.mkdir()
    link.symlink_to(home / "notes.txt")
    before = {path: path.stat() for path in home.iterdir()}
    store = FileStore(2 * SIZE, home)
    for number in range(20):
        assert store.put(key(number), [content(number)])
    assert store.stats()["evicted"] >= 18
    for path, found in before.items():
        assert (path.stat().st_mtime, path.stat().st_size) == (found.st_mtime, found.st_size)
    assert link.is_symlink()
    assert home.stat().st_mode & 0o777 == 0o755
    with pytest.raises(StoreError):
        store.get(key(78))


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(UsageError, match="writable by no other"):
        FileStore(SIZE, tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_directory_that_was_cleared_away_is_made_again(store):
    for number in range(4):
        store.put(key(number), [content(number)])
    subprocess.run(["rm", "-r", store.path], check=True)
    assert store.get(key(1)) is None
    for number in range(9):
        assert store.put(key(number), [content(number)])
    assert sum(sizes(store.path)) <= 5 * SIZE
    assert store.path.stat().st_mode & 0o777 == 0o700


def test_a_place_that_cannot_be_a_directory_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="failed when opened"):
        FileStore(SIZE, tmp_path / "file")


def test_a_stopped_process_with_the_lock_stops_nobody_else(store, monkeypatch):
    monkeypatch.setattr(store_files, "LOCK_SECONDS", 0.05)
    store.put(key(1), [content(1)])
    with open(store.path / "kvhub.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for action in (lambda: store.put(key(2), [b"x"]), lambda: store.remove(key(1))):
            with pytest.raises(StoreError, match="locked"):
                action()
        assert store.get(key(1)) == content(1)
    assert store.put(key(2), [b"x"])


def test_a_damaged_count_is_counted_again(store):
    for number in range(3):
        store.put(key(number), [content(number)])
    for damage in (b"", b"\xff" * 16, b"\0" * 5):
        (store.path / "kvhub.lock").write_bytes(damage)
        for number in range(3, 8):
            assert store.put(key(number), [content(number)])
        assert sum(sizes(store.path)) <= 5 * SIZE


def test_threads_share_a_store(store):
    wrong = []

    def work(seed):
        choose = random.Random(seed)
        for _ in range(150):
            number = choose.randrange(12)
            if choose.random() < 0.5:
                store.put(key(number), [content(number)])
            elif choose.random() < 0.1:
                store.remove(key(number))
            else:
                found = store.get(key(number))
                if found is not None and found != content(number):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert parts(store.path) == []
    assert sum(sizes(store.path)) == store.stats()["bytes"] <= 5 * SIZE


def test_a_living_writers_file_stays(store, monkeypatch):
    real = os.write

    def write(file, data):
        other = FileStore(5 * SIZE, store.path)  # cleans up, as do evictions
        assert len(parts(store.path)) == 1
        assert other.stats()["bytes"] == SIZE  # counted whole before it is written
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    assert store.put(key(1), [content(1)])
    assert store.get(key(1)) == content(1)


def test_the_first_of_two_writers_of_a_key_wins(store, monkeypatch):
    real = os.write

    def write(file, data):
        monkeypatch.setattr(os, "write", real)
        assert FileStore(5 * SIZE, store.path).put(key(1), [content(1)])
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    assert store.put(key(1), [content(2)])
    assert store.get(key(1)) == content(1)
    assert sizes(store.path) == [SIZE]
    assert store.stats()["bytes"] == SIZE


@pytest.mark.parametrize(
    "name",
    ["", "..", "a/b", "A" * 32, "a" * 31, "a" * 33, key(1) + "\n", key(1) + "-1", key(1) + ".."],
)
def test_keys_that_could_name_other_files_are_refused(store, name):
    for action in (store.get, store.contains, store.remove, lambda key: store.put(key, [b"x"])):
        with pytest.raises(UsageError, match="Keys match"):
            action(name)


def test_a_closed_store_fails(store):
    store.put(key(1), [b"x"])
    store.close()
    store.close()
    for action in (store.get, store.contains, store.remove, lambda key: store.put(key, [b"x"])):
        with pytest.raises(StoreError, match="closed"):
            action(key(1))
    assert FileStore(SIZE, store.path).get(key(1)) == b"x"


def test_a_store_is_opened_from_a_configuration(tmp_path):
    config = {"kind": "files", "path": str(tmp_path / "store"), "capacity_bytes": SIZE}
    with pytest.raises(UsageError, match="positive"):
        open_store({**config, "capacity_bytes": 0})
    with pytest.raises(UsageError, match="positive"):
        open_store({**config, "max_entries": "many"})
    with pytest.raises(UsageError, match=r"capacity_bytes, path, max_entries.*'size'"):
        open_store({**config, "size": 1})
    with pytest.raises(UsageError, match=r"missing .*'capacity_bytes'"):
        open_store({"kind": "files"})
    for kind in ("redis", None, []):
        with pytest.raises(UsageError, match="expected one of: files, mooncake"):
            open_store({**config, "kind": kind})
    store = open_store(config)
    assert store.put(key(1), [b"x"])
    assert [*config] == ["kind", "path", "capacity_bytes"]
