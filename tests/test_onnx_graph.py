"""ONNX exports, run by onnxruntime, against KVMapper, and what becomes of broken ones."""

import sys

import ml_dtypes
import onnx
import onnxruntime
import pytest
import torch
from kvhub.exporters import onnx_check, onnx_graph
from kvhub.exporters.onnx_graph import export_onnx, self_test
from kvhub.exporters.plan import make_plan
from mapping import random_mapper
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from tiny import tiny_config

from kvhub import ModelSpec
from kvhub.cache import build_cache
from kvhub.errors import ConflictError, UsageError, VerificationError

# What TensorRT 10.1's parser documents, as far as a mapper can need it.
TENSORRT = {
    *("Add", "Cast", "Concat", "Cos", "Gather", "GatherND", "MatMul", "Mul", "Reshape", "Sin"),
    *("Split", "Sub", "Transpose", "Unsqueeze"),
}
TOKENS = (1, 13)  # neither is one that the self test runs


def spec(architecture, layers, **overrides):
    return ModelSpec.from_config(tiny_config(architecture, layers, **overrides))


SPECS = {
    "default": spec("qwen3", 3),
    "llama3": spec("llama", 4, head_dim=8),
    "more_heads": spec("qwen3", 2, num_key_value_heads=4, head_dim=8),
    "scaled": spec("arcee", 3),
    "interleaved": spec("cohere", 3),
    "partial": spec("stablelm", 2),
    "partial_interleaved": spec("glm4", 4),
}
PAIRS = [
    ("default", "llama3"),
    ("scaled", "partial"),
    ("partial", "scaled"),
    ("interleaved", "default"),
    ("default", "interleaved"),
    ("partial_interleaved", "scaled"),
    ("llama3", "partial_interleaved"),
]
CASES = [(*pair, heads) for pair in PAIRS for heads in ("all", "matched")]
CASES += [("more_heads", "llama3", "all"), ("default", "more_heads", "all")]


def mapper_of(source="partial_interleaved", target="scaled", heads="all"):
    return random_mapper(SPECS[source], SPECS[target], heads)


def caches(mapper, tokens, dtype=torch.float32):
    """Random source keys and values, and positions that differ from row to row."""
    source = mapper.config.source
    shape = (source.num_layers, 3, source.kv_heads, tokens, source.head_dim)
    positions = torch.tensor([[0], [7], [40000]]) + 2 * torch.arange(tokens)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), positions


def mapped(mapper, keys, values, positions):
    cache = mapper(build_cache(keys, values), positions=positions, dtype=torch.float32)
    return [
        torch.stack([getattr(layer, kind) for layer in cache.layers]) for kind in ("keys", "values")
    ]


