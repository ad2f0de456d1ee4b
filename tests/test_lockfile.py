"""What is locked is what is loaded, byte by byte, or nothing is."""

import json
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from hub_server import CLIENT_WARNING, Fault, HubServer, connect_client, fast_retries
from huggingface_hub import close_session, constants
from mapping import random_mapper
from regression import spec

import kvhub.lockfile
from kvhub.errors import (
    ConflictError,
    NetworkError,
    NotFoundError,
    UsageError,
    VerificationError,
)
from kvhub.hub import pull, resolve
from kvhub.lockfile import load_locked, lock, sync
from kvhub.package import Manifest, load
from kvhub.versions import parse_reference

pytestmark = pytest.mark.filterwarnings(CLIENT_WARNING)

REPO, OTHER = "org/mapper", "org/another"
SMALL, LARGE = spec(2, name="org/small"), spec(2, name="org/large")


class Published(SimpleNamespace):
    """A version on the test Hub: its mapper, files and commit."""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with HubServer(tmp_path / "hub") as server:
        connect_client(monkeypatch, server, tmp_path / "cache")
        fast_retries(monkeypatch)
        yield server
        close_session()


@pytest.fixture
def publish(hub, tmp_path):
    def publish(version, seed=0, repo=REPO):
        mapper = random_mapper(SMALL, LARGE, seed=seed)
        folder = tmp_path / "packages" / repo / version
        mapper.save_pretrained(folder, overwrite=True)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        if repo not in hub.store.repos:
            hub.create_repo(repo)
        commit = hub.commit(repo, files)
        hub.move_tag(repo, f"v{version}", commit)
        digest = Manifest.of(folder).digest
        return Published(mapper=mapper, files=files, commit=commit, digest=digest)

    return publish


@pytest.fixture
def path(tmp_path):
    (tmp_path / "project").mkdir()
    return tmp_path / "project" / "kvhub.lock"


@pytest.fixture
def other_machine(monkeypatch, tmp_path):
    """Start with an empty cache."""

    def move():
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "other-cache"))

    return move


def yank(hub, version, reason="wrong tokenizer", repo=REPO):
    status = {"schema_version": 1, "yanked": {version: reason}}
    status |= {"new_version": None, "deprecated": None}
    hub.commit(repo, {"status.json": json.dumps(status).encode()})


def entries(path):
    return json.loads(path.read_text())["mappers"]


def edit(path, repo=REPO, **changes):
    data = json.loads(path.read_text())
    data["mappers"][repo] |= changes
    path.write_text(json.dumps(data))


def assert_is(package, published):
    """Bit-equal: the files, and what is loaded from them."""
    for name, content in published.files.items():
        assert (package / name).read_bytes() == content
    tensors = load(package).tensors()
    for name, tensor in published.mapper.tensors().items():
        assert torch.equal(tensors[name], tensor)


def test_a_lock_says_what_it_locked(publish, path):
    first = publish("1.0.0")
    entry = {
        "requested": "^1.0",
        "version": "1.0.0",
        "commit": first.commit,
        "digest": first.digest,
        "source": {"id": "org/small", "revision": None},
        "target": {"id": "org/large", "revision": None},
    }
    assert lock([f"{REPO}@^1.0"], path) == {REPO: entry}
    content = {"schema_version": 1, "mappers": {REPO: entry}}
    assert path.read_text() == json.dumps(content, indent=2) + "\n"


def test_a_lock_gives_the_same_bytes_online_offline_and_elsewhere(
    publish, hub, path, other_machine
):
    first = publish("1.0.0")
    lock([REPO], path)
    publish("1.1.0", seed=1)
    assert_is(load_locked(REPO, path), first)
    other_machine()
    (synced,) = sync(path, frozen=True)
    assert_is(synced.path, first)
    hub.close()
    before = path.read_bytes()
    assert_is(load_locked(REPO, path), first)
    (again,) = sync(path, frozen=True)
    assert (again.path, again.changed) == (synced.path, False)
    assert path.read_bytes() == before


