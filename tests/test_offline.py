"""The guards of conftest.py hold: without them a test could pass by reaching the Hub."""

import os
import socket
import threading

import pytest
import torch
from conftest import NetworkBlocked
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

# From the block reserved for documentation: no machine has it.
ELSEWHERE = "192.0.2.1"


@pytest.mark.parametrize("method", ["connect", "connect_ex"])
def test_other_machines_are_refused(method):
    with socket.socket() as client, pytest.raises(NetworkBlocked, match=ELSEWHERE):
        getattr(client, method)((ELSEWHERE, 443))


def test_other_names_are_not_looked_up():
    with pytest.raises(NetworkBlocked, match=r"example\.org"):
        socket.create_connection(("example.org", 443), timeout=1)


def test_this_machine_is_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        with socket.create_connection(("localhost", server.getsockname()[1]), timeout=5) as client:
            assert client.recv(1) == b""
        thread.join()


def test_the_hub_is_offline_and_its_cache_empty(tmp_path):
    assert constants.HF_HUB_OFFLINE
    with pytest.raises((LocalEntryNotFoundError, OfflineModeIsEnabled)):
        hf_hub_download("Qwen/Qwen3-0.6B", "config.json")


def test_the_store_is_empty_and_belongs_to_this_test(kvhub_home, tmp_path):
    assert os.environ["KVHUB_HOME"] == str(kvhub_home)
    assert kvhub_home.is_relative_to(tmp_path)
    assert not kvhub_home.exists()


@pytest.mark.parametrize("run", [1, 2])
def test_every_test_starts_from_the_same_seed(run):
    expected = torch.Generator().manual_seed(0)
    assert torch.equal(torch.rand(4), torch.rand(4, generator=expected))
