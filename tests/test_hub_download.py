"""A package arrives whole and as its manifest says, or not at all, and needs no network twice."""

import errno
import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hub_mappers import LARGE, REPO, SMALL, asked, mapper_files, publish, say
from hub_server import Fault, HubServer, RandomFaults, connect_client, fast_retries
from huggingface_hub import HfApi, close_session, constants, snapshot_download
from mapping import random_mapper

from kvhub import hub_cache
from kvhub.errors import (
    AuthError,
    KVHubError,
    NetworkError,
    NotFoundError,
    VerificationError,
)
from kvhub.hub import Resolved, cached, download, pull, resolve
from kvhub.package import Manifest, load, verify
from kvhub.versions import parse_reference

TENSORS = "model.safetensors"
GET_TENSORS = f"GET .*/resolve/.*/{TENSORS}"
HEAD_TENSORS = f"HEAD .*/resolve/.*/{TENSORS}"


@pytest.fixture(scope="module", autouse=True)
def session():
    yield
    close_session()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with HubServer(tmp_path / "hub") as server:
        connect_client(monkeypatch, server, tmp_path / "cache")
        fast_retries(monkeypatch)
        yield server


@pytest.fixture
def offline(monkeypatch):
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path):
    """Where the cache keeps the repository."""
    return tmp_path / "cache" / f"models--{REPO.replace('/', '--')}"


def get(revision=None, progress=None):
    reference = parse_reference(f"{REPO}@{revision}" if revision else REPO)
    return pull(reference, progress)[1]


def failure(error, act, *arguments):
    with pytest.raises(KVHubError) as caught:
        act(*arguments)
    assert type(caught.value) is error
    return caught.value


