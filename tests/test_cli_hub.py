"""The commands of an artifact's life, against a real Hub on loopback over real HTTP."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from hub_server import CLIENT_WARNING, Fault, HubServer, connect_client
from mapping import random_mapper
from test_signing import write_keys
from tiny import tiny_model

from kvhub import KVMapper, cli
from kvhub.errors import UsageError, VerificationError
from kvhub.package import save
from kvhub.store import mapper_path

pytestmark = pytest.mark.filterwarnings(CLIENT_WARNING)
REPO = "org/mine"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with HubServer(tmp_path / "hub") as server:
        connect_client(monkeypatch, server, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", "hf_any")
        yield server


@pytest.fixture
def models():
    return tiny_model("qwen3", 2, seed=1), tiny_model("qwen3", 3, seed=2)


@pytest.fixture
def kvhub(capsys, monkeypatch):
    """Run the command in this process; its exit code, JSON and stderr."""

    def run(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["kvhub", *map(str, arguments), "--json"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        assert int(stopped.value.code or 0) == code, captured.err
        return json.loads(captured.out)

    return run


def make(models, name="mine", seed=0):
    mapper = random_mapper(*models, seed=seed)
    save(mapper, mapper_path(name), overwrite=True)
    return mapper


def test_a_mapper_goes_to_the_hub_and_comes_back_bit_equal(hub, kvhub, models, tmp_path, caplog):
    mapper = make(models)
    planned = kvhub("push", "mine", "--repo-id", REPO, "--dry-run")
    assert planned["version"] == "1.0.0"
    assert {file["action"] for file in planned["files"]} == {"add"}
    assert not [request for request in hub.requests if request.method != "GET"]
    pushed = kvhub("push", "mine", "--repo-id", REPO)
    assert (pushed["version"], pushed["tag"], pushed["changed"]) == ("1.0.0", "v1.0.0", True)
    assert kvhub("push", "mine", "--repo-id", REPO)["changed"] is False

    for revision in (None, "v1.0.0", "1.0.0", "^1.0", pushed["commit"]):
        loaded = KVMapper.from_pretrained(REPO, revision=revision)
        for name, tensor in loaded.tensors().items():
            assert torch.equal(tensor, mapper.tensors()[name])
    assert kvhub("pull", f"{REPO}@1.0.0")["commit"] == pushed["commit"]
    assert kvhub("verify", REPO)["verified"] is True
    assert kvhub("info", f"{REPO}@^1")["target"]["num_layers"] == 3
    assert [each["repo_id"] for each in kvhub("list")["cached"]] == [REPO]
    assert [each["repo_id"] for each in kvhub("list", "--author", "org")["hub"]] == [REPO]

    make(models, seed=1)
    difference = kvhub("diff", f"{REPO}@1.0.0", "mine")
    assert difference["bump"] == "minor"
    assert not difference["compatibility"]
    assert len(difference["tensors"]) == 4 * 3
    assert kvhub("push", "mine", "--repo-id", REPO)["version"] == "1.1.0"
    found = kvhub("versions", REPO)["versions"]
    assert [each["version"] for each in found] == ["1.1.0", "1.0.0"]

    lock = tmp_path / "kvhub.lock"
    assert kvhub("lock", f"{REPO}@~1.0", "--file", lock)["mappers"][REPO]["version"] == "1.0.0"
    assert kvhub("sync", "--file", lock, "--frozen")["mappers"][0]["changed"] is False
    hub.close()  # and offline, from the cache and from the lock file
    with caplog.at_level("WARNING", logger="kvhub"):
        KVMapper.from_pretrained(REPO, revision="^1.0")
    assert "could not be asked; org/mine@1.0.0 is the newest in the cache" in caplog.text
    for options in ({"revision": "v1.0.0"}, {"lock": lock}):
        loaded = KVMapper.from_pretrained(REPO, **options)
        for name, tensor in loaded.tensors().items():
            assert torch.equal(tensor, mapper.tensors()[name])


def test_push_to_hub_publishes_what_from_pretrained_loads(hub, models):
    mapper = random_mapper(*models)
    assert mapper.push_to_hub(REPO, version="2.0.0").version == "2.0.0"
    loaded = KVMapper.from_pretrained(REPO, revision="v2.0.0", dtype=torch.float64)
    assert loaded.key_weight.dtype == torch.float64
    assert torch.equal(loaded.key_weight, mapper.key_weight.double())


def test_a_signed_version_is_its_signers(hub, kvhub, models, tmp_path):
    ann, eve = (
        write_keys(tmp_path, name, ec.generate_private_key(ec.SECP256R1()))
        for name in ("ann", "eve")
    )
    mapper = make(models)
    kvhub("push", "mine", "--repo-id", REPO, "--private-key", ann[0])
    assert kvhub("verify", REPO, "--public-key", ann[1])["signed"] is True
    refused = kvhub("verify", REPO, "--public-key", eve[1], code=7)
    assert "not what the owner" in refused["error"]["message"]
    loaded = KVMapper.from_pretrained(REPO, public_key=ann[1])
    assert torch.equal(loaded.key_weight, mapper.key_weight)
    with pytest.raises(VerificationError, match="not what the owner"):
        KVMapper.from_pretrained(REPO, public_key=eve[1])
    with pytest.raises(VerificationError, match="not signed"):
        KVMapper.from_pretrained("mine", public_key=ann[1])
    kvhub("push", "mine", "--repo-id", "org/unsigned")
    with pytest.raises(VerificationError, match="is not signed"):
        KVMapper.from_pretrained("org/unsigned", public_key=ann[1])
    # Files of people's own in the repository are no part of what is signed.
    hub.commit(REPO, {"NOTES.md": b"mine"})
    assert kvhub("verify", f"{REPO}@main", "--public-key", ann[1])["signed"] is True
    # A manifest that is not even JSON: the signature is what speaks first.
    hub.commit(REPO, {"manifest.json": b"{"})
    with pytest.raises(VerificationError, match="not what the owner"):
        KVMapper.from_pretrained(REPO, revision="main", public_key=ann[1])
    with pytest.raises(VerificationError, match="not JSON"):
        KVMapper.from_pretrained(REPO, revision="main")
    # What was verified is there offline, and a damaged cache is told from a network failure.
    hub.close()
    assert torch.equal(
        KVMapper.from_pretrained(REPO, public_key=ann[1]).key_weight, mapper.key_weight
    )
    damaged = Path(kvhub("pull", REPO)["path"]) / "model.safetensors"
    damaged.resolve().write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(VerificationError, match="not what the owner"):
        KVMapper.from_pretrained(REPO, public_key=ann[1])


def test_withdrawn_versions_and_repositories_are_told(hub, kvhub, models, tmp_path, caplog):
    make(models)
    kvhub("push", "mine", "--repo-id", REPO)
    make(models, seed=1)
    kvhub("push", "mine", "--repo-id", REPO)
    kvhub("yank", REPO, "1.1.0", "--reason", "fitted on padded text")
    assert kvhub("pull", REPO)["version"] == "1.0.0"
    with caplog.at_level("WARNING", logger="kvhub"):
        KVMapper.from_pretrained(REPO, revision="1.1.0")
    assert "1.1.0 of org/mine was yanked: fitted on padded text" in caplog.text
    refused = kvhub("lock", f"{REPO}@1.1.0", "--file", tmp_path / "kvhub.lock", code=8)
    assert "padded" in refused["error"]["message"]
    kvhub("unyank", REPO, "1.1.0")
    assert kvhub("pull", REPO)["version"] == "1.1.0"
    kvhub("deprecate", REPO, "--reason", "better fit", "--new-version", "org/other")
    caplog.clear()
    with caplog.at_level("WARNING", logger="kvhub"):
        KVMapper.from_pretrained(REPO)
    assert "org/mine is deprecated: better fit Use org/other." in caplog.text


@pytest.mark.parametrize(
    ("arguments", "code", "pattern"),
    [
        (("push", "absent"), 3, "No local mapper 'absent'"),
        (("push", REPO), 3, "No local mapper"),
        (("push", "mine", "--repo-id", "no-slash"), 2, "no-slash"),
        (("push", "mine", "--repo-id", REPO, "--version", "one"), 2, "'one' is not a version"),
        (("pull", "org/absent"), 3, "org/absent"),
        (("pull", "mine"), 2, "'mine' cannot be a repository"),
        (("versions", "org/absent"), 3, "org/absent"),
        (("info", "org/absent@1.0.0"), 3, "org/absent"),
        (("sync", "--file", "absent.lock"), 3, "absent.lock"),
    ],
)
def test_what_cannot_be_done_has_its_exit_code(hub, kvhub, models, arguments, code, pattern):
    make(models)
    found = kvhub(*arguments, code=code)["error"]
    assert re.search(pattern, found["message"])
    assert found["hint"]


def test_a_local_mapper_has_no_revisions(models, tmp_path):
    make(models)
    for options in ({"revision": "1.0.0"}, {"lock": tmp_path / "kvhub.lock"}):
        with pytest.raises(UsageError, match="is a local mapper"):
            KVMapper.from_pretrained("mine", **options)
    with pytest.raises(UsageError, match="not both"):
        KVMapper.from_pretrained(REPO, revision="1.0.0", lock=tmp_path / "kvhub.lock")


def test_tables_for_people(hub, models, capsys, monkeypatch, tmp_path):
    make(models)
    monkeypatch.chdir(tmp_path)
    for arguments, pattern in (
        (("push", "mine", "--repo-id", REPO, "--dry-run"), r"model\.safetensors.*add"),
        (("push", "mine", "--repo-id", REPO), r"version.*1\.0\.0"),
        (("versions", REPO), r"1\.0\.0"),
        (("list",), r"cache|mine"),
        (("pull", REPO), r"commit"),
        (("lock", REPO), r"newest"),
        (("sync",), r"same"),
    ):
        monkeypatch.setattr(sys, "argv", ["kvhub", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        assert not stopped.value.code, captured.err
        assert re.search(pattern, captured.out + captured.err), captured.out


def run_killed(hub, command, cache, requests):
    """Run `kvhub` in a process that is killed, as by kill -9, when it makes one more request."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cache),
        "HF_TOKEN": "hf_any",
        "HF_HUB_OFFLINE": "0",
    }
    hub.faults.clear()
    killed = []
    with subprocess.Popen(
        [sys.executable, "-m", "kvhub", *command], env=environment, stderr=subprocess.PIPE
    ) as process:

        def kill():
            process.kill()
            process.wait()
            killed.append(process.returncode)

        hub.inject(Fault(".", "call", after=requests, call=kill))
        process.communicate()
    hub.faults.clear()
    return bool(killed)


