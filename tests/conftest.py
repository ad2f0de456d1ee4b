"""Every test runs offline, with its own store, on at most two threads, from the same seeds."""

import importlib.metadata
import ipaddress
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

# Triton is for Linux only.
needs_triton = ["test_machine_code.py", "test_selftest.py", "test_triton_map.py"]
collect_ignore = [] if find_spec("triton") else needs_triton
UNSET = ("FORCE_COLOR", "GITHUB_ACTIONS", "HF_ENDPOINT", "HF_TOKEN", "KVHUB_DEBUG")


def pytest_configure(config: pytest.Config) -> None:
    # Before collection, because the libraries read their variables when they are imported.
    hub_home = tempfile.TemporaryDirectory(prefix="kvhub-tests-")
    config.add_cleanup(hub_home.cleanup)
    os.environ |= {
        "HF_HOME": hub_home.name,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRITON_INTERPRET": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MPLBACKEND": "agg",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    for name in UNSET:
        os.environ.pop(name, None)
    torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_report_header() -> str:
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    return ", ".join(versions)


class NetworkBlocked(BaseException):
    """A test tried to leave the machine.

    Not an `Exception`: the Hub clients catch those and fall back to their caches, and the test
    would pass where there is a network and fail where there is none.
    """


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def loopback_only() -> Iterator[None]:
    """Refuse Python sockets every address, and look-ups every name, that is not this machine."""
    patch = pytest.MonkeyPatch()
    for name in ("connect", "connect_ex"):
        patch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
    look_up = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        _require_local(host)
        return look_up(host, *args, **kwargs)

    patch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield
    patch.undo()


def _guarded(method: Any) -> Any:
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _require_local(address[0])
        return method(self, address)

    return guarded


def _require_local(host: Any) -> None:
    host = host.decode() if isinstance(host, bytes) else host
    if host in (None, "", "localhost", socket.gethostname()):
        return
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise NetworkBlocked(f"tests stay on this machine, and this one asked for {host!r}")


@pytest.fixture(autouse=True)
def kvhub_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The local store of this test, empty and not yet there."""
    home = tmp_path / "kvhub-home"
    monkeypatch.setenv("KVHUB_HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)
