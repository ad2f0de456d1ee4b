"""What is staged is whole, checked, bounded and its own; what is not comes back as a miss."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from kvhub.exporters.entry import encode
from kvhub.exporters.staging import Part, Stage, open_entry
from kvhub.exporters.status import Status
from kvhub.exporters.store import StoreError
from kvhub.exporters.store_files import FileStore

from kvhub.errors import UsageError, VerificationError

SHAPE = (2, 2, 1, 4, 8)
PART = ("float32", SHAPE)


def key(number, head=0):
    return f"{number:032x}-{head}-{head + 1}"


def part(number, head=0, dtype="float32", shape=SHAPE):
    return Part(key(number, head), dtype, shape)


@pytest.fixture
def staged(tmp_path):
    """A store with entries 0 to 9 of two heads, and a stage over it."""
    store = FileStore(2**24, tmp_path / "store")
    for number in range(10):
        for head in range(2):
            states = torch.full(SHAPE, number + head / 2)
            store.put(key(number, head), encode(states, key(number, head), (head, head + 1)))
    stage = Stage(store, str(tmp_path / "stage"), 2**20, Status())
    yield stage
    stage.close()


def soon(seconds=30):
    return time.monotonic() + seconds


def file_of(stage, number, head=0):
    return stage.store.path / f"{key(number, head)}.kvhub"


def test_chunks_come_in_the_first_version_that_is_whole(staged):
    chunks = [
        [[part(0)], [part(1)]],
        [[part(77)], [part(2), part(2, 1)]],
        [[part(3), part(78)], [part(4)]],
    ]
    found = staged.take("one", chunks, soon())
    assert [version for version, _ in found] == [0, 1, 1]
    files = [files for _, files in found]
    assert [len(names) for names in files] == [1, 2, 1]
    assert open_entry(files[1][1], key(2, 1)).unique().tolist() == [2.5]
    assert all(os.stat(name).st_mode & 0o077 == 0 for names in files for name in names)


def test_it_ends_before_the_first_chunk_that_is_missing(staged):
    chunks = [[[part(number)]] for number in (0, 1, 99, 3)]
    assert len(staged.take("one", chunks, soon())) == 2
    assert staged.status.counters["miss: absent"] == 1
    many = [[[part(number % 10)]] for number in range(100)]
    assert len(staged.take("two", many, soon())) == 100


def test_what_is_staged_outlives_the_store(staged):
    ((_, (file,)),) = staged.take("one", [[[part(5)]]], soon())
    staged.store.remove(key(5))
    staged.store.close()
    assert open_entry(file, key(5)).unique().tolist() == [5]
    staged.release("one")
    assert not os.path.exists(file)
    assert staged.held_bytes == 0
    assert staged.take("two", [[[part(6)]]], soon()) == []
    assert staged.status.counters["error: miss: store"] == 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "other", "shape", "dtype", "empty"])
def test_a_damaged_entry_is_removed(staged, damage):
    file, wanted = file_of(staged, 1), part(1)
    content = bytearray(file.read_bytes())
    if damage == "cut":
        os.truncate(file, len(content) - 1)
    elif damage == "empty":
        os.truncate(file, 0)
    elif damage == "flipped":
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "other":
        file.write_bytes(file_of(staged, 2).read_bytes())
    elif damage == "shape":
        wanted = part(1, shape=(2, 2, 1, 8, 4))
    else:
        wanted = part(1, dtype="bfloat16")
    assert staged.take("one", [[[wanted]]], soon()) == []
    assert staged.status.counters["error: miss: damaged"] == 1
    assert not staged.store.contains(key(1))
    assert staged.held_bytes == 0
    assert os.listdir(staged.path) == ["owner"]


def test_it_is_bounded(staged, tmp_path):
    size = file_of(staged, 0).stat().st_size
    small = Stage(staged.store, str(tmp_path / "stage"), 3 * size, Status())
    chunks = [[[part(number)]] for number in range(5)]
    assert len(small.take("one", chunks, soon())) <= 3
    assert small.held_bytes == 3 * size
    assert small.status.counters["miss: staging is full"]
    assert small.take("two", chunks[:1], soon()) == []
    small.release("one")
    assert len(small.take("two", chunks[:3], soon())) == 3
    small.release("nobody")
    small.close()


def test_what_comes_late_is_a_miss_and_is_not_kept(staged):
    release, copy_to = threading.Event(), staged.store.copy_to
    staged.store.copy_to = lambda *args: (release.wait(30), copy_to(*args))[1]
    assert staged.take("one", [[[part(0)]], [[part(1)]]], soon(0.02)) == []
    assert staged.status.counters["miss: late"]
    staged.release("one")
    release.set()
    staged._threads.shutdown(wait=True)
    assert os.listdir(staged.path) == ["owner"]
    assert staged.held_bytes == 0


@pytest.mark.parametrize("error", [StoreError("gone"), OSError("gone"), RuntimeError("gone")])
def test_a_store_that_raises(staged, error):
    def copy_to(name, file):
        raise error

    staged.store.copy_to = copy_to
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError):
            staged.take("one", [[[part(0)]]], soon())
    else:
        assert staged.take("one", [[[part(0)]]], soon()) == []
    staged.release("one")
    assert staged.held_bytes == 0


def test_what_a_killed_process_left_is_removed_by_the_next(staged, tmp_path):
    root = tmp_path / "stage"
    code = (
        "import os, signal, sys, time\n"
        "from kvhub.exporters.staging import Part, Stage\n"
        "from kvhub.exporters.status import Status\n"
        "from kvhub.exporters.store_files import FileStore\n"
        "stage = Stage(FileStore(2**24, sys.argv[1]), sys.argv[2], 2**20, Status())\n"
        "part = Part(sys.argv[3], 'float32', (2, 2, 1, 4, 8))\n"
        "assert stage.take('one', [[[part]]], time.monotonic() + 30)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    store = str(staged.store.path)
    subprocess.run([sys.executable, "-c", code, store, str(root), key(0)], check=False)
    (root / "without-an-owner").mkdir()
    left = {path for path in root.iterdir() if path.is_dir()} - {staged.path}
    assert len(left) == 2
    other = Stage(staged.store, str(root), 2**20, Status())
    assert {path for path in root.iterdir() if path.is_dir()} == {staged.path, other.path}
    assert staged.take("one", [[[part(0)]]], soon())
    other.close()
    assert not other.path.exists()


def test_many_begin_at_once(staged, tmp_path):
    root, stages = str(tmp_path / "other"), []

    def begin():
        stages.append(Stage(staged.store, root, 2**20, Status()))

    threads = [threading.Thread(target=begin) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stages) == 12
    assert all(stage.take("one", [[[part(0)]]], soon()) for stage in stages)
    for stage in stages:
        stage.close()


def test_a_directory_that_others_can_write_to(staged, tmp_path):
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(UsageError, match="writable by no other"):
        Stage(staged.store, str(root), 2**20, Status())


def test_one_that_is_dropped_holds_nothing(staged, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    stage = Stage(staged.store, str(tmp_path / "dropped"), 2**20, Status())
    del stage
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_entry_is_opened_as_what_it_is(staged):
    ((_, (file,)),) = staged.take("one", [[[part(5)]]], soon())
    with pytest.raises(VerificationError):
        open_entry(file, key(6), checked=True)
    states = open_entry(file, key(5), checked=True)
    states.zero_()  # of a private map
    assert open_entry(file, key(5)).unique().tolist() == [5]
