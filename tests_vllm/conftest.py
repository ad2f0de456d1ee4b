"""What serves in these tests: pairs of models in vLLM, the mappers between them, one store.

Of the embedded family there is a mapper each way, of the SmolLM2 pair one.
"""

import functools
import json
import os
import re
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
SMOLLM2 = HERE.parent / "examples" / "smollm2" / "models"
TINY = ("middle", "large")  # each the target of the other's mapper
OTHER = {"middle": "large", "large": "middle", "source": "target", "target": "source"}
# The family has no chat template of its own.
CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def pytest_configure(config: pytest.Config) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    torch.set_num_threads(1)
    if "KVHUB_VLLM_PYTHON" not in os.environ:
        raise pytest.UsageError("Set KVHUB_VLLM_PYTHON to a Python with vLLM, or: make test-vllm")


def folder(name):
    return (FAMILY if name in TINY else SMOLLM2) / name


@functools.cache
def model(name):
    loaded = load_model(str(folder(name)))
    loaded.generation_config.eos_token_id = None
    return loaded


@functools.cache
def mapper_to(name):
    """Fitted on a few sequences: it need not be good, only not trivial."""
    source, target = model(OTHER[name]), model(name)
    heads, data, sequences = ("all", "stdlib", 30) if name in TINY else ("matched", "english", 6)
    tokenizer = load_tokenizer(str(folder(name)))
    batches = token_batches(tokenizer, data, sequences=sequences, length=256)
    statistics = calibrate(source, target, batches, heads=heads, held_out_every=3)
    fitted = fit(statistics, select_layers(statistics, top_k=2), ridge_lambda=1e-3)
    specs = {
        "source": ModelSpec.from_pretrained(str(folder(OTHER[name]))),
        "target": ModelSpec.from_pretrained(str(folder(name))),
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
    return {name: Deployed(name, root) for name in TINY}


@pytest.fixture(scope="module")
def servers(deployed, tmp_path_factory) -> Iterator[dict[str, Server]]:
    """The family's two models, each the target of one mapper, the source of the other."""
    logs = tmp_path_factory.mktemp("logs")
    started = {
        name: Server(
            *(folder(name), found.path, found.transfer(), logs / f"{name}.log"),
            *("--chat-template", CHAT),
        )
        for name, found in deployed.items()
    }
    yield from serving(started)


def serving(started: dict[str, Server]) -> Iterator[dict[str, Server]]:
    """Servers that were started at once, until their tests are over.

    Whatever these did to them, it must have been contained.
    """
    try:
        yield {name: server.ready() for name, server in started.items()}
    finally:
        for server in started.values():
            server.kill()
    for server in started.values():
        text = server.log.read_text()
        assert not re.search(r"Traceback|EngineDeadError|AssertionError", text), text[-4000:]


def offline(model_name: str, batches: list, found: "Deployed | None" = None, **more) -> list:
    """Serve batches of requests in an engine of their own; `more` goes to offline.py."""
    given = {"model": str(folder(model_name)), "batches": batches, **more}
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
