"""The test Hub answers the real client as the Hub does, and its faults are what they claim."""

import http.client
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hub_server import (
    CLIENT_WARNING,
    Fault,
    HubServer,
    RandomFaults,
    connect_client,
    fast_retries,
)
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    close_session,
    constants,
)
from huggingface_hub.errors import (
    BadRequestError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

pytestmark = pytest.mark.filterwarnings(CLIENT_WARNING)

ROOT = Path(__file__).parents[1]
REPO = "org/mapper"
CARD = b"""---
license: apache-2.0
library_name: kvhub
base_model: [org/source, org/target]
tags: [kvhub, kv-cache]
---
# A mapper
"""
FILES = {
    "README.md": CARD,
    "config.json": b"{}",
    "notes/log.txt": b"fitted\n",
    "weights/keys.safetensors": bytes(range(256)) * 20,
}
TOKENS = {
    "hf_writer": {"name": "ann", "orgs": ["org"], "role": "write"},
    "hf_reader": {"name": "bob", "orgs": ["org"], "role": "read"},
    "hf_other": {"name": "eve", "role": "write"},
}


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Start a Hub with these settings, which the client then asks."""
    running = []

    def start(root=tmp_path / "hub", xet=False, **settings):
        hub = HubServer(root, **settings).__enter__()
        running.append(hub)
        connect_client(monkeypatch, hub, tmp_path / "cache", xet=xet)
        fast_retries(monkeypatch)
        return hub

    yield start
    close_session()
    for hub in running:
        hub.close()


@pytest.fixture
def hub(serve):
    return serve()


@pytest.fixture
def api(hub):
    return client(hub)


def client(hub, token="hf_writer"):
    return HfApi(endpoint=hub.url, token=token)


def adds(files):
    return [CommitOperationAdd(path, data) for path, data in files.items()]


def push(api, files=None, **options):
    api.create_repo(REPO, exist_ok=True)
    files = adds(FILES if files is None else files)
    return api.create_commit(REPO, files, commit_message="push", **options).oid


def content(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name != ".gitattributes"
    }


@contextmanager
def refused(status, match=None, error=HfHubHTTPError):
    with pytest.raises(error, match=match) as caught:
        yield
    assert caught.value.response.status_code == status


def asked(hub, method, path):
    return [request for request in hub.requests if (request.method, request.path) == (method, path)]


@pytest.mark.parametrize("mode", ["auto", "regular"])
def test_what_is_pushed_comes_back(serve, mode):
    hub = serve(upload_mode=mode)
    api = client(hub)
    commit = push(api)
    assert content(api.snapshot_download(REPO)) == FILES
    checked = api.verify_repo_checksums(REPO)
    assert checked.revision == commit
    assert checked.checked_count == len(FILES) + 1
    assert not checked.mismatches
    tree = {file.path: file for file in api.list_repo_tree(REPO, recursive=True)}
    assert bool(tree["weights/keys.safetensors"].lfs) == (mode == "auto")
    assert tree["config.json"].lfs is None
    assert {"notes", "weights"} <= tree.keys()


def test_large_objects_go_in_parts(serve):
    hub = serve(chunk_size=1000)
    api = client(hub)
    push(api)
    assert sum(request.method == "PUT" for request in hub.requests) == 6
    assert content(api.snapshot_download(REPO)) == FILES


def test_an_unchanged_push_makes_no_commit(hub, api):
    commit = push(api)
    assert push(api) == commit
    assert len(asked(hub, "POST", f"/api/models/{REPO}/commit/main")) == 1
    assert [made.title for made in api.list_repo_commits(REPO)] == ["push", "initial commit"]


def test_files_and_folders_are_deleted_and_copied(api):
    push(api)
    operations = [
        CommitOperationDelete("notes/", is_folder=True),
        CommitOperationDelete("config.json"),
        CommitOperationCopy("weights/keys.safetensors", "weights/values.safetensors"),
    ]
    api.create_commit(REPO, operations, commit_message="tidy")
    weights = FILES["weights/keys.safetensors"]
    assert content(api.snapshot_download(REPO)) == {
        "README.md": CARD,
        "weights/keys.safetensors": weights,
        "weights/values.safetensors": weights,
    }
    with refused(404, "doesn't exist", RemoteEntryNotFoundError):
        api.create_commit(REPO, [CommitOperationDelete("config.json")], commit_message="again")


def test_a_tag_stays_where_it_was_put(hub, api):
    first = push(api)
    api.create_tag(REPO, tag="v1", tag_message="the first")
    second = push(api, {"config.json": b"{ }"})
    with refused(409):
        api.create_tag(REPO, tag="v1", revision=second)
    refs = api.list_repo_refs(REPO)
    assert [(tag.name, tag.ref, tag.target_commit) for tag in refs.tags] == [
        ("v1", "refs/tags/v1", first)
    ]
    assert [(branch.name, branch.target_commit) for branch in refs.branches] == [("main", second)]
    assert Path(api.hf_hub_download(REPO, "config.json", revision="v1")).read_bytes() == b"{}"
    assert api.resolve_revision(REPO, revision="v1").resolved == first
    assert api.model_info(REPO, revision=first[:7]).sha == first
    hub.move_tag(REPO, "v1", second)
    assert api.model_info(REPO, revision="v1").sha == second
    api.delete_tag(REPO, tag="v1")
    with refused(404, error=RevisionNotFoundError):
        api.delete_tag(REPO, tag="v1")


def test_branches_are_made_moved_and_deleted(api):
    first = push(api)
    api.create_branch(REPO, branch="next/one")
    with refused(409):
        api.create_branch(REPO, branch="next/one")
    second = push(api, {"config.json": b"{ }"}, revision="next/one")
    assert api.model_info(REPO).sha == first
    assert api.model_info(REPO, revision="next/one").sha == second
    api.delete_branch(REPO, branch="next/one")
    with refused(403):
        api.delete_branch(REPO, branch="main")
    with refused(404, error=RevisionNotFoundError):
        push(api, revision="next/one")


def test_a_pull_request_leaves_the_branch_alone(api):
    first = push(api)
    made = api.create_commit(
        REPO, adds({"config.json": b"{ }"}), commit_message="propose", create_pr=True
    )
    assert made.pr_revision == "refs/pr/1"
    refs = api.list_repo_refs(REPO, include_pull_requests=True)
    assert [(pull.ref, pull.target_commit) for pull in refs.pull_requests] == [
        ("refs/pr/1", made.oid)
    ]
    assert refs.branches[0].target_commit == first
    again = push(api, {"config.json": b"[]"}, revision="refs/pr/1")
    path = api.hf_hub_download(REPO, "config.json", revision="refs/pr/1")
    assert Path(path).read_bytes() == b"[]"
    assert [made.commit_id for made in api.list_repo_commits(REPO, revision=again)][1:] == [
        made.oid,
        first,
        api.list_repo_commits(REPO)[-1].commit_id,
    ]


def test_a_commit_on_an_old_parent_is_refused(hub, api):
    first = push(api)
    hub.commit(REPO, {"config.json": b"[]"})
    before = hub.snapshot(REPO)
    with refused(412):
        push(api, {"config.json": b"{ }"}, parent_commit=first)
    assert hub.snapshot(REPO) == before


def test_of_two_commits_on_one_parent_one_wins(hub, api):
    parent = push(api)

    def race(number):
        try:
            files = {"config.json": b"%d" % number, f"only-{number}.txt": b"mine"}
            return push(api, files, parent_commit=parent)
        except HfHubHTTPError as error:
            return error.response.status_code

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(race, range(4)))
    assert results.count(412) == 3
    assert api.list_repo_commits(REPO)[1].commit_id == parent
    names = {path for path in api.list_repo_files(REPO) if path.startswith("only")}
    assert len(names) == 1


@pytest.mark.parametrize(
    ("operations", "status"),
    [
        ([CommitOperationDelete("nothing")], 404),
        (adds({"config.json/below": b"x"}), 400),
    ],
)
def test_a_refused_commit_changes_nothing(hub, api, operations, status):
    push(api)
    before = hub.snapshot(REPO)
    with refused(status):
        api.create_commit(REPO, [*adds({"more.txt": b""}), *operations], commit_message="no")
    assert hub.snapshot(REPO) == before


def test_an_object_that_was_not_uploaded_cannot_be_committed(hub, api):
    push(api)
    before = hub.snapshot(REPO)
    addition = CommitOperationAdd("a.bin", b"not there")
    api.preupload_lfs_files(REPO, [addition], free_memory=False)
    (hub.store.blobs / addition.upload_info.sha256.hex()).unlink()
    with refused(400, "does not exist", BadRequestError):
        api.create_commit(REPO, [addition], commit_message="no")
    assert hub.snapshot(REPO) == before


def test_a_model_is_described_by_its_card(api):
    commit = push(api)
    info = api.model_info(REPO, files_metadata=True)
    assert (info.id, info.author, info.sha, info.private) == (REPO, "org", commit, False)
    assert info.card_data.base_model == ["org/source", "org/target"]
    assert info.library_name == "kvhub"
    assert set(info.tags) == {
        "kvhub",
        "kv-cache",
        "license:apache-2.0",
        "base_model:org/source",
        "base_model:org/target",
    }
    siblings = {file.rfilename: file.size for file in info.siblings}
    assert siblings.items() >= {path: len(data) for path, data in FILES.items()}.items()
    assert info.created_at <= info.last_modified


def test_models_are_found_by_tag_author_and_name(hub, api):
    push(api)
    for repo in ("org/plain", "ann/other-mapper"):
        hub.create_repo(repo)
    hub.create_repo("org/secret", private=True)

    def found(api=api, **wanted):
        return {model.id for model in api.list_models(**wanted)}

    assert found() == {REPO, "org/plain", "ann/other-mapper", "org/secret"}
    assert found(client(hub, token=False)) == {REPO, "org/plain", "ann/other-mapper"}
    assert found(filter=["kvhub", "base_model:org/target"]) == {REPO}
    assert found(filter="nothing") == set()
    assert found(author="org", search="MAPPER") == {REPO}
    assert [model.id for model in api.list_models(limit=1, sort="last_modified")] == ["org/secret"]
    [model] = api.list_models(filter="kvhub", full=True, cardData=True)
    assert model.card_data.license == "apache-2.0"
    assert {file.rfilename for file in model.siblings} >= FILES.keys()


def test_long_lists_come_in_pages(serve):
    hub = serve(page_size=2)
    api = client(hub)
    push(api, {**FILES, **{f"many/{number}.txt": b"%d" % number for number in range(5)}})
    hub.commit(REPO, {"config.json": None})
    assert len(api.list_repo_commits(REPO)) == 3
    paths = [entry.path for entry in api.list_repo_tree(REPO, recursive=True)]
    assert len(paths) == len(set(paths)) == 12
    assert [entry.path for entry in api.list_repo_tree(REPO, "notes")] == ["notes/log.txt"]
    for name in "abc":
        hub.create_repo(f"org/{name}")
    assert len(list(api.list_models(author="org"))) == 4
    pages = [request for request in hub.requests if "cursor" in request.path]
    assert len(pages) == 1 + 5 + 1
    with refused(404, error=RemoteEntryNotFoundError):
        list(api.list_repo_tree(REPO, "nowhere"))


def test_paths_say_when_they_last_changed(hub, api):
    first = push(api)
    second = hub.commit(REPO, {"notes/more.txt": b"more"})
    info = {
        entry.path: entry.last_commit.oid
        for entry in api.get_paths_info(REPO, ["notes", "config.json", "none"], expand=True)
    }
    assert info == {"notes": second, "config.json": first}


@pytest.mark.parametrize(
    ("wanted", "status", "expected"),
    [
        ("bytes=0-9", 206, slice(0, 10)),
        ("bytes=5000-", 206, slice(5000, None)),
        ("bytes=-7", 206, slice(-7, None)),
        ("bytes=5110-9999", 206, slice(5110, None)),
        ("bytes=5120-", 416, None),
        ("lines=1-2", 200, slice(None)),
    ],
)
def test_a_part_of_a_file(hub, api, wanted, status, expected):
    push(api)
    connection = http.client.HTTPConnection(hub.url.removeprefix("http://"))
    path = f"/{REPO}/resolve/main/weights/keys.safetensors"
    connection.request("GET", path, headers={"Range": wanted})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    assert response.status == status
    if expected:
        assert data == FILES["weights/keys.safetensors"][expected]
        assert response.headers["X-Linked-Size"] == "5120"


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ("tags: [a", "Invalid YAML"),
        ("license: [mit, other]", "license"),
        ("base_model: ./models/source", "base_model"),
        ("base_model: [org/source, /models/target]", "/models/target"),
        ("value: !!python/object/apply:os.getcwd []", "Invalid YAML"),
        ("- a list", "mapping"),
        ("model-index: [{name: m, results: [{metrics: [{type: r2, value: '0.9'}]}]}]", "r2"),
        ("model-index: [{name: m, results: [{metrics: [{type: r2, value: .nan}]}]}]", "r2"),
        ("model-index: [{name: m}]", "model-index"),
    ],
)
def test_bad_metadata_is_refused(hub, api, lines, match):
    before = push(api)
    readme = f"---\n{lines}\n---\n".encode()
    with pytest.raises(ValueError, match=f"(?s)Invalid metadata.*{match}"):
        push(api, {"README.md": readme})
    hub.inject(Fault("validate-yaml", "status", status=200))
    with refused(400, match, BadRequestError):
        push(api, {"README.md": readme})
    assert api.model_info(REPO).sha == before


def test_missing_metadata_is_warned_about(api):
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        push(api, {"README.md": b"# Hello\n"})


def test_a_token_does_what_its_owner_may(serve):
    hub = serve(tokens=TOKENS)
    push(client(hub))
    assert client(hub).whoami()["orgs"] == [{"type": "org", "name": "org"}]
    for token, status in (("hf_reader", 403), ("hf_other", 403), ("hf_unknown", 401), (False, 401)):
        before = hub.snapshot(REPO)
        api = client(hub, token)
        for write in (
            lambda api=api: push(api, {"config.json": b"[]"}),
            lambda api=api: api.create_tag(REPO, tag="v1"),
            lambda api=api: api.update_repo_settings(REPO, private=True),
            lambda api=api: api.delete_repo(REPO),
        ):
            with refused(status):
                write()
        assert hub.snapshot(REPO) == before
    assert not any(token in str(hub.requests) for token in TOKENS)


def test_a_private_model_is_not_there_for_others(serve):
    hub = serve(tokens=TOKENS)
    api = client(hub)
    api.create_repo(REPO, private=True)
    push(api)
    assert api.model_info(REPO).private
    assert client(hub, "hf_reader").model_info(REPO).private
    for token in ("hf_other", False):
        with refused(404, error=RepositoryNotFoundError):
            client(hub, token).model_info(REPO)
        with refused(404, error=RepositoryNotFoundError):
            client(hub, token).hf_hub_download(REPO, "config.json")
    api.update_repo_settings(REPO, private=False)
    assert not client(hub, False).model_info(REPO).private


def test_a_gated_model_is_seen_but_not_read(serve):
    hub = serve(tokens=TOKENS)
    api = client(hub)
    push(api)
    api.update_repo_settings(REPO, gated="manual")
    assert client(hub, "hf_other").model_info(REPO).gated == "manual"
    for token in ("hf_other", False):
        with refused(403, error=GatedRepoError):
            client(hub, token).hf_hub_download(REPO, "config.json")
    assert Path(api.hf_hub_download(REPO, "config.json")).read_bytes() == b"{}"


def test_repositories_are_created_once_and_deleted(api):
    assert api.create_repo(REPO).repo_id == REPO
    assert api.create_repo(REPO, exist_ok=True).repo_id == REPO
    with refused(409):
        api.create_repo(REPO)
    assert api.create_repo("no-owner").repo_id == "tester/no-owner"
    assert api.file_exists(REPO, ".gitattributes")
    assert not api.file_exists(REPO, "config.json")
    api.delete_repo(REPO)
    assert not api.repo_exists(REPO)
    with refused(404, error=RepositoryNotFoundError):
        api.delete_repo(REPO)
    with refused(404, error=RepositoryNotFoundError):
        api.create_commit(REPO, adds({"config.json": b"{}"}), commit_message="no")


def test_everything_is_there_after_a_restart(serve):
    first = serve()
    api = client(first)
    push(api)
    api.create_tag(REPO, tag="v1")
    api.create_commit(REPO, adds({"a.txt": b"a"}), commit_message="propose", create_pr=True)
    api.update_repo_settings(REPO, private=True)
    before = first.snapshot(REPO)
    first.close()
    second = serve()
    assert second.snapshot(REPO) == before
    assert content(client(second).snapshot_download(REPO, revision="v1")) == FILES


def test_uploads_by_xet_come_back(serve):
    pytest.importorskip("hf_xet")
    hub = serve(xet=True)
    api = client(hub)
    push(api)
    assert not any(request.method == "PUT" for request in hub.requests)
    assert content(api.snapshot_download(REPO)) == FILES
    assert not api.verify_repo_checksums(REPO).mismatches
    assert push(api) == api.model_info(REPO).sha


@pytest.mark.parametrize("xet", [False, True])
def test_it_runs_by_itself(serve, tmp_path, xet):
    if xet:
        pytest.importorskip("hf_xet")
    root = tmp_path / "alone"
    command = [sys.executable, "-m", "tests.hub_server", "--root", root, "--token", "hf_only"]
    environment = {**os.environ, "PYTHONPATH": ""}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            name, url = server.stdout.readline().strip().split("=")
            assert name == "HF_ENDPOINT"
            serve(xet=xet)
            push(HfApi(endpoint=url, token="hf_only"))
            with refused(401):
                push(HfApi(endpoint=url, token="hf_another"))
        finally:
            server.kill()
    assert content(client(serve(root)).snapshot_download(REPO)) == FILES


KEYS = "weights/keys.safetensors"
# The error's type belongs to the HTTP library, which is another one in other clients.
LOST = "(?i)disconnected|reset|broken pipe"
DOWNLOAD = "GET .*/resolve/.*safetensors"


def download(api):
    return Path(api.hf_hub_download(REPO, KEYS, force_download=True)).read_bytes()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_the_client_repeats_what_was_refused(hub, api, status):
    fault = hub.inject(Fault("PUT", "status", status=status, times=3, retry_after=1))
    push(api)
    assert fault.hits == 3
    answers = [request.status for request in hub.requests if request.method == "PUT"]
    assert answers == [status] * 3 + [200]
    assert download(api) == FILES[KEYS]


def test_a_status_brings_its_code_and_message(hub, api):
    push(api)
    hub.inject(Fault("GET", "status", status=404, code="RevisionNotFound", message="gone away"))
    with refused(404, "gone away", RevisionNotFoundError):
        api.model_info(REPO)
    hub.inject(Fault("HEAD", "status", times=float("inf")))
    with pytest.raises(LocalEntryNotFoundError) as caught:
        api.hf_hub_download(REPO, "config.json")
    assert caught.value.__cause__.response.status_code == 503


def test_a_fault_waits_and_ends(hub, api):
    push(api)
    first = hub.inject(Fault("GET /api/models/org", "status", after=1, times=2))
    second = hub.inject(Fault("GET", "status", status=500, times=float("inf")))
    statuses = []
    for _ in range(4):
        with pytest.raises(HfHubHTTPError) as caught:
            api.model_info(REPO)
        statuses.append(caught.value.response.status_code)
    assert statuses == [500, 503, 503, 500]
    assert (first.hits, second.hits) == (2, 2)
    hub.faults.clear()
    assert api.model_info(REPO).id == REPO


def test_a_dropped_request_does_nothing(hub, api):
    push(api)
    before = hub.snapshot(REPO)
    hub.inject(Fault("POST .*/commit/", "drop"))
    with pytest.raises(Exception, match=LOST):
        push(api, {"config.json": b"[]"})
    assert hub.snapshot(REPO) == before
    assert hub.requests[-1].status == 0
    hub.inject(Fault("PUT", "drop", times=2))
    push(api, {"more.bin": b"more"})


def test_a_lost_acknowledgement_leaves_the_commit(hub, api):
    first = push(api)
    hub.inject(Fault("POST .*/commit/", "reset_after"))
    with pytest.raises(Exception, match=LOST):
        push(api, {"config.json": b"[]"})
    hub.inject(Fault("POST .*/tag/", "reset_after"))
    with pytest.raises(Exception, match=LOST):
        api.create_tag(REPO, tag="v1")
    head, parent, _ = api.list_repo_commits(REPO)
    assert parent.commit_id == first
    assert api.list_repo_refs(REPO).tags[0].target_commit == head.commit_id
    assert Path(api.hf_hub_download(REPO, "config.json")).read_bytes() == b"[]"


def test_a_download_that_breaks_is_taken_up_again(hub, api, monkeypatch):
    # The client keeps no less than this.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    push(api)
    fault = hub.inject(Fault(DOWNLOAD, "drop_body", bytes=1000, times=3))
    assert download(api) == FILES[KEYS]
    assert fault.hits == 3
    answers = [request for request in hub.requests if request.path.endswith("keys.safetensors")]
    assert [request.status for request in answers] == [200, 200, 206, 206, 206]


def test_an_upload_that_breaks_is_repeated(hub, api):
    fault = hub.inject(Fault("PUT", "drop_body", bytes=1000, times=2))
    push(api)
    assert fault.hits == 2
    assert download(api) == FILES[KEYS]


def test_a_short_answer_is_noticed_by_its_length(hub, api):
    push(api)
    hub.inject(Fault(DOWNLOAD, "truncate", bytes=1000))
    with pytest.raises(OSError, match="should be of size 5120 but has size 1000"):
        download(api)
    assert download(api) == FILES[KEYS]


def test_a_corrupt_download_has_one_bit_changed(hub, api):
    push(api)
    hub.inject(Fault(DOWNLOAD, "corrupt", bytes=300))
    expected = bytearray(FILES[KEYS])
    expected[300] ^= 1
    assert download(api) == expected
    assert [bad["path"] for bad in api.verify_repo_checksums(REPO).mismatches] == [KEYS]


@pytest.mark.parametrize("kind", ["corrupt", "truncate"])
@pytest.mark.parametrize("chunk_size", [1000, 64_000])
def test_a_spoilt_upload_is_refused(serve, kind, chunk_size):
    hub = serve(chunk_size=chunk_size)
    api = client(hub)
    hub.create_repo(REPO)
    before = hub.snapshot(REPO)
    hub.inject(Fault("PUT", kind, bytes=7))
    with pytest.raises(RuntimeError, match="Error while uploading"):
        push(api)
    assert hub.snapshot(REPO) == before
    push(api)
    assert download(api) == FILES[KEYS]


def test_a_slow_answer_takes_its_time(hub, api):
    push(api)
    hub.inject(Fault(DOWNLOAD, "slow", bytes=1024, delay=0.03))
    start = time.perf_counter()
    assert download(api) == FILES[KEYS]
    assert time.perf_counter() - start > 5 * 0.03


def test_somebody_else_is_faster(hub, api):
    first = push(api)
    other = {}

    def push_first():
        other["commit"] = hub.commit(REPO, {"config.json": b"[]"})
        hub.move_tag(REPO, "v1", other["commit"])

    hub.inject(Fault("POST .*/commit/main", "call", call=push_first))
    with refused(412):
        push(api, {"config.json": b"{ }"}, parent_commit=first)
    with refused(409):
        api.create_tag(REPO, tag="v1", revision=first)
    assert api.model_info(REPO, revision="v1").sha == other["commit"] == api.model_info(REPO).sha


def test_random_faults_repeat_themselves(serve, tmp_path):
    kinds = ("status", "drop", "drop_body", "truncate", "slow", "reset_after")
    answers = []
    for run in range(2):
        hub = serve(tmp_path / str(run))
        api = client(hub)
        push(api)
        fault = hub.inject(RandomFaults(seed=3, rate=0.4, kinds=kinds, match="GET|HEAD"))
        for _ in range(10):
            try:
                answers.append((run, download(api) == FILES[KEYS]))
            # An error of the HTTP library too, whose name depends on the client's version.
            except Exception as error:
                answers.append((run, type(error)))
        assert fault.hits > 3
    assert [answer for run, answer in answers if run == 0] == [
        answer for run, answer in answers if run == 1
    ]


def test_a_closed_hub_answers_no_open_connection(hub):
    def ask(connection):
        connection.request("GET", "/api/models")
        return connection.getresponse().read()

    connection = http.client.HTTPConnection(hub.url.removeprefix("http://"))
    assert ask(connection) == b"[]"
    hub.close()
    with closing(connection), pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(connection)