def run(path, keys, values, positions):
    """As a user does: from the file, with the runtime's optimisations."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path / "model.onnx", options)
    feeds = {"source_keys": keys, "source_values": values, "positions": positions}
    results = session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
    return [torch.from_numpy(result) for result in results]


def test_the_cases_are_what_they_are_called():
    assert SPECS["scaled"].rope.attention_scaling > 1.1
    assert SPECS["interleaved"].rope.interleaved
    assert SPECS["interleaved"].rope.rotary_dim == SPECS["interleaved"].head_dim
    assert SPECS["partial_interleaved"].rope.interleaved
    for name in ("partial", "partial_interleaved"):
        assert SPECS[name].rope.rotary_dim < SPECS[name].head_dim
    assert not SPECS["partial"].rope.interleaved
    assert SPECS["more_heads"].kv_heads != SPECS["default"].kv_heads
    assert SPECS["llama3"].head_dim != SPECS["default"].head_dim
    assert not set(TOKENS) & set(onnx_check.TEST_TOKENS)


@pytest.mark.parametrize(("source", "target", "heads"), CASES)
def test_float32_is_the_mapper(tmp_path, source, target, heads):
    """The same float32 arithmetic in another order: sums of at most 64 products."""
    mapper = mapper_of(source, target, heads)
    path = export_onnx(make_plan(mapper), tmp_path / "export")
    for tokens in TOKENS:
        arguments = caches(mapper, tokens)
        for found, expected in zip(run(path, *arguments), mapped(mapper, *arguments), strict=True):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("source", "target", "heads"), CASES)
def test_float16_is_the_mapper_rounded(tmp_path, source, target, heads):
    """Both have the same float16 weights and cache; the mapper computes in float32.

    The graph rounds stripped keys and products to float16, each number by up to 2^-11 of its
    size. Over the terms of a sum these are independent, so the error's deviation is below 2^-11
    of the result's; the largest of thousands is five of them.
    """
    mapper = mapper_of(source, target, heads).to(torch.float16)
    path = export_onnx(make_plan(mapper), tmp_path / "export")
    for tokens in TOKENS:
        arguments = caches(mapper, tokens, torch.float16)
        for found, expected in zip(run(path, *arguments), mapped(mapper, *arguments), strict=True):
            assert found.dtype == torch.float16
            error = (found.float() - expected).abs()
            assert float(error.max()) < 5 * 2**-11 * float(expected.std())


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_bfloat16_is_the_mapper_rounded(tmp_path, heads):
    """As float16, with 2^-8; onnx's own evaluator has the bfloat16 products that the runtime lacks.

    It rounds the partial sums too, which doubles the bound.
    """
    mapper = mapper_of(heads=heads).to(torch.bfloat16)
    path = export_onnx(make_plan(mapper), tmp_path / "export")
    *states, positions = caches(mapper, 13, torch.bfloat16)
    feeds = [state.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for state in states]
    feeds = dict(zip(("source_keys", "source_values"), feeds, strict=True))
    results = ReferenceEvaluator(onnx.load(path / "model.onnx")).run(
        None, {**feeds, "positions": positions.numpy()}
    )
    for result, expected in zip(results, mapped(mapper, *states, positions), strict=True):
        assert result.dtype == ml_dtypes.bfloat16
        error = (torch.from_numpy(result.astype("float32")) - expected).abs()
        assert float(error.max()) < 10 * 2**-8 * float(expected.std())


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_bfloat16_multiplies_in_bfloat16_and_rotates_in_float32(tmp_path, heads):
    plan = make_plan(mapper_of(heads=heads), dtype=torch.bfloat16)
    path = export_onnx(plan, tmp_path / "export")
    model = onnx.shape_inference.infer_shapes(onnx.load(path / "model.onnx"), strict_mode=True)
    graph = model.graph
    types = {item.name: item.data_type for item in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        types[value.name] = value.type.tensor_type.elem_type
    expected = {"MatMul": TensorProto.BFLOAT16, "Sin": TensorProto.FLOAT, "Add": TensorProto.FLOAT}
    for kind, element_type in expected.items():
        nodes = [node for node in graph.node if node.op_type == kind]
        assert nodes
        assert {types[name] for node in nodes for name in node.input} == {element_type}
    for value in (*graph.input, *graph.output):
        assert (types[value.name] == TensorProto.BFLOAT16) == (value.name != "positions")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", ["all", "matched"])
def test_tensorrt_takes_the_operators_and_the_axes_are_free(heads, dtype):
    for pair in PAIRS:
        mapper = mapper_of(*pair, heads)
        model = onnx_graph._build(make_plan(mapper, dtype=dtype), None)
        assert {node.op_type for node in model.graph.node} <= TENSORRT
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 20)]
        shapes = {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in (*model.graph.input, *model.graph.output)
        }
        for side, kind in ((s, k) for s in ("source", "target") for k in ("keys", "values")):
            model_spec = getattr(mapper.config, side)
            assert shapes.pop(f"{side}_{kind}") == [
                *(model_spec.num_layers, "batch", model_spec.kv_heads, "tokens"),
                model_spec.head_dim,
            ]
        assert shapes == {"positions": ["batch", "tokens"]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_in_a_file_of_their_own_change_nothing(tmp_path, monkeypatch, dtype):
    mapper = mapper_of()
    plan = make_plan(mapper, dtype=dtype)
    inline = export_onnx(plan, tmp_path / "inline")
    assert sorted(file.name for file in inline.iterdir()) == ["README.md", "model.onnx"]
    monkeypatch.setattr(onnx_graph, "INLINE_BYTES", plan.size_bytes - 1)
    external = export_onnx(plan, tmp_path / "external")
    names = sorted(file.name for file in external.iterdir())
    assert names == ["README.md", "model.onnx", "model.onnx.data"]
    assert "model.onnx.data" in (external / "README.md").read_text()
    graph = onnx.load(external / "model.onnx", load_external_data=False).graph
    outside = {item.name for item in graph.initializer if item.external_data}
    layers = range(plan.target_layers)
    places = [dict((e.key, e.value) for e in i.external_data) for i in graph.initializer]
    assert all(int(place.get("offset", 0)) % 4096 == 0 for place in places)  # can be mapped
    assert outside == {f"{kind}_weight_{layer}" for kind in ("key", "value") for layer in layers}
    arguments = caches(mapper, 5, dtype)
    for found, expected in zip(run(external, *arguments), run(inline, *arguments), strict=True):
        assert torch.equal(found, expected)


def test_weights_stay_in_the_graph_up_to_the_threshold(tmp_path, monkeypatch):
    plan = make_plan(mapper_of())
    monkeypatch.setattr(onnx_graph, "INLINE_BYTES", plan.size_bytes)
    assert not (export_onnx(plan, tmp_path / "export") / "model.onnx.data").exists()


def test_equal_plans_give_equal_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_graph, "INLINE_BYTES", 0)
    first, second = (
        export_onnx(make_plan(mapper_of()), tmp_path / name) for name in ("first", "second")
    )
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()


def test_the_graph_says_what_it_is(tmp_path):
    mapper = mapper_of(heads="matched")
    path = export_onnx(make_plan(mapper, dtype=torch.float16), tmp_path / "export")
    facts = {entry.key: entry.value for entry in onnx.load(path / "model.onnx").metadata_props}
    assert facts == {
        "kvhub_version": onnx_graph.__version__,
        "source": mapper.config.source.model_id,
        "source_revision": "",
        "target": mapper.config.target.model_id,
        "target_revision": "",
        "heads": "matched",
        "top_k": "2",
        "selection": str([list(layers) for layers in mapper.config.selection]),
        "dtype": "float16",
    }


def test_the_readme_runs(tmp_path, monkeypatch):
    mapper = mapper_of()
    path = export_onnx(make_plan(mapper), tmp_path / "export")
    readme = (path / "README.md").read_text()
    arguments = caches(mapper, 5)
    names = dict(zip(("keys", "values", "positions"), (a.numpy() for a in arguments), strict=True))
    monkeypatch.chdir(path)
    exec(readme.split("```python\n")[1].split("```")[0], names)
    for name, expected in zip(("keys", "values"), mapped(mapper, *arguments), strict=True):
        found = torch.from_numpy(names[f"target_{name}"])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for side in ("source", "target"):
        model_spec = getattr(mapper.config, side)
        sizes = (model_spec.num_layers, "batch", model_spec.kv_heads, "tokens", model_spec.head_dim)
        for kind in ("keys", "values"):
            assert f"| {side}_{kind} | float32 | [{', '.join(map(str, sizes))}] |" in readme


def flip_a_bit(path):
    """One exponent bit of the last weight, which only the last dim of the last head sees."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x10
    path.write_bytes(content)


