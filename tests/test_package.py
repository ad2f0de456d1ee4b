"""A package on disk: what was saved is what is loaded, or nothing is."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mapping import random_mapper
from regression import spec

from kvhub import KVMapper
from kvhub.errors import ConflictError, NotFoundError, UsageError, VerificationError
from kvhub.package import read_config, save, verify
from kvhub.store import find_mapper, mapper_names, mapper_path


@pytest.fixture
def mapper():
    return random_mapper(spec(3, name="org/small"), spec(4, name="org/large"))


@pytest.fixture
def package(mapper, tmp_path):
    mapper.save_pretrained(tmp_path / "small-to-large")
    return tmp_path / "small-to-large"


def assert_same(found, expected):
    assert found.config == expected.config
    for (name, a), (other, b) in zip(
        found.tensors().items(), expected.tensors().items(), strict=True
    ):
        assert name == other
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_mapper_is_loaded_as_it_was_saved(mapper, tmp_path, dtype):
    mapper = mapper.to(dtype=dtype)
    mapper.save_pretrained(tmp_path / "m")
    assert_same(KVMapper.from_pretrained(tmp_path / "m"), mapper)
    wide = KVMapper.from_pretrained(tmp_path / "m", dtype=torch.float64)
    assert wide.key_weight.dtype == torch.float64


def test_the_files_are_those_of_the_interface(package):
    assert {path.name for path in package.iterdir()} == {
        "config.json",
        "manifest.json",
        "model.safetensors",
        "README.md",
    }
    config = json.loads((package / "config.json").read_text())
    assert config["schema_version"] == 1
    assert config["kvhub_version"]
    assert config["dtype"] == "float32"
    assert config["source"]["rope"]["inv_freq"]
    umask = os.umask(0)
    os.umask(umask)
    assert (package / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
    manifest = json.loads((package / "manifest.json").read_text())
    assert set(manifest["files"]) == {"config.json", "model.safetensors", "README.md"}


def test_large_tensors_are_sharded_and_put_together_again(mapper, tmp_path):
    save(mapper, tmp_path / "m", max_shard_size="2KB")
    shards = list((tmp_path / "m").glob("model-*.safetensors"))
    assert len(shards) > 2
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert_same(KVMapper.from_pretrained(tmp_path / "m"), mapper)
    shards[0].unlink()
    with pytest.raises(VerificationError, match="missing"):
        KVMapper.from_pretrained(tmp_path / "m")


def rehash(package):
    """Make the manifest agree again, so that the checks behind it are reached."""
    from kvhub.package import Manifest

    Manifest.of(package).write(package)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md"])
def test_every_damaged_byte_is_noticed(package, name):
    path = package / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(VerificationError, match="truncated or edited"):
        KVMapper.from_pretrained(package)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(VerificationError, match="sha256"):
        KVMapper.from_pretrained(package)
    path.unlink()
    with pytest.raises((VerificationError, NotFoundError)):
        KVMapper.from_pretrained(package)


def test_extra_files_are_refused_but_not_those_of_git(package):
    (package / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    verify(package)
    (package / "extra.py").write_text("print('hello')\n")
    with pytest.raises(VerificationError, match=r"extra \['extra.py'\]"):
        verify(package)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"files": {"../../etc/passwd": {}}}'])
def test_a_broken_manifest_is_refused(package, text):
    (package / "manifest.json").write_text(text)
    with pytest.raises(VerificationError):
        verify(package)


def edit_config(package, **changes):
    path = package / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    rehash(package)


def test_a_config_that_does_not_fit_the_tensors_is_refused(package):
    edit_config(package, dtype="float16")
    with pytest.raises(VerificationError, match="should be"):
        KVMapper.from_pretrained(package)
    edit_config(package, dtype="int64")
    with pytest.raises(VerificationError, match="floating dtype"):
        KVMapper.from_pretrained(package)
    edit_config(package, dtype="float32", colour="blue")
    with pytest.raises(VerificationError, match="unknown keys"):
        KVMapper.from_pretrained(package)


def test_tensors_that_are_not_finite_are_neither_saved_nor_loaded(mapper, package, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(package / "model.safetensors")
    tensors["key_weight.1"][0, 0, 0] = float("nan")
    save_file(tensors, package / "model.safetensors")
    rehash(package)
    with pytest.raises(VerificationError, match=r"key_weight.1 is not finite"):
        KVMapper.from_pretrained(package)
    mapper.value_bias[0] = float("inf")
    with pytest.raises(VerificationError, match="value_bias"):
        mapper.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_nothing_is_overwritten_unless_asked(mapper, package):
    before = (package / "model.safetensors").read_bytes()
    mapper.key_weight += 1
    with pytest.raises(ConflictError, match="exists already"):
        mapper.save_pretrained(package)
    assert (package / "model.safetensors").read_bytes() == before
    mapper.save_pretrained(package, overwrite=True)
    assert_same(KVMapper.from_pretrained(package), mapper)
    assert [path.name for path in package.parent.iterdir()] == [package.name]


def test_a_failed_save_leaves_what_was_there(mapper, package, monkeypatch):
    before = KVMapper.from_pretrained(package)

    def fail(*args, **options):
        raise OSError("disk full")

    monkeypatch.setattr("kvhub.package.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        mapper.save_pretrained(package, overwrite=True)
    with pytest.raises(OSError, match="disk full"):
        mapper.save_pretrained(package.parent / "new")
    monkeypatch.undo()
    assert_same(KVMapper.from_pretrained(package), before)
    assert [path.name for path in package.parent.iterdir()] == [package.name]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from mapping import random_mapper
from regression import spec
import kvhub.atomic

point = {point!r}
if point == "writing":
    kvhub.atomic._finish = lambda directory: os.kill(os.getpid(), signal.SIGKILL)
else:
    # Between the two renames: the old package is moved away, the new one not yet in its place.
    rename, calls = Path.rename, []
    def killed(self, target):
        calls.append(target)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)
    Path.rename = killed
mapper = random_mapper(spec(3, name="org/small"), spec(4, name="org/large"), seed=5)
mapper.save_pretrained({path!r}, overwrite=True)
"""