def test_a_locked_mapper_that_is_nowhere_needs_the_network(publish, hub, path, other_machine):
    publish("1.0.0")
    lock([REPO], path)
    other_machine()
    hub.close()
    with pytest.raises(NetworkError):
        load_locked(REPO, path)
    with pytest.raises(NetworkError):
        sync(path, frozen=True)


def test_a_range_locks_the_newest_and_sync_moves_on(publish, path):
    first, newer = publish("1.0.0"), publish("1.2.0", seed=1)
    publish("2.0.0", seed=2)
    assert lock([f"{REPO}@^1"], path)[REPO]["version"] == "1.2.0"
    assert lock([f"{REPO}@~1.0"], path)[REPO]["commit"] == first.commit
    lock([f"{REPO}@^1"], path)
    assert not sync(path, frozen=False)[0].changed
    newest = publish("1.10.0", seed=3)
    before = path.read_bytes()
    assert_is(sync(path, frozen=True)[0].path, newer)
    assert path.read_bytes() == before
    (moved,) = sync(path, frozen=False)
    assert_is(moved.path, newest)
    assert (moved.previous.version, moved.locked.version) == ("1.2.0", "1.10.0")
    assert moved.to_dict()["changed"]
    assert entries(path)[REPO]["requested"] == "^1"
    assert_is(load_locked(REPO, path), newest)


def test_without_a_revision_the_newest_version_is_locked_and_followed(publish, hub, path):
    publish("1.0.0")
    assert lock([REPO], path)[REPO]["requested"] is None
    second = publish("2.0.0", seed=1)
    hub.commit(REPO, {"README.md": b"A commit without a version.\n"})
    assert sync(path, frozen=False)[0].locked.commit == second.commit


def test_commits_and_branches_can_be_locked(publish, hub, path):
    first = publish("1.0.0")
    publish("1.1.0", seed=1)
    lock([f"{REPO}@{first.commit}"], path)
    assert_is(sync(path, frozen=False)[0].path, first)
    lock([f"{REPO}@main"], path)
    third = publish("1.2.0", seed=2)
    assert_is(sync(path, frozen=False)[0].path, third)
    assert entries(path)[REPO]["requested"] == "main"


def test_sync_frozen_resolves_and_writes_nothing(publish, hub, path, monkeypatch):
    publish("1.0.0")
    lock([REPO], path)
    publish("1.1.0", seed=1)
    # Not as this kvhub writes it, so that writing it anew would change it.
    path.write_text(json.dumps(json.loads(path.read_text())))
    before, modified = path.read_bytes(), path.stat().st_mtime_ns
    for name in ("resolve", "list_versions", "write_text"):
        monkeypatch.delattr(kvhub.lockfile, name)
    hub.requests.clear()
    sync(path, frozen=True)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, modified)
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    assert not [request for request in hub.requests if "/refs" in request.path]


def test_entries_that_are_not_named_stay(publish, path):
    publish("1.0.0")
    other = publish("3.0.0", seed=1, repo=OTHER)
    lock([REPO], path)
    before = entries(path)[REPO]
    publish("1.1.0", seed=2)
    lock([OTHER], path)
    assert [*entries(path)] == [OTHER, REPO]
    assert entries(path)[REPO] == before
    assert_is(load_locked(OTHER, path), other)


def test_an_entry_that_comes_while_others_download_stays(publish, hub, path, tmp_path):
    publish("1.0.0")
    publish("3.0.0", seed=1, repo=OTHER)
    lock([OTHER], tmp_path / "theirs.lock")
    hub.inject(
        Fault(
            f"GET /{REPO}/resolve/.*safetensors",
            "call",
            call=lambda: shutil.copy(tmp_path / "theirs.lock", path),
        )
    )
    lock([REPO], path)
    assert [*entries(path)] == [OTHER, REPO]


def test_the_file_is_only_written_when_it_changes(publish, path):
    publish("1.0.0")
    lock([REPO], path)
    modified = path.stat().st_mtime_ns
    lock([REPO], path)
    sync(path, frozen=False)
    assert path.stat().st_mtime_ns == modified