def put_nan(path):
    """Into the last weight: these two bytes are a NaN in each of the dtypes."""
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\x7f")


def shorten(path):
    path.write_bytes(path.read_bytes()[:-10])


def replace_by_nothing(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.onnx.data", flip_a_bit),
        ("model.onnx.data", put_nan),
        ("model.onnx.data", shorten),
        ("model.onnx.data", remove),
        ("model.onnx", shorten),
        ("model.onnx", replace_by_nothing),
        ("model.onnx", remove),
    ],
)
def test_a_damaged_export_fails_the_self_test(tmp_path, monkeypatch, dtype, file, damage):
    monkeypatch.setattr(onnx_graph, "INLINE_BYTES", 0)
    plan = make_plan(mapper_of(), dtype=dtype)
    path = export_onnx(plan, tmp_path / "export")
    self_test(path, plan)
    damage(path / file)
    with pytest.raises(VerificationError, match=r"does not map as the mapper|cannot be run"):
        self_test(path, plan)


def test_an_export_of_another_mapper_fails_the_self_test(tmp_path):
    path = export_onnx(make_plan(mapper_of("default", "llama3")), tmp_path / "export")
    other = random_mapper(SPECS["default"], SPECS["llama3"], seed=1)
    with pytest.raises(VerificationError, match="does not map as the mapper"):
        self_test(path, make_plan(other))
    larger = random_mapper(SPECS["default"], spec("llama", 5, head_dim=8))
    with pytest.raises(VerificationError, match="of shape"):
        self_test(path, make_plan(larger))


@pytest.mark.parametrize("error", [VerificationError, KeyboardInterrupt])
def test_nothing_stays_of_a_failed_export(tmp_path, monkeypatch, error):
    def fail(path, plan):
        assert (path / "model.onnx").is_file()
        raise error("stop")

    monkeypatch.setattr(onnx_graph, "self_test", fail)
    monkeypatch.setattr(onnx_graph, "INLINE_BYTES", 0)
    with pytest.raises(error):
        export_onnx(make_plan(mapper_of()), tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_graph_never_appears(tmp_path, monkeypatch):
    """Without its rotations a graph is sound, but its numbers are wrong."""
    monkeypatch.setattr(onnx_graph.Turn, "__call__", lambda self, keys, head_dim: keys)
    with pytest.raises(VerificationError, match="keys of target layer 0"):
        export_onnx(make_plan(mapper_of()), tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_what_overflows_float16_never_appears(tmp_path):
    mapper = mapper_of()
    mapper.value_weight *= 2e4  # itself within float16, but not its products
    with pytest.raises(VerificationError, match="try float32 or bfloat16"):
        export_onnx(make_plan(mapper, dtype=torch.float16), tmp_path / "export")
    assert list(tmp_path.iterdir()) == []
    export_onnx(make_plan(mapper, dtype=torch.bfloat16), tmp_path / "export")


def test_what_is_there_is_left_alone(tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "mine").touch()
    with pytest.raises(ConflictError, match="exists"):
        export_onnx(make_plan(mapper_of()), tmp_path / "export")
    assert [file.name for file in (tmp_path / "export").iterdir()] == ["mine"]


def test_a_plan_that_cannot_be_exported_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="float64"):
        export_onnx(make_plan(mapper_of(), dtype=torch.float64), tmp_path / "export")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match=r"kvhub\[onnx\]"):
        export_onnx(make_plan(mapper_of()), tmp_path / "export")
    assert list(tmp_path.iterdir()) == []
