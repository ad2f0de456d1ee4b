"""Directories and files appear whole or not at all, whenever the process is killed."""

import os
import subprocess
import sys
import textwrap

import pytest

from kvhub.atomic import new_directory, recover, write_text
from kvhub.errors import ConflictError

# Replaces `path` and dies, as by kill -9, just before or after the N-th step that touches the disk.
KILLED = """
import os, pathlib, shutil, sys, tempfile
from kvhub.atomic import new_directory

path, last, after = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "after"
steps = 0

def dying(function):
    def step(*args, **kwargs):
        global steps
        steps += 1
        if steps == last and not after:
            os._exit(9)
        result = function(*args, **kwargs)
        if steps == last:
            os._exit(9)
        return result
    return step

tempfile.mkdtemp = dying(tempfile.mkdtemp)
pathlib.Path.rename = dying(pathlib.Path.rename)
pathlib.Path.chmod = dying(pathlib.Path.chmod)
os.fsync = dying(os.fsync)
shutil.rmtree = dying(shutil.rmtree)
with new_directory(path, overwrite=True) as directory:
    (directory / "a").write_text("new")
    (directory / "b").write_text("new")
"""


def contents(path):
    return {file.name: file.read_text() for file in path.iterdir()}


def make(path, text, **options):
    with new_directory(path, **options) as directory:
        (directory / "a").write_text(text)
        (directory / "b").write_text(text)


def killed(path, step, when):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path), str(step), when]
    return subprocess.run(command, check=False).returncode == 9


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_killed_at_any_step_leaves_the_old_or_the_new_directory(tmp_path, when):
    path = tmp_path / "mapper"
    make(path, "old")
    outcomes, step = set(), 1
    while killed(path, step, when):
        recover(path)
        found = contents(path)
        assert found in ({"a": "old", "b": "old"}, {"a": "new", "b": "new"})
        assert [left.name for left in tmp_path.iterdir()] == ["mapper"]
        outcomes.add(found["a"])
        make(path, "old", overwrite=True)
        step += 1
    assert step > 8
    assert outcomes == {"old", "new"}
    assert contents(path) == {"a": "new", "b": "new"}


def test_what_a_living_process_is_building_stays(tmp_path):
    path = tmp_path / "mapper"
    with new_directory(path) as directory:
        recover(path)
        (directory / "a").write_text("whole")
    assert contents(path) == {"a": "whole"}
    foreign = tmp_path / f".mapper.building-{os.getppid()}-x"
    foreign.mkdir()
    recover(path)
    assert foreign.is_dir()


def test_nothing_is_replaced_unasked_and_nothing_half_made_stays(tmp_path):
    path = tmp_path / "mapper"
    make(path, "old")
    with pytest.raises(ConflictError):
        make(path, "new")
    with pytest.raises(TypeError):
        make(path, None, overwrite=True)
    assert contents(path) == {"a": "old", "b": "old"}
    assert [left.name for left in tmp_path.iterdir()] == ["mapper"]


def test_a_text_is_replaced_as_a_whole(tmp_path):
    file = tmp_path / "text"
    write_text(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "new\ud800")
    assert file.read_text() == "old"
    assert [left.name for left in tmp_path.iterdir()] == ["text"]


def test_an_unfinished_file_of_a_killed_process_goes(tmp_path):
    file = tmp_path / "text"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f".text.building-{gone.pid}-x").write_text("half")
    write_text(file, "whole")
    assert [left.name for left in tmp_path.iterdir()] == ["text"]