def content(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def damage(path, at=-1):
    """Change a byte of the file that a link of the cache leads to."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.resolve().write_bytes(data)


def test_the_mapper_that_arrives_is_bit_equal(hub):
    publish(hub, "1.0.0", seed=3, **{"LICENSE": b"mine", "plots-of-mine/a.txt": b"x"})
    say(hub)
    path = get()
    assert content(path) == mapper_files(3)
    tensors = random_mapper(SMALL, LARGE, seed=3).tensors()
    for name, tensor in load(path).tensors().items():
        assert torch.equal(tensor, tensors[name])


def test_what_was_downloaded_needs_no_request(hub):
    publish(hub, "1.0.0")
    resolved = resolve(parse_reference(REPO))
    path = download(resolved)
    asked(hub)
    assert download(resolved) == path
    assert asked(hub) == []


def test_every_file_is_asked_for_at_the_commit(hub):
    commit = publish(hub, "1.0.0")
    hub.inject(Fault(GET_TENSORS, "call", call=lambda: publish(hub, "1.1.0", seed=1)))
    assert content(get()) == mapper_files()
    files = [line for line in asked(hub) if "/resolve/" in line and "status.json" not in line]
    assert len(files) > 3
    assert all(f"/resolve/{commit}/" in line for line in files)


def test_a_version_is_found_again_offline(hub, offline):
    publish(hub, "1.0.0")
    path = get("^1")
    branch = get("main")
    offline()
    for revision in (None, "1.0.0", "^1", "main", path.name):
        assert get(revision) == path == branch


def test_a_lost_file_is_fetched_again(hub):
    publish(hub, "1.0.0")
    path = get()
    (path / TENSORS).resolve().unlink()
    (path / "config.json").unlink()
    assert content(get()) == mapper_files()


@pytest.mark.parametrize("name", [TENSORS, "config.json", "README.md", "manifest.json"])
def test_a_file_damaged_in_the_cache_is_mended(hub, offline, name):
    publish(hub, "1.0.0")
    path = get()
    # In the middle, where a manifest is JSON all the same.
    damage(path / name, len(mapper_files()[name]) // 2)
    asked(hub)
    assert content(get()) == mapper_files()
    others = [line for line in asked(hub) if line.startswith("GET") and "/resolve/" in line]
    assert len([line for line in others if name not in line]) <= 2
    damage(path / name)
    offline()
    error = failure(VerificationError, get, "1.0.0")
    assert "Fetching it again did not work" in error.message
    assert f"kvhub pull {REPO}@1.0.0" in error.hint


def test_a_damaged_file_is_mended_for_every_commit_that_has_it(hub, offline):
    publish(hub, "1.0.0")
    publish(hub, "1.0.1", **{"NOTE": b"more"})
    first, second = get("1.0.0"), get("1.0.1")
    damage(first / TENSORS)
    get("1.0.0")
    offline()
    assert content(get("1.0.1")) == content(second) == mapper_files()


@pytest.mark.parametrize("name", [TENSORS, "config.json", "manifest.json"])
@pytest.mark.parametrize("times", [1, 99])
def test_what_arrives_corrupt_is_never_used(hub, name, times):
    publish(hub, "1.0.0")
    place = len(mapper_files()[name]) // 2
    hub.inject(Fault(f"GET .*/resolve/.*/{name}", "corrupt", times=times, bytes=place))
    if times == 1:
        assert content(get()) == mapper_files()
        return
    failure(VerificationError, get)
    hub.faults.clear()
    assert content(get()) == mapper_files()


def test_a_damaged_manifest_hides_no_other_damage(hub):
    publish(hub, "1.0.0")
    directory = get()
    damage(directory / TENSORS)
    # As if the damaged tensors were what the package has.
    Manifest.of(directory).write(directory / "..")
    written = directory.parent / "manifest.json"
    (directory / "manifest.json").resolve().write_bytes(written.read_bytes())
    damage(directory / "config.json")
    assert content(get()) == mapper_files()


def test_a_truncated_file_is_no_file(hub):
    publish(hub, "1.0.0")
    hub.inject(Fault(GET_TENSORS, "truncate", times=99, bytes=100))
    error = failure(NetworkError, get)
    assert TENSORS in error.message
    assert "has size 100" in error.message
    hub.faults.clear()
    assert content(get()) == mapper_files()


def test_an_interrupted_body_is_continued(hub):
    publish(hub, "1.0.0")
    hub.inject(Fault(GET_TENSORS, "drop_body", bytes=1000))
    hub.inject(Fault(GET_TENSORS, "slow", after=1, bytes=500, delay=0.001))
    assert content(get()) == mapper_files()


@pytest.mark.parametrize(
    ("match", "fault", "error", "text"),
    [
        (HEAD_TENSORS, {"status": 403, "code": "GatedRepo"}, AuthError, "gated"),
        (HEAD_TENSORS, {"status": 403}, AuthError, "not permitted"),
        (HEAD_TENSORS, {"status": 401}, AuthError, "401"),
        (HEAD_TENSORS, {"status": 429, "retry_after": 3}, NetworkError, "rate limit.*3 seconds"),
        (HEAD_TENSORS, {"status": 503}, NetworkError, "answered 503"),
        (GET_TENSORS, {"status": 500}, NetworkError, "answered 500"),
        (HEAD_TENSORS, {"kind": "drop"}, NetworkError, "connection"),
        ("HEAD .*manifest", {"status": 404, "code": "RevisionNotFound"}, NotFoundError, "revision"),
        (HEAD_TENSORS, {"status": 404, "code": "EntryNotFound"}, VerificationError, "lists model"),
    ],
)
def test_failures_name_their_cause_and_leave_nothing_half_used(hub, match, fault, error, text):
    publish(hub, "1.0.0")
    hub.inject(Fault(match, **{"kind": "status", "times": 99, **fault}))
    with pytest.raises(error, match=text) as caught:
        get()
    assert type(caught.value) is error
    assert REPO in caught.value.message
    assert cached() == []
    hub.faults.clear()
    assert content(get()) == mapper_files()


def test_a_part_of_a_package_is_refused_with_the_way_to_mend_it(hub, offline):
    commit = publish(hub, "1.0.0")
    for name in ("manifest.json", "config.json"):
        HfApi().hf_hub_download(REPO, name, revision="v1.0.0")
    offline()
    for revision in ("1.0.0", commit):
        error = failure(NetworkError, get, revision)
        lacking = len(mapper_files()) - 2
        assert f"lacks {lacking} of the {lacking + 1} files" in error.message
        assert f"kvhub pull {REPO}@1.0.0" in error.hint
    # Neither is it a version that a range would mean.
    assert "nothing of" in failure(NetworkError, get, "^1").message


def test_what_other_programs_downloaded_is_used(hub, offline):
    publish(hub, "1.0.0", **{"LICENSE": b"mine", "own/notes.txt": b"x"})
    path = Path(snapshot_download(REPO, revision="v1.0.0"))
    assert (path / "LICENSE").is_file()
    offline()
    assert get("1.0.0") == path
    verify(path)
    assert not (path / "LICENSE").exists()


def test_a_moved_version_is_refused_whoever_says_so(hub):
    publish(hub, "1.0.0")
    get()
    second = publish(hub, seed=1)
    with pytest.raises(VerificationError, match="was moved"):
        download(Resolved(REPO, None, "1.0.0", second, None))


def test_a_repository_that_is_no_mapper_is_told_so(hub):
    hub.create_repo(REPO)
    hub.commit(REPO, {"config.json": b"{}"})
    error = failure(NotFoundError, get, "main")
    assert "no mapper" in error.message


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside"])
def test_a_manifest_reaches_no_other_folder(hub, tmp_path, name):
    manifest = json.loads(mapper_files()["manifest.json"])
    manifest["files"][name] = {"sha256": "0" * 64, "size": 1}
    publish(hub, "1.0.0", **{"manifest.json": json.dumps(manifest).encode()})
    failure(VerificationError, get)
    assert not list(tmp_path.rglob("outside"))


def test_a_signature_comes_with_the_package(hub, offline):
    publish(hub, "1.0.0", **{"kvhub.sig": b'{"signed": true}'})
    hub.inject(Fault("GET .*kvhub.sig", "corrupt", bytes=5))
    path = get()
    assert (path / "kvhub.sig").read_bytes() == b'{"signed": true}'
    offline()
    assert get() == path


def test_a_signature_is_not_lost_to_a_failure(hub):
    publish(hub, "1.0.0", **{"kvhub.sig": b"{}"})
    hub.inject(Fault("HEAD .*kvhub.sig", "status", times=99, status=503))
    assert "kvhub.sig" in failure(NetworkError, get).message
    hub.faults.clear()
    assert (get() / "kvhub.sig").is_file()


def test_progress_reaches_the_end_in_small_steps(hub, monkeypatch):
    publish(hub, "1.0.0")
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    seen = []
    path = get(progress=lambda done, total: seen.append((done, total)))
    total = sum(len(data) for name, data in mapper_files().items() if name != "manifest.json")
    assert {each for _, each in seen} == {total}
    done = [each for each, _ in seen]
    assert done[-1] == total
    assert all(0 <= after - before <= 500 for before, after in pairwise([0, *done]))
    (path / "config.json").unlink()
    seen.clear()
    get(progress=lambda done, total: seen.append((done, total)))
    assert seen[0][0] >= total - len(mapper_files()["config.json"])
    assert seen[-1] == (total, total)


def test_the_cache_lists_whole_mappers_alone(hub, folder):
    first, second = publish(hub, "1.0.0"), publish(hub, "1.10.0", 1)
    last = publish(hub, seed=2)
    hub.create_repo("org/model")
    hub.commit("org/model", {"config.json": b"{}", "manifest.json": b'{"files": {}}'})
    snapshot_download("org/model")
    paths = {revision: get(revision) for revision in ("1.10.0", "1.0.0", "main", first)}
    partial = publish(hub, "1.11.0", seed=3)
    HfApi().hf_hub_download(REPO, "manifest.json", revision=partial)
    found = cached()
    assert [(each["commit"], each["version"], each["revisions"]) for each in found] == [
        (last, None, ["main"]),
        (first, "1.0.0", ["v1.0.0"]),
        (second, "1.10.0", ["v1.10.0"]),
    ]
    assert [Path(each["path"]) for each in found] == [
        paths[revision] for revision in ("main", "1.0.0", "1.10.0")
    ]
    size = sum(map(len, mapper_files().values()))
    assert found[1]["size_bytes"] == size
    assert {each["repo_id"] for each in found} == {REPO}
    json.dumps(found)


def test_a_cache_that_may_only_be_read_is_used(hub, folder, monkeypatch):
    def refuse(path, text):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(hub_cache, "write_text", refuse)
    commit = publish(hub, "1.0.0")
    assert get().name == commit
    assert not list(folder.glob("refs/*"))


def test_where_there_are_no_links_files_are_mended_too(hub, folder):
    publish(hub, "1.0.0")
    path = get()
    for file in list(path.iterdir()):
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data)
    shutil.rmtree(folder / "blobs")
    damage(path / TENSORS)
    assert content(get()) == mapper_files()


def test_whatever_goes_wrong_no_other_content_is_used(hub, tmp_path, monkeypatch):
    commits = {text: publish(hub, text, seed) for seed, text in enumerate(("1.0.0", "1.1.0"))}
    kinds = ("status", "drop", "reset_after", "drop_body", "truncate", "corrupt", "slow")
    faults = hub.inject(RandomFaults(seed=7, rate=0.2, kinds=kinds))
    failures = []
    for attempt in range(40):
        if attempt % 5 == 0:
            monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / f"cache-{attempt}"))
        version, seed = (("1.0.0", 0), ("1.1.0", 1))[attempt % 2]
        try:
            path = get(version)
        except KVHubError as error:
            failures.append(error)
        else:
            assert path.name == commits[version]
            assert content(path) == mapper_files(seed)
    assert faults.hits > 40
    assert 5 < len(failures) < 35
    assert all(REPO in error.message and error.hint for error in failures)
