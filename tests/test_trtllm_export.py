"""What `kvhub export --backend trtllm` writes: complete, the same every time, and the mapper."""

import ast
import json
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import typer
import yaml
from kvhub.exporters import directory, export
from kvhub.exporters.directory import PACKAGE, runtime_source
from kvhub.exporters.plan import make_plan
from kvhub.exporters.serving import Settings, load_deployment, load_plan
from kvhub.exporters.trtllm import RUNTIME, export_trtllm
from kvhub.exporters.trtllm_args import REQUIRED
from mapping import random_mapper
from tiny import tiny_config, tiny_model
from typer.testing import CliRunner

from kvhub import KVMapper, ModelSpec
from kvhub.cli_export import export as command
from kvhub.errors import ConflictError, UsageError, VerificationError

ROOT = Path(__file__).parents[1]


def mapper_of(**changes):
    specs = [
        ModelSpec.from_config(
            tiny_config(name, layers, head_dim=16), f"org/{name}", "0" * 40, "tokens"
        )
        for name, layers in (("qwen3", 3), ("llama", 4))
    ]
    return random_mapper(*(replace(spec, **changes) for spec in specs))


def plan_of(dtype=torch.bfloat16, **changes):
    return make_plan(mapper_of(**changes), dtype=dtype)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_trtllm(plan_of(), tmp_path_factory.mktemp("trtllm") / "export")


def contents(path):
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file()
    }


def test_a_module_that_imports_more_of_kvhub_is_refused():
    runtime = [name for name in RUNTIME if name != "kvhub.rope"]
    with pytest.raises(VerificationError, match=r"paged imports kvhub\.rope"):
        runtime_source("kvhub.exporters.paged", runtime)
    with pytest.raises(VerificationError, match=r"plan imports kvhub\."):
        runtime_source("kvhub.exporters.plan", runtime)


def test_equal_plans_give_equal_bytes(exported, tmp_path):
    again = export_trtllm(plan_of(), tmp_path / "again")
    assert contents(again) == contents(exported)
    modules = {f"{PACKAGE}/{module.rpartition('.')[2]}.py" for module in RUNTIME}
    assert {*contents(exported)} == modules | {
        *(f"{PACKAGE}/__init__.py", "weights.safetensors", "kvhub.json", "settings.json"),
        *("source.yaml", "target.yaml", "selftest.py", "README.md"),
    }


def test_no_copied_module_speaks_of_modules_that_are_not_there(exported):
    for name, content in contents(exported).items():
        if name.endswith(".py"):
            assert not re.search(rb"\bkvhub\.(exporters|errors|rope|products)\b", content), name


def test_it_is_read_as_it_was_planned(exported):
    plan, deployment = plan_of(), load_deployment(exported)
    found = load_plan(deployment, "cpu", 0)
    for name in ("key_weight", "value_weight", "key_bias", "value_bias", "gather"):
        assert torch.equal(getattr(found, name), getattr(plan, name))
    assert torch.equal(deployment.target.rope.inv_freq, plan.target_rope.inv_freq)
    assert (deployment.source.model, deployment.source.revision) == ("org/qwen3", "0" * 40)
    assert deployment.settings == Settings()
    assert deployment.salt("me") == f"kvhub:{deployment.digest}:me"
    names = {item.name for item in fields(Settings)}
    assert set(json.loads((exported / "settings.json").read_text())) == names


@pytest.mark.parametrize(
    ("dtype", "pool"),
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")],
)
def test_pools_and_weights_are_as_the_models(tmp_path, dtype, pool):
    path = export(mapper_of(dtype=dtype), "trtllm", tmp_path / "export")
    deployment = load_deployment(path)
    assert (deployment.settings.source_kv_dtype, deployment.settings.target_kv_dtype) == (pool,) * 2
    assert deployment.facts["dtype"] == pool
    for side in ("source", "target"):
        content = yaml.safe_load((path / f"{side}.yaml").read_text())
        assert content["kv_cache_config"]["dtype"] == pool


def test_the_yaml_names_classes_that_are_there_and_what_is_checked(exported):
    source = (exported / PACKAGE / "trtllm_connector.py").read_text()
    classes = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    for side in ("source", "target"):
        content = yaml.safe_load((exported / f"{side}.yaml").read_text())
        connector = content.pop("kv_connector_config")
        assert connector.pop("connector_module") == f"{PACKAGE}.trtllm_connector"
        assert {*connector} == {"connector_scheduler_class", "connector_worker_class"}
        assert {*connector.values()} <= classes
        assert all(name.startswith(side.capitalize()) for name in connector.values())
        cache = content["kv_cache_config"]
        assert cache["enable_block_reuse"] is True
        assert cache["enable_partial_reuse"] is False
        assert (cache["host_cache_size"], cache["tokens_per_block"]) == (0, 32)
        for path, allowed, _ in REQUIRED:
            value = content
            for name in path.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            assert value is None or allowed(value)