@pytest.mark.parametrize("point", ["writing", "renaming"])
def test_a_save_that_is_killed_loses_nothing(mapper, point):
    path = mapper_path("m")
    mapper.save_pretrained(path)
    code = KILLED.format(tests=str(Path(__file__).parent), point=point, path=str(path))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert mapper_names() in (["m"], [])
    assert_same(KVMapper.from_pretrained("m"), mapper)
    mapper.save_pretrained(path, overwrite=True)  # and the next save works


def test_mappers_are_found_by_name_and_by_path(mapper, package, monkeypatch):
    mapper.save_pretrained(mapper_path("tiny"))
    assert mapper_names() == ["tiny"]
    assert find_mapper("tiny") == mapper_path("tiny")
    assert find_mapper(str(package)) == package
    with pytest.raises(NotFoundError, match="it has: tiny"):
        find_mapper("huge")
    for name in ("../escape", "", ".hidden", "a/b"):
        with pytest.raises(UsageError, match="cannot be a mapper's name"):
            mapper_path(name)


def test_a_folder_that_is_no_package_is_told_apart(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(NotFoundError, match=r"it has no config.json"):
        KVMapper.from_pretrained(tmp_path / "folder")


def test_the_config_can_be_read_without_the_tensors(package, mapper):
    (package / "model.safetensors").unlink()
    assert read_config(package)[0] == mapper.config


def test_the_card_says_what_the_config_says(package):
    card = (package / "README.md").read_text()
    assert card.startswith("---\n")
    assert 'KVMapper.from_pretrained("small-to-large")' in card
    assert "| KV heads | 2 | 2 |" in card
    assert "| model | org/small | org/large |" in card.replace("`", "")
