"""Whatever the Hub's client raises names its cause and the way out, and never a token."""

import errno
import re
import socket
import traceback
from types import SimpleNamespace

import pytest
from hub_mappers import REPO, publish
from hub_server import Fault, HubServer, connect_client, fast_retries
from huggingface_hub import close_session, constants, errors
from huggingface_hub.utils import httpx

from kvhub.errors import (
    AuthError,
    ConflictError,
    KVHubError,
    NetworkError,
    NotFoundError,
    UsageError,
)
from kvhub.hub import client, translated

TOKEN = "hf_" + "S3cr3t" * 6
REFS, HEAD, BODY = "GET .*/refs", "HEAD .*/resolve/", "GET .*/resolve/"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        publish(server)
        server.create_repo("org/gated", gated="manual")
        server.commit("org/gated", {"config.json": b"{}"})
        yield server
        close_session()


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    server.faults.clear()
    connect_client(monkeypatch, server, tmp_path / "cache")
    fast_retries(monkeypatch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return server


def read_refs(repo_id=REPO):
    with translated(f"reading the versions of {repo_id}"):
        client().list_repo_refs(repo_id)


def fetch(name="config.json", revision="main", repo_id=REPO, force=False):
    with translated(f"downloading {name} of {repo_id}"):
        client().hf_hub_download(repo_id, name, revision=revision, force_download=force)


def failure(act, **arguments):
    """The error of an act, which shows no token anywhere."""
    with pytest.raises(KVHubError) as caught:
        act(**arguments)
    shown = "".join(traceback.format_exception(caught.value))
    assert "S3cr3t" not in shown + caught.value.message + caught.value.hint
    assert caught.value.hint
    return caught.value


# What happens, the class of the error, and what its text says of the cause.
ANSWERS = [
    ({"status": 401, "message": "Invalid credentials"}, AuthError, "401 .Invalid credentials"),
    ({"status": 403, "message": "not yours"}, AuthError, "not permitted.*403 .not yours"),
    ({"status": 403, "code": "GatedRepo", "message": "ask"}, AuthError, "is gated.*ask"),
    ({"status": 403, "message": "Access to this resource is disabled."}, AuthError, "disabled"),
    ({"status": 404, "code": "RepoNotFound"}, NotFoundError, "no such repository"),
    ({"status": 404, "code": "RevisionNotFound"}, NotFoundError, "no such revision"),
    ({"status": 404, "code": "EntryNotFound"}, NotFoundError, "no such file"),
    ({"status": 409, "message": "exists"}, ConflictError, "exists already.*409"),
    ({"status": 412, "message": "stale"}, ConflictError, "somebody else was faster.*412"),
    ({"status": 429}, NetworkError, "rate limit"),
    ({"status": 429, "retry_after": 17}, NetworkError, "rate limit.*wait 17 seconds"),
    ({"status": 400, "message": "bad card"}, UsageError, "refused as it stands.*bad card"),
    *(({"status": status}, NetworkError, f"answered {status}") for status in (500, 502, 503, 504)),
]


@pytest.mark.parametrize(("fault", "error", "text"), ANSWERS)
@pytest.mark.parametrize(("act", "match"), [(read_refs, REFS), (fetch, HEAD)])
def test_answers_are_told_apart(hub, act, match, fault, error, text):
    # Of the answer to HEAD the client only sees the headers; it asks again up to 5 times.
    hub.inject(Fault(match, "status", times=20, **fault))
    found = failure(act)
    assert type(found) is error
    assert isinstance(found.__cause__, Exception)
    for part in (text, REPO, hub.url):
        assert re.search(part, found.message), found.message


def test_a_limit_without_an_hour_says_later(hub):
    hub.inject(Fault(REFS, "status", status=429))
    assert "later" in failure(read_refs).hint
    hub.inject(Fault(REFS, "status", status=429, retry_after=17))
    assert "in 17 seconds" in failure(read_refs).hint


@pytest.mark.parametrize(
    ("act", "match", "fault", "text"),
    [
        (read_refs, REFS, {"kind": "drop"}, "connection .* failed"),
        (fetch, HEAD, {"kind": "drop"}, "connection .* failed"),
        (fetch, BODY, {"kind": "drop"}, "connection .* failed"),
        (fetch, BODY, {"kind": "drop_body", "bytes": 0}, "connection .* failed"),
        (fetch, BODY, {"kind": "truncate", "bytes": 9}, "should be of size .* but has size 9"),
        (read_refs, REFS, {"kind": "truncate", "bytes": 9}, "not the Hub's"),
        (read_refs, REFS, {"kind": "corrupt", "bytes": 0}, "not the Hub's"),
        # One bit of the name "branches" or of its first letter.
        (read_refs, REFS, {"kind": "corrupt", "bytes": 2}, "not the Hub's: .branches"),
    ],
)
def test_broken_connections_and_bodies_are_named(hub, act, match, fault, text):
    hub.inject(Fault(match, times=20, **fault))
    found = failure(act)
    assert type(found) is NetworkError
    assert re.search(text, found.message), found.message


def test_a_slow_answer_is_waited_for(hub):
    hub.inject(Fault(BODY, "slow", bytes=200, delay=0.001))
    fetch()


def test_no_answer_in_time_is_named(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    hub.inject(Fault(BODY, "slow", times=20, bytes=1, delay=0.2))
    assert "did not answer in time" in failure(fetch).message


def test_nobody_listening_is_named(hub, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = SimpleNamespace(url=f"http://127.0.0.1:{free.getsockname()[1]}")
        connect_client(monkeypatch, nobody, constants.HF_HUB_CACHE)
        for act in (read_refs, fetch):
            found = failure(act)
            assert type(found) is NetworkError
            assert f"to the Hub at {nobody.url} failed" in found.message
            assert "HF_ENDPOINT" in found.hint


@pytest.mark.parametrize("act", [read_refs, fetch])
def test_offline_mode_is_named(hub, monkeypatch, act):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = failure(act)
    assert type(found) is NetworkError
    assert "offline mode" in found.message
    assert "HF_HUB_OFFLINE" in found.hint


def test_what_is_not_in_the_cache_is_named(hub):
    with pytest.raises(NetworkError, match="not in the cache"), translated("reading a file"):
        client().hf_hub_download(REPO, "config.json", local_files_only=True)


def test_a_forced_download_hides_no_cause(hub):
    hub.inject(Fault(HEAD, "status", times=20, status=503))
    assert "answered 503" in failure(fetch, force=True).message


def test_missing_things_are_told_apart_on_a_hub(hub):
    assert "no such repository" in failure(read_refs, repo_id="org/none").message
    assert "no such revision" in failure(fetch, revision="v9.9.9").message
    found = failure(fetch, name="none.json")
    assert type(found) is NotFoundError
    assert "no such file" in found.message


def test_a_gated_repository_is_not_a_missing_one(hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    found = failure(fetch, repo_id="org/gated")
    assert type(found) is AuthError
    assert "hf auth login" in found.hint


def test_who_has_no_token_is_told_so(hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(AuthError, match="wants a token"), translated("asking who you are"):
        client().whoami()


@pytest.mark.parametrize("token", ["hf_S3cr3t\x0bS3cr3t S3cr3t", "hf_S3cr3t\N{EURO SIGN}"])
def test_a_token_that_cannot_be_sent_is_not_shown(hub, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    found = failure(read_refs)
    assert type(found) is AuthError
    assert "token" in found.message


@pytest.mark.parametrize(
    "echo",
    [
        f"the token {TOKEN} is old",
        "the token hf_S3cr3tS3cr3tS3cr3tS3cr3t is old",
        "Authorization: Bearer S3cr3t",
        "see https://me:S3cr3t@example.org/x",
        "see https://example.org/x?X-Amz-Signature=S3cr3t&id=1",
    ],
)
def test_a_server_that_repeats_a_secret_is_not_quoted(hub, echo):
    hub.inject(Fault(REFS, "status", status=403, message=echo))
    assert "403" in failure(read_refs).message


def test_a_token_of_another_form_is_not_quoted(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "S3cr3t-of-a-mirror")
    hub.inject(Fault(REFS, "status", status=403, message="no S3cr3t-of-a-mirror here"))
    assert "no <token> here" in failure(read_refs).message


def test_an_address_with_a_password_is_shown_without(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", hub.url.replace("//", "//me:S3cr3t@"))
    hub.inject(Fault(REFS, "status", status=500))
    assert hub.url in failure(read_refs).message


def test_a_bad_repository_name_is_a_usage_error():
    with pytest.raises(UsageError, match="Asking failed"), translated("asking"):
        client().model_info("a/b/c")


@pytest.mark.parametrize(
    ("original", "error"),
    [
        (ConnectionError("Xet"), NetworkError),
        (ConnectionResetError(errno.ECONNRESET, "reset"), NetworkError),
        (TimeoutError("lock"), NetworkError),
        (RuntimeError("Xet"), NetworkError),
        (OSError("Consistency check failed"), NetworkError),
        (httpx.InvalidURL("no address"), NetworkError),
        (errors.FileMetadataError("no ETag"), NetworkError),
        (OSError(errno.ENOSPC, "No space left on device"), UsageError),
        (PermissionError(errno.EACCES, "Permission denied"), UsageError),
        (ValueError("Invalid metadata in README.md"), UsageError),
    ],
)
def test_errors_that_are_no_answers_are_translated(original, error):
    with pytest.raises(KVHubError) as caught, translated("sending"):
        raise original
    assert type(caught.value) is error
    assert caught.value.__cause__ is original
    assert caught.value.message.startswith("Sending failed: ")
    assert str(original.args[-1]) in caught.value.message or isinstance(original, TimeoutError)


def test_errors_of_kvhub_and_mistakes_pass():
    for error in (UsageError("so"), TypeError("so")):
        with pytest.raises(type(error)) as caught, translated("sending"):
            raise error
        assert caught.value is error