def change_what_would_be_locked(publish, path):
    """Lock two mappers; return the two actions that would now change the file."""
    publish("1.0.0")
    publish("3.0.0", seed=1, repo=OTHER)
    lock([REPO, OTHER], path)
    publish("1.1.0", seed=2)
    publish("3.1.0", seed=3, repo=OTHER)
    return lambda: lock([REPO, OTHER], path), lambda: sync(path, frozen=False)


def test_an_interrupted_lock_leaves_the_old_file(publish, path, monkeypatch):
    actions = change_what_would_be_locked(publish, path)
    before = path.read_bytes()
    download, done = kvhub.lockfile.download, []

    def interrupted(resolved):
        if done:
            raise KeyboardInterrupt
        done.append(resolved)
        return download(resolved)

    monkeypatch.setattr(kvhub.lockfile, "download", interrupted)
    for action in actions:
        done.clear()
        with pytest.raises(KeyboardInterrupt):
            action()
        assert len(done) == 1
        assert path.read_bytes() == before


def test_a_lock_that_cannot_be_written_leaves_the_old_file(publish, path, monkeypatch):
    actions = change_what_would_be_locked(publish, path)
    before = path.read_bytes()

    def replace(self, target):
        raise OSError("disk full")

    monkeypatch.setattr("kvhub.atomic.Path.replace", replace)
    for action in actions:
        with pytest.raises(OSError, match="disk full"):
            action()
        assert path.read_bytes() == before
        assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_one_missing_mapper_locks_none(publish, path):
    publish("1.0.0")
    with pytest.raises(NotFoundError):
        lock([REPO, "org/none"], path)
    with pytest.raises(NotFoundError):
        lock([REPO, f"{REPO[:-1]}@1.0.0"], path)
    assert not path.exists()


def test_a_moved_tag_is_refused_and_frozen_keeps_the_locked_bytes(
    publish, hub, path, other_machine
):
    first = publish("1.0.0")
    lock([f"{REPO}@1.0.0"], path)
    before = path.read_bytes()
    forged = publish("1.0.0", seed=1)
    for _ in range(2):
        for action in (
            lambda: sync(path, frozen=False),
            lambda: lock([REPO], path),
            lambda: lock([f"{REPO}@^1"], path),
        ):
            with pytest.raises(VerificationError, match=r"1\.0\.0.* was moved") as caught:
                action()
            assert first.commit in caught.value.message
            assert forged.commit in caught.value.message
        assert path.read_bytes() == before
        assert_is(sync(path, frozen=True)[0].path, first)
        other_machine()  # where no cache remembers the tag, the lock does


def test_a_cache_that_knows_the_moved_tag_does_not_change_what_is_locked(
    publish, hub, path, other_machine
):
    first = publish("1.0.0")
    lock([REPO], path)
    forged = publish("1.0.0", seed=1)
    other_machine()
    reference = parse_reference(f"{REPO}@1.0.0")
    assert_is(pull(reference)[1], forged)
    assert_is(load_locked(REPO, path), first)
    assert_is(sync(path, frozen=True)[0].path, first)
    hub.close()
    assert resolve(reference).commit == forged.commit


def test_what_was_synced_is_known_by_its_version_offline(publish, hub, path, other_machine):
    first = publish("1.0.0")
    lock([f"{REPO}@^1"], path)
    publish("1.1.0", seed=1)
    other_machine()
    sync(path, frozen=True)
    hub.close()
    assert_is(pull(parse_reference(f"{REPO}@1.0.0"))[1], first)


def test_syncing_a_locked_branch_leaves_what_the_branch_is(publish, hub, path):
    publish("1.0.0")
    lock([f"{REPO}@main"], path)
    second = publish("1.1.0", seed=1)
    reference = parse_reference(f"{REPO}@main")
    pull(reference)
    sync(path, frozen=True)
    hub.close()
    assert resolve(reference).commit == second.commit


