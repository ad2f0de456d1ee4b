"""A reference becomes the commit that it names on the Hub, or in the cache without one."""

import json
import re

import pytest
from hub_mappers import REPO, asked, publish, say
from hub_server import Fault, HubServer, connect_client, fast_retries
from huggingface_hub import close_session, constants

from kvhub import __version__
from kvhub.errors import (
    AuthError,
    KVHubError,
    NetworkError,
    NotFoundError,
    VerificationError,
)
from kvhub.hub import (
    Status,
    cached,
    client,
    list_versions,
    pull,
    read_status,
    resolve,
    search,
)
from kvhub.versions import parse_reference

REFS, STATUS = "GET .*/refs", "GET .*/status.json"
CARD = b"---\nlibrary_name: kvhub\ntags: [kvhub]\n---\n# A mapper\n"


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


def find(revision=None):
    return resolve(parse_reference(f"{REPO}@{revision}" if revision else REPO))


def get(revision=None):
    return pull(parse_reference(f"{REPO}@{revision}" if revision else REPO))


def failure(error, act, *arguments):
    with pytest.raises(KVHubError) as caught:
        act(*arguments)
    assert type(caught.value) is error
    return caught.value


def test_the_client_says_who_it_is(hub):
    publish(hub, "1.0.0")
    list_versions(REPO)
    assert hub.requests
    assert all(f"kvhub/{__version__}" in request.user_agent for request in hub.requests)
    assert client().endpoint == hub.url


def test_versions_come_newest_first_with_what_was_yanked(hub):
    commits = {text: publish(hub, text, seed) for seed, text in enumerate(("1.9.0", "1.10.0"))}
    commits["2.0.0-rc.1"] = publish(hub, "2.0.0-rc.1", 0)
    for tag in ("latest", "v3", "1.0.0", "v1.2.3.4"):
        hub.move_tag(REPO, tag, "main")
    say(hub, yanked={"1.10.0": "bad fit"})
    found = [(str(each.version), each.commit, each.yanked) for each in list_versions(REPO)]
    assert found == [
        ("2.0.0-rc.1", commits["2.0.0-rc.1"], None),
        ("1.10.0", commits["1.10.0"], "bad fit"),
        ("1.9.0", commits["1.9.0"], None),
    ]


def test_a_repository_without_a_status_is_well(hub):
    publish(hub)
    assert read_status(REPO) == Status({}, None, None)
    assert list_versions(REPO) == []


def test_the_status_is_that_of_main(hub):
    publish(hub, "1.0.0")
    say(hub, yanked={"1.0.0": "bad"}, new_version="org/other", deprecated="old")
    assert read_status(REPO) == Status({"1.0.0": "bad"}, "org/other", "old")
    say(hub)
    assert read_status(REPO) == Status({}, None, None)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"schema_version": 2, "yanked": {}}',
        b'{"schema_version": 1, "yanked": ["1.0.0"]}',
        b'{"schema_version": 1, "yanked": {"1.0.0": true}}',
        b'{"schema_version": 1, "yanked": {}, "new_version": 3}',
    ],
)
def test_a_status_that_cannot_be_read_is_not_taken_for_none(hub, content):
    publish(hub, "1.0.0")
    hub.commit(REPO, {"status.json": content})
    assert "yanked is unknown" in failure(VerificationError, find).message


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "corrupt", "bytes": 60},
        {"kind": "truncate", "bytes": 60},
        {"kind": "status", "status": 503},
        {"kind": "drop"},
    ],
)
def test_a_damaged_status_is_a_network_error(hub, fault):
    publish(hub, "1.0.0")
    say(hub, yanked={"1.0.0": "it gives nothing but noise"})
    hub.inject(Fault(STATUS, **fault))
    assert "status.json" in failure(NetworkError, read_status, REPO).message
    assert read_status(REPO).yanked == {"1.0.0": "it gives nothing but noise"}


def test_every_kind_of_revision_is_found(hub):
    first, second = publish(hub, "1.0.0"), publish(hub, "1.1.0", 1)
    later = publish(hub, "2.0.0-rc.1", 2)
    hub.move_tag(REPO, "stable", first)
    for revision, commit, version in [
        (None, second, "1.1.0"),
        ("1.0.0", first, "1.0.0"),
        ("v1.0.0", first, "1.0.0"),
        ("2.0.0-rc.1", later, "2.0.0-rc.1"),
        ("^1.0", second, "1.1.0"),
        ("~1.0", first, "1.0.0"),
        ("<1.1", first, "1.0.0"),
        (first, first, "1.0.0"),
        ("main", later, "2.0.0-rc.1"),
        ("stable", first, "1.0.0"),
    ]:
        found = find(revision)
        assert (found.commit, found.version, found.requested) == (commit, version, revision)
        assert found.status == Status({}, None, None)


def test_what_was_never_released_is_only_found_by_its_branch(hub):
    commit = publish(hub)
    assert find("main").commit == commit
    assert find("main").version is None
    error = failure(NotFoundError, find)
    assert "it has: none" in error.message
    assert f"kvhub pull {REPO}@main" in error.hint


def test_a_pull_request_can_be_named(hub):
    publish(hub, "1.0.0")
    repo = hub.store.repo(REPO)
    hub.store.commit(REPO, "main", [], title="Proposal", create_pr=True)
    assert find("refs/pr/1").commit == repo.pulls["refs/pr/1"]


