"""What `kvhub export --backend vllm` writes. What all engines share is in test_trtllm_export.py."""

import ast
import json
import re
from dataclasses import fields

import pytest
import torch
from kvhub.exporters import dtype_for, export
from kvhub.exporters.directory import PACKAGE, runtime_source
from kvhub.exporters.serving import Settings, load_deployment
from kvhub.exporters.vllm import RUNTIME
from kvhub.exporters.vllm_args import REQUIRED, Options
from mapping import random_mapper
from test_trtllm_runtime import PRESENT
from tiny import tiny_config
from vllm_fakes import RECORD

from kvhub import ModelSpec

STEMS = {module.rpartition(".")[2]: module for module in RUNTIME}


def mapper_of(dtype="bfloat16"):
    return random_mapper(
        *(
            ModelSpec.from_config(
                tiny_config(name, layers, head_dim=16, dtype=dtype),
                *(f"org/{name}", "0" * 40, "tokens"),
            )
            for name, layers in (("qwen3", 3), ("llama", 4))
        )
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export(mapper_of(), "vllm", tmp_path_factory.mktemp("vllm") / "export")


def imports(module):
    for node in ast.walk(ast.parse(runtime_source(module, RUNTIME), feature_version=(3, 10))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                f"{node.module}.{alias.name}" if node.module == PACKAGE else node.module
                for alias in node.names
            )


def test_it_is_complete(exported):
    found = {path.relative_to(exported).as_posix() for path in exported.rglob("*.*")}
    assert found == {
        *(f"{PACKAGE}/{name}.py" for name in ("__init__", *STEMS)),
        *("weights.safetensors", "kvhub.json", "settings.json", "source.json", "target.json"),
        *("selftest.py", "README.md"),
    }
    assert load_deployment(exported).settings == Settings()


@pytest.mark.parametrize("module", RUNTIME)
def test_modules_import_only_what_is_there(module):
    allowed = {
        *PRESENT,
        *{"store_mooncake": ["mooncake"], "selftest_model": ["transformers"]}.get(
            module.rpartition(".")[2], []
        ),
        *(["vllm"] if module.endswith(("vllm_connector", "vllm_worker")) else []),
    }
    for name in imports(module):
        top = name.split(".")[0]
        known = name.split(".")[1] in STEMS if top == PACKAGE else top in allowed
        assert known, f"{module} imports {name}"


def test_nothing_is_exported_that_is_not_needed():
    reached, left = set(), ["vllm_connector", "selftest"]
    while left:
        stem = left.pop()
        if stem not in reached:
            reached.add(stem)
            left += [n.split(".")[1] for n in imports(STEMS[stem]) if n.startswith(f"{PACKAGE}.")]
    assert reached == {*STEMS}


@pytest.mark.parametrize("side", ["source", "target"])
def test_the_transfer_config_is_one_of_vllm(exported, side):
    content = json.loads((exported / f"{side}.json").read_text())
    assert {*content} <= {*RECORD["fields"]["KVTransferConfig"]}
    package, _, module = content["kv_connector_module_path"].partition(".")
    source = (exported / package / f"{module}.py").read_text()
    classes = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    assert content["kv_connector"] in classes
    assert (content["kv_role"], content["kv_load_failure_policy"]) == ("kv_both", "recompute")
    options = Options(content["kv_connector_extra_config"])
    assert (options.maps, options.directory, options.settings) == (side == "target", None, {})


def test_the_readme_says_what_there_is(exported):
    readme = (exported / "README.md").read_text()
    digest = load_deployment(exported).digest
    assert f'"cache_salt": "kvhub:{digest}"' in readme
    assert not re.search(r"@\w+@", readme)
    for item in fields(Settings):
        assert f"`{item.name}`" in readme, item.name
    for path, _, _ in REQUIRED:
        assert f"`{path}`" in readme, path
    for said in (RECORD["version"], "source.json", "target.json", "not on a GPU"):
        assert said in readme


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pools_and_weights_are_as_the_models(tmp_path, dtype):
    mapper = mapper_of(dtype)
    assert dtype_for(mapper, "vllm") == getattr(torch, dtype)
    path = export(mapper, "vllm", tmp_path / "export")
    settings = load_deployment(path).settings
    assert (settings.source_kv_dtype, settings.target_kv_dtype) == (dtype, dtype)
    assert load_deployment(path).facts["dtype"] == dtype
    assert f"--dtype {dtype}" in (path / "README.md").read_text()


def test_an_engine_may_be_given_settings_of_its_own(exported):
    found = load_deployment(exported, {"chunk_tokens": 64, "tenants": [None, "me"]}).settings
    assert (found.chunk_tokens, found.tenants) == (64, (None, "me"))
    assert found.source_kv_dtype == "bfloat16"
