"""What is said about versions changes on main, and no version with it."""

import json

import pytest
from hub_mappers import REPO, mapper_files, publish, say
from hub_server import CLIENT_WARNING, Fault, HubServer, connect_client, fast_retries
from huggingface_hub import close_session

from kvhub.errors import ConflictError, NotFoundError, UsageError, VerificationError
from kvhub.hub import list_versions, read_status
from kvhub.package import verify
from kvhub.publishing import push
from kvhub.status import deprecate, unyank, yank

pytestmark = pytest.mark.filterwarnings(CLIENT_WARNING)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with HubServer(tmp_path / "hub") as server:
        connect_client(monkeypatch, server, tmp_path / "cache")
        fast_retries(monkeypatch)
        monkeypatch.setenv("HF_TOKEN", "hf_writer")
        publish(server, "1.0.0")
        publish(server, "1.1.0", seed=1)
        yield server
        close_session()


def text(hub, path, revision="main"):
    return hub.store.read(hub.store.repo(REPO).files(revision)[path]).decode()


def versions(hub):
    """What the tags are and hold."""
    state = hub.snapshot(REPO)
    return {tag: (commit, state["files"][commit]) for tag, commit in state["tags"].items()}


def test_a_version_is_yanked_and_taken_back(hub):
    before = versions(hub)
    made = yank(REPO, "v1.0.0", "fitted on padded text")
    assert hub.snapshot(REPO)["branches"]["main"] == made
    assert [item.yanked for item in list_versions(REPO)] == [None, "fitted on padded text"]
    assert yank(REPO, "1.0.0", "fitted on padded text") == made
    yank(REPO, "1.1.0", "too")
    assert read_status(REPO).yanked == {"1.0.0": "fitted on padded text", "1.1.0": "too"}
    unyank(REPO, "1.0.0")
    assert read_status(REPO).yanked == {"1.1.0": "too"}
    assert versions(hub) == before
    assert set(json.loads(text(hub, "status.json"))) == {
        *("schema_version", "yanked", "new_version", "deprecated")
    }


def test_a_repository_names_its_successor_in_the_status_and_the_card(hub, tmp_path):
    card = text(hub, "README.md").replace("\n---\n", "\nown: 1.10  # mine\n---\n", 1)
    card = card.replace("\n", "\r\n") + "My own words.\r\n"
    hub.commit(REPO, {"README.md": card.encode(), "kvhub.sig": b"{}"})
    before = versions(hub)
    for successor in ("org/better", "org/best"):
        deprecate(REPO, reason="better fit", new_version=successor)
        status = read_status(REPO)
        assert (status.deprecated, status.new_version) == ("better fit", successor)
        _, metadata, body = text(hub, "README.md").split("---", 2)
        assert metadata.count("new_version:") == 1
        assert f"new_version: {successor}" in metadata
        assert "own: 1.10  # mine\r\n" in metadata
        assert body == card.split("---", 2)[2]
    # Main is a package still, and none that an old signature could be for.
    files = hub.store.repo(REPO).files("main")
    assert "kvhub.sig" not in files
    (tmp_path / "main").mkdir()
    for name in [*mapper_files(), "status.json"]:
        (tmp_path / "main" / name).write_bytes(hub.store.read(files[name]))
    verify(tmp_path / "main")
    deprecate(REPO, reason=None)
    assert text(hub, "README.md") == card
    assert (read_status(REPO).deprecated, read_status(REPO).new_version) == (None, None)
    assert versions(hub) == before


def test_a_successor_outlives_the_next_version(hub, tmp_path):
    deprecate(REPO, reason="better fit", new_version="org/better")
    package = tmp_path / "package"
    package.mkdir()
    for name, data in mapper_files(seed=2).items():
        (package / name).write_bytes(data)
    status = text(hub, "status.json")
    assert push(package, REPO).version == "1.2.0"
    assert "new_version: org/better" in text(hub, "README.md", "v1.2.0")
    assert text(hub, "status.json") == status


def test_a_repository_without_a_card_can_be_deprecated(hub):
    hub.commit(REPO, {"README.md": None})
    deprecate(REPO, reason="better fit", new_version="org/better")
    assert read_status(REPO).new_version == "org/better"
    hub.commit(REPO, {"README.md": b"# Without metadata\n"})
    deprecate(REPO, reason="better fit", new_version="org/best")
    assert text(hub, "README.md") == "---\nnew_version: org/best\n---\n\n# Without metadata\n"


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (lambda: yank(REPO, "3.0.0", "no"), NotFoundError, r"it has: 1\.1\.0, 1\.0\.0"),
        (lambda: yank(REPO, "one", "no"), UsageError, "is not a version"),
        (lambda: yank(REPO, "1.0.0", " "), UsageError, "for a reason"),
        (lambda: yank("org/absent", "1.0.0", "no"), NotFoundError, "org/absent"),
        (lambda: yank(f"{REPO}@main", "1.0.0", "no"), UsageError, "with a revision"),
        (lambda: unyank(REPO, "1.0.0"), NotFoundError, "yanked are: none"),
        (lambda: deprecate(REPO, reason="no", new_version="a@b"), UsageError, "'a'"),
        (lambda: deprecate(REPO, reason="no", new_version="a/b@1.0.0"), UsageError, "revision"),
    ],
)
def test_what_makes_no_sense_is_refused(hub, act, error, words):
    before = hub.snapshot(REPO)
    with pytest.raises(error, match=words):
        act()
    assert hub.snapshot(REPO) == before


def test_somebody_elses_status_is_not_overwritten(hub):
    hub.inject(Fault("POST .*/commit/main", "call", call=lambda: say(hub, deprecated="theirs")))
    with pytest.raises(ConflictError):
        yank(REPO, "1.0.0", "mine")
    assert read_status(REPO).deprecated == "theirs"
    yank(REPO, "1.0.0", "mine")
    status = read_status(REPO)
    assert (status.deprecated, status.yanked) == ("theirs", {"1.0.0": "mine"})


def test_a_status_that_cannot_be_read_is_not_overwritten(hub):
    hub.commit(REPO, {"status.json": b'{"schema_version": 2}'})
    before = hub.snapshot(REPO)
    with pytest.raises(VerificationError):
        yank(REPO, "1.0.0", "mine")
    assert hub.snapshot(REPO) == before


def test_an_answer_that_got_lost_is_made_up_for(hub):
    hub.inject(Fault("POST .*/commit/main", "reset_after"))
    assert yank(REPO, "1.0.0", "mine") == hub.snapshot(REPO)["branches"]["main"]
