"""A push makes one commit and one tag, or nothing that anybody would take for a version."""

import json
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
from hub_server import CLIENT_WARNING, Fault, HubServer, connect_client, fast_retries
from huggingface_hub import close_session
from mapping import random_mapper
from regression import spec

from kvhub import KVMapper, publishing
from kvhub.errors import (
    AuthError,
    ConflictError,
    KVHubError,
    NetworkError,
    NotFoundError,
    UsageError,
    VerificationError,
)
from kvhub.package import Manifest, load, save
from kvhub.publishing import plan, push

pytestmark = pytest.mark.filterwarnings(CLIENT_WARNING)

REPO = "org/mapper"
TOKEN = "hf_writer"
COMMIT, TAG, UPLOAD = "POST .*/commit/main", "POST .*/tag/", "PUT /lfs-storage"
PLOTS = {"quality.png": b"\x89PNG\0quality"}


@pytest.fixture(scope="module")
def specs():
    return tuple(
        replace(spec(layers, name=f"org/{name}"), revision="a" * 40)
        for name, layers in (("source", 2), ("target", 3))
    )


@pytest.fixture(scope="module")
def packages(specs, tmp_path_factory):
    """Two fits of one pair; one whose target is another commit, one with fewer features."""
    source, target = specs
    folder = tmp_path_factory.mktemp("packages")
    mappers = {
        "first": random_mapper(source, target),
        "refit": random_mapper(source, target, seed=1),
        "other-base": random_mapper(source, replace(target, revision="b" * 40)),
        "matched": random_mapper(source, target, heads="matched"),
    }
    for name, mapper in mappers.items():
        save(mapper, folder / name, plots=PLOTS)
    save(mappers["first"], folder / "sharded", max_shard_size="1KB")
    return folder


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Start a Hub with these settings, which the client then asks."""
    running = []

    def start(xet=False, **settings):
        hub = HubServer(tmp_path / "hub", **settings).__enter__()
        running.append(hub)
        connect_client(monkeypatch, hub, tmp_path / "cache", xet=xet)
        fast_retries(monkeypatch)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        return hub

    yield start
    close_session()
    for hub in running:
        hub.close()


@pytest.fixture
def hub(serve):
    return serve()


def writes(hub):
    return [request for request in hub.requests if request.method not in ("GET", "HEAD")]


def paths(hub, revision="main"):
    return set(hub.store.repo(REPO).files(revision))


def text(hub, path, revision="main"):
    return hub.store.read(hub.store.repo(REPO).files(revision)[path]).decode()


def tensors(path):
    return load(Path(path)).tensors()


def at_version(hub, tag, folder):
    """The package at a tag, as files in a folder."""
    files = hub.store.repo(REPO).files(tag)
    for name, file in files.items():
        if name not in (".gitattributes", "note.txt"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(hub.store.read(file))
    return folder


def same_mapper(first, second):
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_the_first_push_makes_a_repository_a_commit_and_a_tag(hub, packages, tmp_path):
    pushed = push(packages / "first", REPO)
    state = hub.snapshot(REPO)
    assert state["tags"] == {"v1.0.0": pushed.commit}
    assert state["branches"] == {"main": pushed.commit}
    history = list(hub.store.repo(REPO).history(pushed.commit))
    assert len(history) == 2
    assert pushed.to_dict() == {
        "repo_id": REPO,
        "version": "1.0.0",
        "tag": "v1.0.0",
        "commit": pushed.commit,
        "url": f"{hub.url}/{REPO}/tree/v1.0.0",
        "changed": True,
        "pull_request": None,
    }
    there = at_version(hub, "v1.0.0", tmp_path / "there")
    assert same_mapper(tensors(there), tensors(packages / "first"))
    local = Manifest.read(packages / "first")
    assert Manifest.read(there).content_digest == local.content_digest
    assert f'"{REPO}"' in text(hub, "README.md")


@pytest.mark.parametrize(
    ("package", "options", "version"),
    [
        ("first", {}, "1.0.0"),
        ("first", {"license": "mit"}, "1.0.1"),
        ("refit", {}, "1.1.0"),
        ("other-base", {}, "2.0.0"),
        ("matched", {}, "2.0.0"),
        ("refit", {"version": "1.4.0"}, "1.4.0"),
        ("refit", {"version": "v1.1.0-rc.1"}, "1.1.0-rc.1"),
        ("first", {"version": "1.0.1"}, "1.0.1"),
        ("first", {"version": "1.0.0"}, "1.0.0"),
    ],
)
def test_the_version_follows_from_what_changed(hub, packages, tmp_path, package, options, version):
    first = push(packages / "first", REPO)
    before = hub.snapshot(REPO)
    planned = plan(packages / package, REPO, **options)
    pushed = push(packages / package, REPO, **options)
    assert pushed.version == planned.version == version
    assert planned.previous == "1.0.0"
    assert pushed.changed == (version != "1.0.0") == (planned.bump != "none")
    if not pushed.changed:
        assert pushed.commit == first.commit
        assert hub.snapshot(REPO) == before
        return
    tags = hub.snapshot(REPO)["tags"]
    assert tags == {"v1.0.0": first.commit, f"v{version}": pushed.commit}
    there = at_version(hub, f"v{version}", tmp_path / "there")
    assert same_mapper(tensors(there), tensors(packages / package))
    assert hub.snapshot(REPO)["branches"]["main"] == pushed.commit


def test_a_prerelease_is_followed_by_its_release(hub, packages):
    assert push(packages / "first", REPO, version="1.0.0-rc.1").version == "1.0.0-rc.1"
    assert not push(packages / "first", REPO).changed
    assert push(packages / "first", REPO, version="1.0.0").version == "1.0.0"


def test_a_version_never_gets_other_content(hub, packages):
    push(packages / "first", REPO)
    before = hub.snapshot(REPO)
    with pytest.raises(ConflictError, match=r"v1\.0\.0 of org/mapper is there") as caught:
        push(packages / "refit", REPO, version="1.0.0")
    assert len({word for word in caught.value.message.split() if len(word.strip(".,:")) == 64}) == 2
    assert "without --version" in caught.value.hint
    assert hub.snapshot(REPO) == before


@pytest.mark.parametrize(
    ("package", "version", "demanded"),
    [
        ("refit", "0.9.0", "1.1.0"),
        ("refit", "1.0.1", "1.1.0"),
        ("refit", "1.0.1-rc.1", "1.1.0"),
        ("other-base", "1.9.9", "2.0.0"),
        ("first", "0.1.0", "1.0.1"),
    ],
)
def test_a_version_that_is_too_low_is_refused(hub, packages, package, version, demanded):
    push(packages / "first", REPO)
    before = hub.snapshot(REPO)
    with pytest.raises(UsageError, match=f"expected {demanded} or higher"):
        push(packages / package, REPO, version=version)
    assert hub.snapshot(REPO) == before


def test_a_plan_tells_all_and_writes_nothing(hub, packages):
    new = plan(packages / "first", REPO, private=True)
    assert hub.snapshot(REPO) == {}
    assert (new.version, new.bump, new.previous, new.private) == ("1.0.0", "first", None, True)
    push(packages / "sharded", REPO)
    before = hub.snapshot(REPO)
    hub.requests.clear()
    planned = plan(packages / "refit", REPO)
    assert hub.snapshot(REPO) == before
    assert writes(hub) == []
    assert json.loads(json.dumps(planned.to_dict())) == planned.to_dict()
    push(packages / "refit", REPO)
    after = hub.store.repo(REPO).files("main")
    kept = {file.name: file for file in planned.files if file.action != "delete"}
    assert kept.keys() | {".gitattributes"} == after.keys()
    assert all(after[name]["size"] == file.size for name, file in kept.items())
    assert {file.action for file in planned.files} == {"add", "same", "delete"}
    assert planned.size_bytes == sum(file.size for file in kept.values())
    added = sum(file.size for file in kept.values() if file.action == "add")
    assert 0 < planned.upload_bytes == added < planned.size_bytes
    again = plan(packages / "refit", REPO)
    assert (again.version, again.bump, again.upload_bytes) == ("1.1.0", "none", 0)
    assert {file.action for file in again.files} == {"same"}


def test_files_of_an_older_version_go_and_those_of_people_stay(hub, packages):
    push(packages / "sharded", REPO)
    shards = {path for path in paths(hub) if "safetensors" in path}
    assert len(shards) > 3
    status = b'{"schema_version": 1, "yanked": {}, "new_version": null, "deprecated": null}'
    hub.commit(REPO, {"note.txt": b"mine", "plots/mine.png": b"\0", "status.json": status})
    push(packages / "refit", REPO)
    assert {path for path in paths(hub) if "safetensors" in path} == {"model.safetensors"}
    assert {"note.txt", "plots/mine.png", "status.json", ".gitattributes"} <= paths(hub)
    assert text(hub, "status.json") == status.decode()
    assert shards <= paths(hub, "v1.0.0")


def test_what_people_wrote_into_the_card_stays(hub, packages):
    push(packages / "first", REPO)
    card = text(hub, "README.md").replace("\n---\n", "\nextra: kept\n---\n", 1)
    hub.commit(REPO, {"README.md": (card + "\n<!-- mine -->\nMy own words.\n").encode()})
    assert not push(packages / "first", REPO).changed
    for package in ("refit", "other-base"):
        push(packages / package, REPO)
        assert "\nextra: kept\n" in text(hub, "README.md")
        assert text(hub, "README.md").count("My own words.") == 1


@pytest.mark.parametrize("model_id", ["/home/ann/models/tiny", "models/tiny", "./tiny", "tiny"])
def test_the_path_of_a_local_model_is_no_metadata(hub, specs, tmp_path, model_id):
    source, target = specs
    local = replace(source, model_id=model_id, revision=None)
    save(random_mapper(local, target), tmp_path / "package")
    push(tmp_path / "package", REPO)
    _, metadata, _ = text(hub, "README.md").split("---\n", 2)
    assert model_id not in metadata
    assert "org/target" in metadata


def test_the_licence_is_that_of_both_models(hub, specs, tmp_path):
    bases = []
    for base, license in zip(specs, ("apache-2.0", "llama3.1"), strict=True):
        hub.create_repo(base.model_id)
        card = f"---\nlicense: {license}\n---\n".encode()
        bases.append(replace(base, revision=hub.commit(base.model_id, {"README.md": card})))
    save(random_mapper(*bases), tmp_path / "package")
    push(tmp_path / "package", REPO)
    assert "\nlicense: llama3.1\n" in text(hub, "README.md")
    push(tmp_path / "package", REPO, license="mit")
    assert "\nlicense: mit\n" in text(hub, "README.md")


def test_files_that_no_mapper_brought_are_not_overwritten(hub, packages):
    hub.create_repo(REPO)
    hub.commit(REPO, {"config.json": b"{}", "README.md": b"# A model\n"})
    before = hub.snapshot(REPO)
    with pytest.raises(ConflictError, match=r"\['config.json'\]"):
        push(packages / "first", REPO)
    assert hub.snapshot(REPO) == before


@pytest.mark.parametrize("asked", [True, False])
def test_a_repository_is_as_private_as_was_asked_for(hub, packages, asked):
    push(packages / "first", REPO, private=asked)
    assert hub.snapshot(REPO)["private"] == asked
    before = hub.snapshot(REPO)
    push(packages / "first", REPO)
    with pytest.raises(VerificationError, match="should be"):
        push(packages / "refit", REPO, private=not asked)
    with pytest.raises(VerificationError, match="should be"):
        plan(packages / "refit", REPO, private=not asked)
    assert hub.snapshot(REPO) == before


def test_nothing_is_uploaded_where_a_private_repository_came_out_public(hub, packages):
    faster = Fault("POST /api/repos/create", "call", call=lambda: hub.create_repo(REPO))
    hub.inject(faster)
    with pytest.raises(VerificationError, match="should be private; found it public"):
        push(packages / "first", REPO, private=True)
    assert paths(hub) == {".gitattributes"}


def test_a_pull_request_leaves_main_and_the_versions_alone(hub, packages):
    with pytest.raises(NotFoundError, match="pull request"):
        push(packages / "first", REPO, create_pr=True)
    push(packages / "first", REPO)
    before = hub.snapshot(REPO)
    proposed = push(packages / "refit", REPO, create_pr=True)
    after = hub.snapshot(REPO)
    assert (after["branches"], after["tags"]) == (before["branches"], before["tags"])
    assert after["pulls"] == {"refs/pr/1": proposed.commit}
    assert (proposed.version, proposed.tag) == ("1.1.0", None)
    assert proposed.pull_request == f"{hub.url}/{REPO}/discussions/1"
    # Merged, it is only tagged.
    hub.store.repo(REPO).branches["main"] = proposed.commit
    pushed = push(packages / "refit", REPO)
    assert (pushed.commit, pushed.tag) == (proposed.commit, "v1.1.0")


def test_somebody_elses_commit_is_not_overwritten(hub, packages):
    push(packages / "first", REPO)
    hub.inject(Fault(COMMIT, "call", call=lambda: hub.commit(REPO, {"note.txt": b"theirs"})))
    with pytest.raises(ConflictError, match="Somebody else changed org/mapper") as caught:
        push(packages / "refit", REPO)
    assert "again" in caught.value.hint
    assert list(hub.snapshot(REPO)["tags"]) == ["v1.0.0"]
    assert paths(hub) == paths(hub, "v1.0.0") | {"note.txt"}
    assert push(packages / "refit", REPO).version == "1.1.0"
    assert "note.txt" in paths(hub)


def test_somebody_elses_tag_is_not_moved(hub, packages):
    first = push(packages / "first", REPO)
    faster = Fault(TAG, "call", call=lambda: hub.move_tag(REPO, "v1.1.0", first.commit))
    hub.inject(faster)
    with pytest.raises(ConflictError, match=r"The tag v1\.1\.0"):
        push(packages / "refit", REPO)
    assert hub.snapshot(REPO)["tags"]["v1.1.0"] == first.commit
    assert push(packages / "refit", REPO).version == "1.2.0"


@pytest.mark.parametrize("again", [False, True])
def test_of_two_pushes_at_once_one_wins(hub, packages, tmp_path, again):
    """Both have looked at main before either of them commits."""
    if again:
        push(packages / "first", REPO)
    barrier = threading.Barrier(2)
    hub.inject(Fault(COMMIT, "call", times=2, call=lambda: barrier.wait(20)))

    def outcome(package):
        try:
            return push(packages / package, REPO)
        except KVHubError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        results = {name: pool.submit(outcome, name) for name in ("refit", "matched")}
    results = {name: future.result() for name, future in results.items()}
    failures = [name for name, result in results.items() if isinstance(result, KVHubError)]
    assert len(failures) == 1, results
    loser = failures[0]
    winner = next(name for name in results if name != loser)
    assert isinstance(results[loser], ConflictError)
    tag = results[winner].tag
    assert hub.snapshot(REPO)["tags"].keys() == {"v1.0.0", tag}
    there = at_version(hub, tag, tmp_path / "there")
    assert same_mapper(tensors(there), tensors(packages / winner))
    assert push(packages / loser, REPO).changed


class Killed(BaseException):
    """Nothing after this runs."""


def kill(*arguments, **options):
    raise Killed


@pytest.mark.parametrize("tags", [0, 1])
def test_a_push_that_died_before_the_tag_is_only_tagged(hub, packages, monkeypatch, tags):
    if tags:
        push(packages / "refit", REPO)
    with monkeypatch.context() as patch:
        patch.setattr(publishing, "tag", kill)
        with pytest.raises(Killed):
            push(packages / "first", REPO)
    before = hub.snapshot(REPO)
    assert len(before["tags"]) == tags
    hub.requests.clear()
    pushed = push(packages / "first", REPO)
    assert [request.path.split("/")[5] for request in writes(hub)] == ["tag"]
    assert hub.snapshot(REPO)["branches"] == before["branches"] == {"main": pushed.commit}
    assert len(hub.snapshot(REPO)["tags"]) == tags + 1


@pytest.mark.parametrize("match", [COMMIT, TAG])
def test_an_answer_that_got_lost_is_made_up_for(hub, packages, match):
    push(packages / "first", REPO)
    lost = hub.inject(Fault(match, "reset_after"))
    pushed = push(packages / "refit", REPO)
    assert lost.hits == 1
    assert hub.snapshot(REPO)["tags"]["v1.1.0"] == pushed.commit
    assert len(list(hub.store.repo(REPO).history(pushed.commit))) == 3


def test_a_pull_request_whose_answer_got_lost_is_found(hub, packages):
    push(packages / "first", REPO)
    hub.inject(Fault(COMMIT, "reset_after"))
    proposed = push(packages / "refit", REPO, create_pr=True)
    assert hub.snapshot(REPO)["pulls"] == {"refs/pr/1": proposed.commit}
    assert proposed.pull_request == f"{hub.url}/{REPO}/discussions/1"


def test_an_upload_that_was_cut_off_goes_on_where_it_stopped(hub, packages):
    cut = hub.inject(Fault(UPLOAD, "drop", after=2, times=inf))
    with pytest.raises(NetworkError, match="disconnected") as caught:
        push(packages / "sharded", REPO)
    assert "where this push stopped" in caught.value.hint
    assert cut.hits > 0
    assert hub.snapshot(REPO)["tags"] == {}
    assert paths(hub) == {".gitattributes"}
    hub.faults.clear()
    push(packages / "sharded", REPO)
    sent = Counter(
        request.path for request in hub.requests if request.method == "PUT" and request.status
    )
    shards = [path for path in paths(hub) if path.endswith(".safetensors")]
    assert len(sent) == len(shards) > 3
    assert set(sent.values()) == {1}


@pytest.mark.parametrize(
    ("match", "status", "code", "error", "words"),
    [
        ("GET /api/models/org/mapper", 401, None, AuthError, "401"),
        ("GET /api/models/org/mapper", 403, "GatedRepo", AuthError, "gated"),
        ("GET /api/models/org/mapper", 503, None, NetworkError, "503"),
        ("/preupload/", 403, None, AuthError, "403"),
        ("/preupload/", 429, None, NetworkError, "rate limit"),
        (UPLOAD, 403, None, AuthError, "403"),
        (UPLOAD, 500, None, NetworkError, "500"),
        (COMMIT, 401, None, AuthError, "401"),
        (COMMIT, 429, None, NetworkError, "rate limit"),
        (COMMIT, 500, None, NetworkError, "500"),
        (TAG, 403, None, AuthError, "403"),
        (TAG, 503, None, NetworkError, "503"),
    ],
)
def test_a_refusal_is_named_and_harms_nothing(hub, packages, match, status, code, error, words):
    push(packages / "first", REPO)
    before = hub.snapshot(REPO)
    hub.inject(Fault(match, "status", times=inf, status=status, code=code))
    with pytest.raises(error, match=words) as caught:
        push(packages / "refit", REPO)
    assert REPO in caught.value.message
    assert TOKEN not in str(caught.value)
    assert hub.snapshot(REPO)["tags"] == before["tags"]
    if match != TAG:
        assert hub.snapshot(REPO) == before
    hub.faults.clear()
    assert push(packages / "refit", REPO).version == "1.1.0"


def test_who_may_not_write_is_told_so(serve, packages, monkeypatch):
    reader = {"name": "bob", "orgs": ["org"], "role": "read"}
    hub = serve(tokens={"hf_reader": reader, TOKEN: {"name": "ann", "orgs": ["org"]}})
    push(packages / "first", REPO)
    before = hub.snapshot(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    with pytest.raises(AuthError):
        push(packages / "refit", REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    with pytest.raises(AuthError) as caught:
        push(packages / "refit", REPO)
    assert "hf_nobody" not in str(caught.value)
    assert hub.snapshot(REPO) == before


def damage(package):
    shard = package / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def poison(package):
    """A package that is what its manifest says, with a tensor that no one can use."""
    mapper = load(package)
    mapper.key_bias[0, 0, 0] = torch.nan
    from safetensors.torch import save_file

    parts = {f"{n}.{i}": part for n, t in mapper.tensors().items() for i, part in enumerate(t)}
    save_file(parts, package / "model.safetensors")
    Manifest.of(package).write(package)


@pytest.mark.parametrize(
    ("spoil", "options", "error"),
    [
        (damage, {}, VerificationError),
        (poison, {}, VerificationError),
        (lambda package: (package / "config.json").unlink(), {}, NotFoundError),
        (lambda package: (package / "extra.txt").touch(), {}, VerificationError),
        (lambda package: None, {"version": "one"}, UsageError),
        (lambda package: None, {"repo_id": "mapper"}, UsageError),
        (lambda package: None, {"repo_id": "org/mapper@1.0.0"}, UsageError),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_the_hub_is_asked(
    hub, packages, tmp_path, spoil, options, error
):
    save(load(packages / "first"), tmp_path / "package")
    spoil(tmp_path / "package")
    for act in (push, plan):
        with pytest.raises(error):
            act(tmp_path / "package", **{"repo_id": REPO, **options})
    assert hub.requests == []


def test_a_file_that_changes_on_its_way_becomes_no_version(hub, packages, tmp_path):
    save(load(packages / "first"), tmp_path / "package")
    config = tmp_path / "package" / "config.json"

    def progress(name, done, total):
        if name == "model.safetensors":
            config.write_text(config.read_text() + "\n")

    with pytest.raises(VerificationError, match=r"\['config.json'\]"):
        push(tmp_path / "package", REPO, progress=progress)
    assert hub.snapshot(REPO)["tags"] == {}


def test_what_arrives_damaged_from_the_hub_misleads_nobody(hub, packages, tmp_path, monkeypatch):
    from huggingface_hub import constants

    push(packages / "first", REPO)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "other-cache"))
    once = hub.inject(Fault("GET .*/resolve/.*/manifest.json", "corrupt", bytes=100))
    assert not push(packages / "first", REPO).changed
    assert once.hits == 1
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "third-cache"))
    hub.inject(Fault("GET .*/resolve/.*/config.json", "corrupt", times=inf, bytes=100))
    with pytest.raises(VerificationError, match="arrived damaged"):
        push(packages / "refit", REPO)


@pytest.mark.parametrize("known", [True, False])
def test_hubs_with_xet_and_without_take_pushes(serve, packages, tmp_path, known):
    pytest.importorskip("hf_xet")
    hub = serve(xet=True)
    if not known:
        hub.inject(Fault("xet-write-token", "status", status=404, times=inf))
    pushed = push(packages / "sharded", REPO)
    puts = [request for request in hub.requests if request.method == "PUT"]
    assert bool(puts) != known
    there = at_version(hub, pushed.tag, tmp_path / "there")
    assert same_mapper(tensors(there), tensors(packages / "sharded"))


def test_hubs_that_keep_all_files_in_git_take_pushes(serve, packages, tmp_path):
    hub = serve(upload_mode="regular", page_size=2)
    push(packages / "first", REPO)
    assert not push(packages / "first", REPO).changed
    pushed = push(packages / "refit", REPO)
    there = at_version(hub, pushed.tag, tmp_path / "there")
    assert same_mapper(tensors(there), tensors(packages / "refit"))


def test_progress_goes_through_all_files(hub, packages, monkeypatch):
    from huggingface_hub.utils import are_progress_bars_disabled

    push(packages / "first", REPO)
    for module in ("huggingface_hub.constants", "huggingface_hub.utils.tqdm"):
        # By name in sys.modules, since the package has a class of the second's name.
        monkeypatch.setattr(sys.modules[module], "HF_HUB_DISABLE_PROGRESS_BARS", None)
    assert not are_progress_bars_disabled()
    calls = []
    planned = plan(packages / "refit", REPO)
    bars = []

    def progress(*call):
        calls.append(call)
        bars.append(not are_progress_bars_disabled())

    push(packages / "refit", REPO, progress=progress)
    names = [name for name, _, _ in calls]
    assert sorted(names[:-1]) == [file.name for file in planned.files if file.action == "add"]
    assert calls[0][1] == 0
    assert calls[-1] == ("", planned.upload_bytes, planned.upload_bytes)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    # The client's own bars do not run through it, and are back afterwards.
    assert not any(bars)
    assert not are_progress_bars_disabled()


def test_a_signature_is_of_the_version_as_it_was_published(hub, packages, tmp_path):
    pytest.importorskip("model_signing")
    from kvhub.signing import verify_signature

    key, public = tmp_path / "key.pem", tmp_path / "public.pem"
    make = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key]
    subprocess.run(make, check=True)
    subprocess.run(["openssl", "ec", "-in", key, "-pubout", "-out", public], check=True)
    push(packages / "first", REPO, private_key=key)
    there = at_version(hub, "v1.0.0", tmp_path / "there")
    verify_signature(there, public)
    assert KVMapper.from_pretrained(there) is not None
    assert not push(packages / "first", REPO, private_key=key).changed
    # A signature of another version is none of this one.
    push(packages / "refit", REPO)
    assert "kvhub.sig" in paths(hub, "v1.0.0")
    assert "kvhub.sig" not in paths(hub)