def test_a_tag_moved_behind_a_newer_version_is_refused(publish, hub, path, other_machine):
    publish("1.0.0")
    lock([REPO], path)
    publish("1.1.0", seed=1)
    hub.move_tag(REPO, "v1.0.0", "main")
    other_machine()
    with pytest.raises(VerificationError, match=r"1\.0\.0 of org/mapper was moved"):
        sync(path, frozen=False)


def test_a_yanked_version_is_not_locked(publish, hub, path):
    first, second = publish("1.0.0"), publish("1.1.0", seed=1)
    lock([f"{REPO}@1.1.0"], path)
    before = path.read_bytes()
    yank(hub, "1.1.0")
    for action in (lambda: lock([f"{REPO}@1.1.0"], path), lambda: sync(path, frozen=False)):
        with pytest.raises(ConflictError, match=r"1\.1\.0 .*was yanked: wrong tokenizer"):
            action()
    assert path.read_bytes() == before
    assert_is(load_locked(REPO, path), second)
    assert lock([f"{REPO}@^1"], path)[REPO]["commit"] == first.commit
    assert lock([REPO], path)[REPO]["commit"] == first.commit


def test_locking_needs_the_hub(publish, hub, path):
    publish("1.0.0")
    lock([REPO], path)
    before = path.read_bytes()
    hub.close()
    for action in (lambda: lock([REPO], path), lambda: sync(path, frozen=False)):
        with pytest.raises(NetworkError):
            action()
    with pytest.raises(NetworkError):
        lock([REPO], path.with_name("new.lock"))
    assert path.read_bytes() == before
    assert not path.with_name("new.lock").exists()


def test_a_wrong_digest_is_refused(publish, path):
    first = publish("1.0.0")
    lock([REPO], path)
    edit(path, digest="0" * 64)
    before = path.read_bytes()
    for action in (
        lambda: load_locked(REPO, path),
        lambda: sync(path, frozen=True),
        lambda: sync(path, frozen=False),
        lambda: lock([REPO], path),
    ):
        with pytest.raises(VerificationError, match=f"expected digest 000.*, found {first.digest}"):
            action()
    assert path.read_bytes() == before


def test_another_commit_than_the_locked_one_is_refused(publish, path):
    publish("1.0.0")
    second = publish("1.1.0", seed=1)
    lock([f"{REPO}@1.0.0"], path)
    edit(path, commit=second.commit)
    with pytest.raises(VerificationError, match=r"is not what .* locked"):
        load_locked(REPO, path)
    with pytest.raises(VerificationError, match="was moved"):
        sync(path, frozen=False)


def test_an_edited_file_of_the_cache_is_never_loaded(publish, hub, path):
    first = publish("1.0.0")
    lock([REPO], path)
    package = load_locked(REPO, path)
    blob = (package / "model.safetensors").resolve()
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert_is(load_locked(REPO, path), first)  # fetched again
    blob = (package / "model.safetensors").resolve()
    blob.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    hub.close()
    with pytest.raises((VerificationError, NetworkError)):
        load_locked(REPO, path)


def test_a_cache_that_was_edited_together_with_its_manifest_is_refused(publish, path):
    publish("1.0.0")
    lock([REPO], path)
    package = load_locked(REPO, path)
    (package / "README.md").resolve().write_text("# Another card\n")
    manifest = Manifest.of(package)
    (package / "manifest.json").unlink()
    manifest.write(package)
    with pytest.raises(VerificationError, match=r"is not what .* locked: expected digest"):
        load_locked(REPO, path)
    with pytest.raises(VerificationError, match=r"is not what .* locked: expected digest"):
        sync(path, frozen=True)