def test_what_is_yanked_is_only_found_by_its_name(hub):
    first, second = publish(hub, "1.0.0"), publish(hub, "1.1.0", 1)
    say(hub, yanked={"1.1.0": "bad fit"})
    assert find().commit == find("^1").commit == first
    assert find("1.1.0").commit == find(second).commit == second
    assert find("1.1.0").status.yanked == {"1.1.0": "bad fit"}
    say(hub, yanked={"1.1.0": "bad fit", "1.0.0": "worse"})
    for revision in (None, "^1"):
        assert "1.1.0 (yanked), 1.0.0 (yanked)" in failure(NotFoundError, find, revision).message


@pytest.mark.parametrize("revision", ["1.2.0", "^2", "next", "0" * 40])
def test_what_is_not_there_names_what_is(hub, revision):
    publish(hub, "1.0.0")
    error = failure(NotFoundError, get, revision)
    assert revision in error.message
    assert "it has: " in error.message or revision == "0" * 40
    assert "kvhub versions" in error.hint


def test_a_missing_repository_is_no_network_error(hub):
    assert "no such repository" in failure(NotFoundError, find).message


def test_a_refusal_does_not_fall_back_on_the_cache(hub):
    publish(hub, "1.0.0")
    get()
    for status in (401, 403):
        hub.inject(Fault(REFS, "status", status=status))
        failure(AuthError, find)


def test_a_moved_version_is_never_followed(hub):
    first, second = publish(hub, "1.0.0"), publish(hub, seed=1)
    get("1.0.0")
    hub.move_tag(REPO, "v1.0.0", second)
    for revision in ("1.0.0", "v1.0.0", "^1", None, second):
        message = failure(VerificationError, find, revision).message
        assert f"v1.0.0 of {REPO} was moved: expected commit {first}" in message
        assert f"found {second}" in message
    assert get(first)[0].version is None


def test_a_version_deleted_on_the_hub_is_gone(hub):
    publish(hub, "1.0.0")
    get()
    client().delete_tag(REPO, tag="v1.0.0", token="any")
    assert "it has: none" in failure(NotFoundError, find, "1.0.0").message


@pytest.mark.parametrize(
    ("match", "fault"),
    [
        (REFS, {"kind": "drop"}),
        (REFS, {"kind": "status", "status": 503}),
        (REFS, {"kind": "status", "status": 429}),
        (STATUS, {"kind": "truncate", "bytes": 3}),
        ("nothing", {"kind": "drop"}),
    ],
)
def test_without_the_hub_the_cache_answers(hub, offline, match, fault):
    first, second = publish(hub, "1.0.0"), publish(hub, "1.1.0", 1)
    say(hub, yanked={"0.9.0": "old"})
    for revision in ("1.0.0", "main"):
        get(revision)
    if match == "nothing":
        offline()
    hub.inject(Fault(match, times=99, **fault))
    main = find("main").commit
    assert main not in (first, second)
    for revision in (None, "1.0.0", "^1", "1.x", first):
        found = find(revision)
        assert (found.commit, found.version) == (first, "1.0.0")
        assert found.status is None
    for revision in ("1.1.0", second, "^1.1", "other", "^2"):
        error = failure(NetworkError, find, revision)
        assert f"of {REPO} it has main, v1.0.0" in error.message
        assert f"kvhub pull {REPO}@" in error.hint


def test_an_empty_cache_says_so(hub, offline):
    publish(hub, "1.0.0")
    offline()
    error = failure(NetworkError, find)
    assert "offline mode" in error.message
    assert f"nothing of {REPO}" in error.message
    assert "kvhub pull" not in error.hint
    assert cached() == []


@pytest.mark.parametrize("content", ["", "zzz", "../../x", "0" * 39])
def test_a_damaged_ref_in_the_cache_is_not_believed(hub, offline, tmp_path, content):
    commit = publish(hub, "1.0.0")
    get()
    ref = next((tmp_path / "cache").rglob("refs/v1.0.0"))
    ref.write_text(content)
    assert find().commit == commit
    offline()
    failure(NetworkError, find)


def test_a_commit_that_is_none_is_not_used(hub):
    publish(hub, "1.0.0")
    commit = hub.store.repo(REPO).tags["v1.0.0"]
    hub.store.repo(REPO).tags["v1.0.0"] = commit[:-1] + "x"
    failure(NetworkError, find)


def test_a_search_finds_mappers_alone(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "any")
    publish(hub, **{"README.md": CARD})
    for repo, card in [("org/other", CARD), ("me/mapper", CARD), ("org/model", b"# None\n")]:
        hub.create_repo(repo, private=repo == "me/mapper")
        hub.commit(repo, {"README.md": card})
    assert {each["repo_id"] for each in search(None, None)} == {REPO, "org/other", "me/mapper"}
    assert {each["repo_id"] for each in search("org", "map")} == {REPO}
    (found,) = search("me", None)
    assert found["private"] is True
    assert found["downloads"] == found["likes"] == 0
    assert re.match(r"\d{4}-\d\d-\d\dT", found["last_modified"])
    json.dumps(found)
    hub.inject(Fault("GET /api/models", "status", times=9, status=429, retry_after=5))
    assert "5 seconds" in failure(NetworkError, search, None, None).message


def test_a_search_goes_over_pages(tmp_path, monkeypatch):
    with HubServer(tmp_path / "hub", page_size=2) as server:
        connect_client(monkeypatch, server, tmp_path / "cache")
        for number in range(5):
            server.create_repo(f"org/mapper-{number}")
            server.commit(f"org/mapper-{number}", {"README.md": CARD})
        assert len(search("org", None)) == 5


def test_a_version_costs_two_requests_to_find(hub):
    publish(hub, "1.0.0")
    asked(hub)
    find("^1")
    assert len(asked(hub)) == 2