def test_the_readme_says_what_there_is(exported):
    readme = (exported / "README.md").read_text()
    deployment = load_deployment(exported)
    assert f'"cache_salt": "kvhub:{deployment.digest}"' in readme
    assert not re.search(r"@\w+@", readme)
    for side in (deployment.source, deployment.target):
        assert f"| `{side.model}` | `{side.revision}` |" in readme
    for item in fields(Settings):
        assert f"`{item.name}`" in readme, item.name
    for path, _, _ in REQUIRED:
        assert f"`{path}`" in readme, path
    for said in ("1.2.1", "1.3.0rc", "1.4.0rc", "TLLM_KVHUB_CONFIG", "Not run on TensorRT-LLM"):
        assert said in readme


def test_what_is_there_is_left_alone(tmp_path):
    (tmp_path / "export").mkdir()
    with pytest.raises(ConflictError, match="exists"):
        export_trtllm(plan_of(), tmp_path / "export")
    assert [*(tmp_path / "export").iterdir()] == []


@pytest.mark.parametrize("error", [VerificationError, OSError, KeyboardInterrupt])
def test_nothing_stays_of_a_failed_export(tmp_path, monkeypatch, error):
    def fail(*arguments):
        raise error("stop")

    monkeypatch.setattr(directory, "check_map", fail)
    with pytest.raises(error):
        export_trtllm(plan_of(), tmp_path / "export")
    assert [*tmp_path.iterdir()] == []


def test_what_is_not_read_as_it_was_written_never_appears(tmp_path, monkeypatch):
    def wrong(tensors, file, metadata):
        save({**tensors, "key_bias": tensors["key_bias"] + 1}, file, metadata)

    save = directory.save_file
    monkeypatch.setattr(directory, "save_file", wrong)
    with pytest.raises(VerificationError, match="key_bias to be read as it was written"):
        export_trtllm(plan_of(), tmp_path / "export")
    assert [*tmp_path.iterdir()] == []


def test_changed_weights_are_refused(exported, tmp_path):
    path = shutil.copytree(exported, tmp_path / "export")
    file = path / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(VerificationError, match="sha256"):
        load_plan(load_deployment(path), "cpu", 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_digest": None}, "the source's tokenizer"),
        ({"model_id": ""}, "the source's name"),
        ({"revision": None}, "which weights of org/qwen3"),
    ],
)
def test_what_entries_depend_on_must_be_known(tmp_path, changes, message):
    with pytest.raises(UsageError, match=message):
        export_trtllm(plan_of(**changes), tmp_path / "export")
    with pytest.raises(UsageError, match="float64"):
        export_trtllm(plan_of(torch.float64), tmp_path / "export")
    assert [*tmp_path.iterdir()] == []


def test_who_exports_may_say_the_revisions(tmp_path):
    revisions = {"source_revision": "a" * 40, "target_revision": "b" * 40}
    path = export(mapper_of(revision=None), "trtllm", tmp_path / "export", **revisions)
    deployment = load_deployment(path)
    assert [deployment.source.revision, deployment.target.revision] == ["a" * 40, "b" * 40]
    with pytest.raises(UsageError, match=r"was fitted for org/llama at 0000.*--target-revision"):
        export(mapper_of(), "trtllm", tmp_path / "other", target_revision="b" * 40)


def test_local_models_are_named_by_their_files(tmp_path):
    for name, layers in (("qwen3", 3), ("llama", 4)):
        tiny_model(name, layers, head_dim=16).save_pretrained(tmp_path / name)
    mapper = mapper_of(revision=None)
    source, target = (
        replace(spec, model_id=str(tmp_path / name))
        for spec, name in ((mapper.config.source, "qwen3"), (mapper.config.target, "llama"))
    )
    config = replace(mapper.config, source=source, target=target)
    mapper = KVMapper(config, mapper.tensors())
    first = load_deployment(export(mapper, "trtllm", tmp_path / "first"))
    assert re.fullmatch("files:[0-9a-f]{32}", first.source.revision)
    assert first.source.revision != first.target.revision
    tiny_model("llama", 4, seed=1, head_dim=16).save_pretrained(tmp_path / "llama")
    second = load_deployment(export(mapper, "trtllm", tmp_path / "second"))
    assert second.source.revision == first.source.revision
    assert second.target.revision != first.target.revision
    assert second.digest != first.digest


def test_the_command_says_what_it_wrote(tmp_path, monkeypatch):
    """Of the embedded models, whose revisions are digests of their files."""
    specs = [
        ModelSpec.from_pretrained(str(ROOT / "examples" / "tiny_family" / name))
        for name in ("middle", "large")
    ]
    random_mapper(*specs).save_pretrained(tmp_path / "mapper")
    app = typer.Typer()
    app.command()(command)
    arguments = [str(tmp_path / "mapper"), "--backend", "trtllm", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    result = json.loads(done.stdout)
    sizes = {name: len(content) for name, content in contents(tmp_path / "out").items()}
    assert result == {
        "backend": "trtllm",
        "path": str(tmp_path / "out"),
        "dtype": "float16",
        "tested": True,
        "files": sizes,
        "size_bytes": sum(sizes.values()),
    }
    assert f"{PACKAGE}/trtllm_connector.py" in sizes
    assert load_deployment(tmp_path / "out").source.revision.startswith("files:")