def test_what_is_not_locked_is_not_loaded(publish, path):
    publish("1.0.0")
    for action in (lambda: load_locked(REPO, path), lambda: sync(path, frozen=True)):
        with pytest.raises(NotFoundError, match="no lock file") as caught:
            action()
        assert "kvhub lock" in caught.value.hint
    lock([REPO], path)
    with pytest.raises(NotFoundError, match=f"does not have {OTHER}; it has: {REPO}") as caught:
        load_locked(OTHER, path)
    assert caught.value.hint == f"Add it: kvhub lock {OTHER}"
    with pytest.raises(UsageError, match="names a revision"):
        load_locked(f"{REPO}@1.0.0", path)


def test_a_mapper_is_locked_once(publish, path):
    publish("1.0.0")
    with pytest.raises(UsageError, match="are the same mapper"):
        lock([REPO, f"{REPO}@1.0.0"], path)
    assert not path.exists()


ENTRY = {
    "requested": None,
    "version": "1.0.0",
    "commit": "a" * 40,
    "digest": "b" * 64,
    "source": {"id": "org/small", "revision": None},
    "target": {"id": "org/large", "revision": None},
}


def written(repo=REPO, **changes):
    return json.dumps({"schema_version": 1, "mappers": {repo: {**ENTRY, **changes}}})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a lock file"),
        ("\xff", "is not a lock file"),
        ("[" * 100_000, "is not a lock file"),
        ("[]", "has no `mappers`"),
        ('{"mappers": []}', "has no `mappers`"),
        ('{"schema_version": 2, "mappers": {}}', "has schema version 2; this kvhub reads 1"),
        (f"<<<<<<< ours\n{written()}\n>>>>>>> theirs\n", "is not a lock file"),
        (f'{{"mappers": {{"{REPO}": {{}}, "{REPO}": {{}}}}}}', "'org/mapper' stands there twice"),
        (written(commit="main"), "entry of 'org/mapper'"),
        (written(digest="b" * 63), "entry of 'org/mapper'"),
        (written(version="../../escape"), "entry of 'org/mapper'"),
        (written(version="v1.0.0"), "entry of 'org/mapper'"),
        (written(version=1), "entry of 'org/mapper'"),
        (written(requested=5), "entry of 'org/mapper'"),
        (written(requested=""), "entry of 'org/mapper'"),
        (written(source="org/small"), "entry of 'org/mapper'"),
        (written(target={"id": 1, "revision": None}), "entry of 'org/mapper'"),
        (written(extra=1), "entry of 'org/mapper'"),
        (written(repo="../escape"), "entry of '../escape'"),
        (written(repo="org/mapper@1.0.0"), "entry of 'org/mapper@1.0.0'"),
    ],
)
def test_a_damaged_lock_file_is_refused_and_left_alone(path, text, reason):
    path.write_text(text, encoding="latin-1")
    before = path.read_bytes()
    for action in (
        lambda: load_locked(REPO, path),
        lambda: sync(path, frozen=True),
        lambda: sync(path, frozen=False),
        lambda: lock([REPO], path),
    ):
        with pytest.raises(UsageError, match=reason) as caught:
            action()
        assert caught.value.hint
    assert path.read_bytes() == before


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_changes_of_two_people_merge_by_themselves(publish, path, tmp_path):
    for number, repo in enumerate(("org/b", "org/d", "org/f")):
        publish("1.0.0", seed=number, repo=repo)
    lock(["org/b@1.0.0", "org/d", "org/f"], path)
    base, ours, theirs = (tmp_path / name for name in ("base", "ours", "theirs"))
    for copy in (base, ours, theirs):
        shutil.copy(path, copy)
    publish("1.1.0", seed=7, repo="org/b")
    publish("1.1.0", seed=8, repo="org/f")
    publish("1.0.0", seed=9, repo="org/a")
    lock(["org/a", "org/b@1.1.0"], ours)
    lock(["org/f"], theirs)
    merged = subprocess.run(["git", "merge-file", ours, base, theirs], check=False)
    assert merged.returncode == 0
    versions = {repo: entry["version"] for repo, entry in entries(ours).items()}
    assert versions == {"org/a": "1.0.0", "org/b": "1.1.0", "org/d": "1.0.0", "org/f": "1.1.0"}
    assert len(sync(ours, frozen=True)) == 4
