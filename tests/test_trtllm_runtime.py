"""An exported directory runs on what TensorRT-LLM's containers have, without kvhub."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
from kvhub.exporters.directory import PACKAGE, runtime_source
from kvhub.exporters.plan import make_plan
from kvhub.exporters.trtllm import RUNTIME, export_trtllm
from mapping import random_mapper
from tiny import tiny_config

from kvhub import ModelSpec

ROOT = Path(__file__).parents[1]
# What TensorRT-LLM's containers have, as far as this may import it; the last three in one module.
PRESENT = {*sys.stdlib_module_names, "torch", "numpy", "safetensors", "triton"}
OPTIONAL = {
    "tensorrt_llm": "trtllm_connector",
    "mooncake": "store_mooncake",
    "transformers": "selftest_model",
}
ABSENT = ("kvhub", "transformers", "huggingface_hub")
BLOCKER = f"""
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"{{name}} is not in a container")


sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    specs = [
        ModelSpec.from_config(
            tiny_config(name, layers, head_dim=16), f"org/{name}", "0" * 40, "tokens"
        )
        for name, layers in (("qwen3", 3), ("llama", 4))
    ]
    plan = make_plan(random_mapper(*specs), dtype=torch.bfloat16)
    return export_trtllm(plan, tmp_path_factory.mktemp("runtime") / "export")


def requirements(*names):
    """The installed distributions that these need, themselves included."""
    found, wanted = {}, [*names]
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        needed = [item for item in found[name].requires or () if "extra ==" not in item]
        wanted += [re.match(r"[\w.-]+", item)[0] for item in needed]
    return found.values()


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    """A Python with torch, numpy, safetensors and Triton, and nothing that they do not need."""
    path = tmp_path_factory.mktemp("container") / "venv"
    venv.create(path, symlinks=True)
    base = {"base": str(path), "platbase": str(path)}
    packages = Path(sysconfig.get_path("purelib", "venv", base))
    tops = {
        Path(distribution.locate_file(file.parts[0]))
        for distribution in requirements("torch", "numpy", "safetensors", "triton")
        for file in distribution.files
        if file.parts[0] not in ("..", "__pycache__")
    }
    for top in tops:
        (packages / top.name).symlink_to(top)
    (packages / "sitecustomize.py").write_text(BLOCKER)
    return path / "bin" / "python"


@pytest.fixture
def oldest():
    """The same with the oldest torch, which `make test` installs."""
    python = os.environ.get("KVHUB_CONTAINER_PYTHON")
    if python is None:
        pytest.skip("needs torch 2.9 in an environment of its own: make test")
    return (ROOT / python).absolute()


def run(python, directory, *arguments):
    """As a user there: no variable of this process, no package of it."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "KVHUB", "TLLM", "TRITON", "HF_"))
    }
    return subprocess.run(
        [python, *arguments],
        cwd=directory,
        env={**environment, "PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


STUB = """
class KvCacheConnectorScheduler:
    def __init__(self, llm_args): ...


class KvCacheConnectorWorker(KvCacheConnectorScheduler): ...
"""
IMPORT = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
connector = sys.modules["kvhub_runtime.trtllm_connector"]
assert {"SourceScheduler", "SourceWorker", "TargetScheduler", "TargetWorker"} <= {*dir(connector)}
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


def assert_runs(python, exported, tmp_path, torch_version):
    path = shutil.copytree(exported, tmp_path / "export")
    settings = json.loads((path / "settings.json").read_text())
    settings["store"] |= {"path": str(tmp_path / "store")}
    settings["staging_path"] = str(tmp_path / "stage")
    (path / "settings.json").write_text(json.dumps(settings))
    # In the place of TensorRT-LLM, which is imported for its base classes.
    stub = path / "tensorrt_llm" / "_torch" / "pyexecutor" / "kv_cache_connector.py"
    stub.parent.mkdir(parents=True)
    stub.write_text(STUB)
    names = [f"{PACKAGE}.{module.rpartition('.')[2]}" for module in RUNTIME]
    done = run(python, path, "-c", IMPORT, *names)
    assert done.returncode == 0, done.stderr
    assert not {*ABSENT} & {*json.loads(done.stdout)}
    done = run(python, path, "selftest.py", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert f"torch {torch_version}" in checks["versions"]["found"]
    passed = {name for name, check in checks.items() if check["state"] == "passed"}
    assert passed >= {"versions", "weights", "map in torch", "store"}
    (path / "weights.safetensors").write_bytes(b"")
    done = run(python, path, "selftest.py")
    assert done.returncode == 1
    assert "Do not serve: weights, " in done.stdout


def test_it_runs_without_kvhub(container, exported, tmp_path):
    for name in ABSENT:
        assert run(container, tmp_path, "-c", f"import {name}").returncode == 1
    assert_runs(container, exported, tmp_path, torch.__version__)


def test_it_runs_on_the_oldest_torch(oldest, exported, tmp_path):
    assert_runs(oldest, exported, tmp_path, "2.9.1")


def runtime_imports(module):
    """Whole names of what a module of the runtime imports, and the nodes."""
    for node in ast.walk(ast.parse(runtime_source(module, RUNTIME), feature_version=(3, 10))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno} is relative"
            name = node.module
            yield from (
                (f"{name}.{alias.name}" if name == PACKAGE else name, node) for alias in node.names
            )


@pytest.mark.parametrize("module", RUNTIME)
def test_modules_import_only_what_a_container_has(module):
    stem = module.rpartition(".")[2]
    exported = {f"{PACKAGE}.{other.rpartition('.')[2]}" for other in RUNTIME}
    for name, node in runtime_imports(module):
        top = name.split(".")[0]
        if top == PACKAGE:
            assert name in exported
        elif top in OPTIONAL:
            assert stem == OPTIONAL[top]
            assert top == "tensorrt_llm" or node.col_offset, "not where the file is imported"
        else:
            assert top in PRESENT, f"{module}:{node.lineno} imports {name}"
            inside = node.col_offset > 0
            assert top != "triton" or inside or stem == "triton_kernels"


def test_nothing_is_exported_that_is_not_needed():
    """And no two modules have one name there."""
    stems = [module.rpartition(".")[2] for module in RUNTIME]
    assert len(set(stems)) == len(stems)
    modules = dict(zip(stems, RUNTIME, strict=True))
    reached, left = set(), ["trtllm_connector", "selftest"]
    while left:
        stem = left.pop()
        if stem not in reached:
            reached.add(stem)
            names = [name for name, _ in runtime_imports(modules[stem])]
            left += [name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}.")]
    assert reached == set(stems)
