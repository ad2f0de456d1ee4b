"""`kvhub export`, run as a command of its own."""

import json

import onnx
import pytest
import torch
import typer
from kvhub.exporters import EXPORTERS, onnx_graph
from mapping import random_mapper
from tiny import tiny_config
from typer.testing import CliRunner

from kvhub import ModelSpec
from kvhub.cli_export import export
from kvhub.errors import ConflictError, NotFoundError, UsageError, VerificationError

app = typer.Typer()
app.command()(export)


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture
def package(tmp_path):
    mapper = random_mapper(
        *(ModelSpec.from_config(tiny_config(name)) for name in ("qwen3", "llama"))
    )
    mapper.save_pretrained(tmp_path / "mapper")
    return tmp_path / "mapper"


@pytest.mark.parametrize(
    ("options", "dtype"), [((), "float32"), (("--dtype", "bfloat16"), "bfloat16")]
)
def test_json_says_what_was_written(package, tmp_path, options, dtype):
    out = tmp_path / "deep" / "export"
    result = json.loads(run(package, "--backend", "onnx", "--out", out, "--json", *options))
    files = {file.name: file.stat().st_size for file in out.iterdir()}
    assert set(files) == {"README.md", "model.onnx"}
    assert result == {
        "backend": "onnx",
        "path": str(out),
        "dtype": dtype,
        "tested": True,
        "files": files,
        "size_bytes": sum(files.values()),
    }
    facts = {entry.key: entry.value for entry in onnx.load(out / "model.onnx").metadata_props}
    assert facts["dtype"] == dtype


def test_people_see_the_files(package, tmp_path):
    shown = run(package, "--backend", "onnx", "--out", tmp_path / "export")
    assert "model.onnx" in shown
    assert "README.md" in shown


def test_an_unknown_backend_is_refused_with_the_known_ones(package, tmp_path):
    with pytest.raises(UsageError, match="expected one of: " + ", ".join(sorted(EXPORTERS))):
        run(package, "--backend", "onyx", "--out", tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_what_is_there_is_left_alone(tmp_path):
    """Found before the mapper is read, which may take a while: here there is none."""
    (tmp_path / "export").write_text("mine")
    with pytest.raises(ConflictError, match="exists"):
        run("no-such-mapper", "--backend", "onnx", "--out", tmp_path / "export")
    assert (tmp_path / "export").read_text() == "mine"


def test_an_unknown_mapper_is_not_found(tmp_path):
    with pytest.raises(NotFoundError, match="no-such-mapper"):
        run("no-such-mapper", "--backend", "onnx", "--out", tmp_path / "export")


def test_the_command_fails_with_the_self_test(package, tmp_path, monkeypatch):
    build = onnx_graph._build

    def damaged(plan, data):
        model = build(plan, data)
        weight = next(item for item in model.graph.initializer if item.name == "key_weight_1")
        weight.raw_data = bytes(len(weight.raw_data))
        return model

    monkeypatch.setattr(onnx_graph, "_build", damaged)
    with pytest.raises(VerificationError, match="keys of target layer 1"):
        run(package, "--backend", "onnx", "--out", tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["mapper"]


def test_the_table_of_backends_names_functions():
    from importlib import import_module

    for name, module in EXPORTERS.items():
        assert callable(getattr(import_module(module), f"export_{name}"))


def test_a_mapper_of_another_dtype_needs_one_that_the_backend_takes(tmp_path):
    specs = (ModelSpec.from_config(tiny_config(name)) for name in ("qwen3", "llama"))
    random_mapper(*specs, dtype=torch.float64).save_pretrained(tmp_path / "mapper")
    with pytest.raises(UsageError, match="--dtype"):
        run(tmp_path / "mapper", "--backend", "onnx", "--out", tmp_path / "export")
    run(
        tmp_path / "mapper", "--backend", "onnx", "--out", tmp_path / "export", "--dtype", "float32"
    )
