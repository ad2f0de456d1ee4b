"""Writers that are killed leave whole entries, no others, and a count that holds."""

import random
import subprocess
import sys
import textwrap
import time

from kvhub.exporters.store_files import FileStore

# Puts six entries into a store of three, dying, as by kill -9, just before or after the N-th call
# that touches the disk; and says of each N what it left. Forked, for a start takes a while.
KILLED = """
import itertools, os, pathlib, random, struct, sys
from kvhub.exporters.store_files import FileStore

SIZE, CALLS = 10_000, ("open", "write", "ftruncate", "rename", "unlink", "pwrite", "close")
path = pathlib.Path(sys.argv[1])
real = {name: getattr(os, name) for name in CALLS}
key, content = "{:032x}".format, lambda number: random.Random(number).randbytes(SIZE)

def die_at(last, after):
    steps = itertools.count(1)
    def dying(function):
        def step(*args, **kwargs):
            number = next(steps)
            if number == last and not after:
                os._exit(9)
            result = function(*args, **kwargs)
            if number == last:
                os._exit(9)
            return result
        return step
    for name in CALLS:
        setattr(os, name, dying(real[name]))

def work(base):
    store = FileStore(3 * SIZE, path)
    for number in range(base, base + 6):
        store.put(key(number), [content(number)])
    store.remove(key(number))
    os._exit(0)

for last in itertools.count(1):
    codes = set()
    for after in (False, True):
        process = os.fork()
        if not process:
            die_at(last, after)
            work(10 * last)
        codes.add(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        left = {file.name: file.read_bytes() for file in path.glob("*.kvhub*")}
        assert sum(map(len, left.values())) <= 3 * SIZE, (last, after, [*left])
        for name, data in left.items():
            if name.endswith(".kvhub"):
                assert data == content(int(name[:32], 16)), (last, after, name)
        count = (path / "kvhub.lock").read_bytes() if left else b""
        if count:  # an upper bound at any time
            used, files = struct.unpack("<QQ", count)
            assert used >= sum(map(len, left.values())) and files >= len(left), (last, after)
        store = FileStore(3 * SIZE, path)
        entries = [file.stat().st_size for file in path.glob("*.kvhub")]
        assert not [*path.glob("*.kvhub-part")], (last, after)
        assert (store.stats()["bytes"], store.stats()["files"]) == (sum(entries), len(entries))
        assert store.put(key(last), [content(last)]) and store.get(key(last)) == content(last)
        store.remove(key(last))
    assert codes <= {0, 9}, codes
    if codes == {0}:
        break
print(last)
"""


def test_a_process_killed_at_any_step_leaves_whole_entries_and_no_others(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "store")]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) > 60


WRITER = """
import random, sys
from kvhub.exporters.store_files import FileStore
store, choose = FileStore(100_000, sys.argv[1]), random.Random(int(sys.argv[2]))
contents = [random.Random(number).randbytes(20_000) for number in range(9)]
print("ready", flush=True)
while True:
    number = choose.randrange(9)
    store.put(f"{number:032x}", [contents[number]])
    found = store.get(f"{number:032x}")
    if found is not None and found != contents[number]:
        sys.exit("wrong bytes")
"""


def test_writers_of_the_same_keys_are_killed_at_random(tmp_path):
    path, choose = tmp_path / "store", random.Random(0)

    def start():
        command = [sys.executable, "-c", WRITER, str(path), str(choose.randrange(1000))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n", process.stderr.read()
        return process

    contents = [random.Random(number).randbytes(20_000) for number in range(9)]
    store, writers = FileStore(100_000, path), [start(), start()]
    try:
        for _ in range(6):
            time.sleep(choose.random() / 10)
            writers.append(start())
            with writers.pop(0) as writer:
                assert writer.poll() is None, writer.stderr.read()
                writer.kill()
            for number, expected in enumerate(contents):
                assert store.get(f"{number:032x}") in (None, expected)
                store.put(f"{number:032x}", [expected])
            assert store.stats()["bytes"] <= 100_000
    finally:
        for writer in writers:
            with writer:
                writer.kill()
    store = FileStore(100_000, path)
    assert [*path.glob("*.kvhub-part")] == []
    assert (
        sum(file.stat().st_size for file in path.glob("*.kvhub"))
        == store.stats()["bytes"]
        <= 100_000
    )