@pytest.mark.slow
@pytest.mark.parametrize("requests", [2, 5, 8, 11, 13])
def test_a_killed_push_is_finished_by_the_next(hub, kvhub, models, tmp_path, requests):
    mapper = make(models)
    assert run_killed(hub, ["push", "mine", "--repo-id", REPO], tmp_path / "home", requests)
    pushed = kvhub("push", "mine", "--repo-id", REPO)
    assert pushed["version"] == "1.0.0"
    assert [each["version"] for each in kvhub("versions", REPO)["versions"]] == ["1.0.0"]
    assert torch.equal(KVMapper.from_pretrained(REPO).key_weight, mapper.key_weight)


@pytest.mark.slow
@pytest.mark.parametrize("requests", [1, 3, 5, 7])
def test_a_killed_pull_leaves_a_cache_that_the_next_one_completes(
    hub, kvhub, models, tmp_path, monkeypatch, requests
):
    mapper = make(models)
    kvhub("push", "mine", "--repo-id", REPO)
    home = tmp_path / "home"
    assert run_killed(hub, ["pull", REPO], home, requests)
    connect_client(monkeypatch, hub, home / "hub")
    assert kvhub("pull", REPO)["version"] == "1.0.0"
    assert torch.equal(KVMapper.from_pretrained(REPO).key_weight, mapper.key_weight)
