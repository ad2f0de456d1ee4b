"""What serves in these tests: the embedded family in vLLM, a mapper each way, one store."""

import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kvhub.exporters import export
from servers import Server, environment, python

from kvhub import KVMapper, ModelSpec, calibrate, fit, select_layers
from kvhub.data import token_batches
from kvhub.models import load_model, load_tokenizer

HERE = Path(__file__).parent
FAMILY = HERE.parent / "examples" / "tiny_family"
# Models, each the target of the other's mapper.
OTHER = {"middle": "large", "large": "middle"}


def pytest_configure(config: pytest.Config) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    torch.set_num_threads(1)
    if "KVHUB_VLLM_PYTHON" not in os.environ:
        raise pytest.UsageError("Set KVHUB_VLLM_PYTHON to a Python with vLLM, or: make test-vllm")


@functools.cache
def model(name):
    loaded = load_model(str(FAMILY / name))
    loaded.generation_config.eos_token_id = None
    return loaded


@functools.cache
def mapper_to(name):
    """Fitted on a few sequences: it need not be good, only not trivial."""
    source, target = model(OTHER[name]), model(name)
    batches = token_batches(load_tokenizer(str(FAMILY / name)), "stdlib", sequences=30, length=256)
    statistics = calibrate(source, target, batches)
    fitted = fit(statistics, select_layers(statistics, top_k=2), ridge_lambda=1e-3)
    specs = {
        "source": ModelSpec.from_pretrained(str(FAMILY / OTHER[name])),
        "target": ModelSpec.from_pretrained(str(FAMILY / name)),
    }
    return KVMapper(replace(fitted.config, **specs), fitted.tensors())


@functools.cache
def text_tokens():
    """Of text that the family was not trained on, and some more."""
    import shlex
    import textwrap

    tokenizer = load_tokenizer(str(FAMILY / "large"))
    text = "".join(Path(of.__file__).read_text(encoding="utf-8") for of in (textwrap, shlex))
    tokens: list[int] = tokenizer(text).input_ids
    return tokens


class Deployed:
    """A mapper, exported: its directory, its salt, and what an engine is started with."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root
        self.path = root / f"to-{name}"
        if not self.path.exists():
            export(mapper_to(name), "vllm", self.path, dtype=torch.float32)
        digest = json.loads((self.path / "kvhub.json").read_text())["digest"]
        self.salt = f"kvhub:{digest}"
        self.log = root / f"{name}-status.jsonl"
        self.store = root / "store"

    def transfer(self, side: str = "target", **settings) -> dict:
        content = json.loads((self.path / f"{side}.json").read_text())
        content["kv_connector_extra_config"]["settings"] = {
            "store": {"kind": "files", "capacity_bytes": 2**28, "path": str(self.store)},
            "source_kv_dtype": "float32",
            "target_kv_dtype": "float32",
            "lookup_seconds": 5.0,
            "staging_path": str(self.root / "stage"),
            "status_file": str(self.log),
            **settings,
        }
        return content

    def status(self) -> list[dict]:
        """What became of requests, in order."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def deployed(root) -> dict[str, Deployed]:
    return {name: Deployed(name, root) for name in OTHER}


@pytest.fixture(scope="session")
def servers(deployed, root) -> Iterator[dict[str, Server]]:
    """Both models, started at once; each is the target of one mapper, the source of the other."""
    started = {
        name: Server(FAMILY / name, found.path, found.transfer(), root / f"{name}.log")
        for name, found in deployed.items()
    }
    try:
        yield {name: server.ready() for name, server in started.items()}
    finally:
        for server in started.values():
            server.kill()


def offline(model_name: str, batches: list, found: "Deployed | None" = None, **more) -> list:
    """Serve batches of requests in an engine of their own; `more` goes to offline.py."""
    given = {"model": str(FAMILY / model_name), "batches": batches, **more}
    with tempfile.TemporaryFile("w+") as log:
        done = subprocess.run(
            [python(), str(HERE / "offline.py")],
            input=json.dumps(given),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            check=False,
            timeout=400,
            env=environment(found.path if found else None),
        )
        log.seek(0)
        assert done.returncode == 0, log.read()[-4000:]
    answers: list = json.loads(done.stdout)
    return answers
