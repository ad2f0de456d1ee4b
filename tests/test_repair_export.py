"""Mappers with networks outside of PyTorch's own caches: pages, ONNX, and engines' directories."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import onnx
import onnxruntime
import pytest
import torch
from deployments import side
from kvhub.exporters import export, onnx_graph
from kvhub.exporters.directory import PACKAGE
from kvhub.exporters.loader import _kernels
from kvhub.exporters.onnx_graph import export_onnx
from kvhub.exporters.paged import map_paged, tokens_at_once
from kvhub.exporters.plan import make_plan
from kvhub.exporters.selftest import FAILED, PASSED, SKIPPED, run_checks
from kvhub.exporters.selftest_map import check_map, mapping_of
from kvhub.exporters.serving import load_deployment, load_plan, mapper_digest
from kvhub.exporters.status import Status
from kvhub.exporters.triton_map import TritonMap
from networks import repaired_mapper, with_networks
from pages import assert_maps_as, fill_source, paged
from safetensors.torch import load_file, save_file
from test_onnx_graph import SPECS, TENSORRT, caches, mapped, run
from test_paged import peak_bytes
from tiny import tiny_config

from kvhub import ModelSpec
from kvhub.errors import UsageError, VerificationError

HEADS = ["all", "matched"]


def mapper_of(source="qwen3", target="glm4", heads="all", dtype=torch.float32, **options):
    specs = [
        ModelSpec.from_config(
            tiny_config(name, layers, head_dim=16), f"org/{name}", "0" * 40, "tokens"
        )
        for name, layers in ((source, 3), (target, 4))
    ]
    return repaired_mapper(*specs, heads, dtype, **options)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_map_as_a_plain_cache_does(heads, dtype):
    mapper = mapper_of("arcee", "glm4", heads, dtype)
    pages = fill_source(paged(mapper.config.source, 4))
    target = paged(mapper.config.target, 8)
    map_paged(make_plan(mapper), pages, target)
    assert_maps_as(mapper, pages, target, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["all float32", "matched bfloat16"])
def test_the_workspace_holds_the_hidden_layers_too(case):
    heads, dtype = case.split()
    mapper = mapper_of(heads=heads, hidden=300, scale=0.05)
    plan = make_plan(mapper, dtype=getattr(torch, dtype))
    read = getattr(torch, dtype)
    pages = fill_source(paged(mapper.config.source, 8, read, lengths=[130], starts=[3]))
    target = paged(mapper.config.target, 16, lengths=[130], starts=[3])
    map_paged(plan, pages, target)
    whole = target.pool.clone()
    linear = replace(plan, repair={}, repaired={})
    for workspace_bytes in (1_000_000, 1_200_000):

        def run_within(bound=workspace_bytes):
            map_paged(plan, pages, target, workspace_bytes=bound)

        assert 1 <= tokens_at_once(plan, workspace_bytes) <= tokens_at_once(linear, workspace_bytes)
        assert peak_bytes(run_within) <= workspace_bytes
        torch.testing.assert_close(target.pool, whole, rtol=1e-5, atol=1e-4)


def test_a_plan_counts_the_networks():
    mapper = mapper_of()
    plan = make_plan(mapper)
    assert plan.parameters == mapper.num_parameters
    assert plan.size_bytes == mapper.size_bytes
    weights = [tensor for name, tensor in mapper.tensors().items() if tensor.dim() == 4]
    assert plan.flops_per_token == 2 * sum(weight.numel() for weight in weights)
    with pytest.raises(VerificationError, match="Expected networks of layers"):
        replace(plan, repair={})
    with pytest.raises(VerificationError, match="Expected networks of layers"):
        replace(plan, repaired={"key": (1,), "value": (2,)})
    mapper.key_repair_mid[1, 0, 2, 3] = float("nan")
    with pytest.raises(VerificationError, match="key_repair_mid is not finite"):
        make_plan(mapper)


def test_the_kernels_refuse_and_plain_torch_maps():
    plan = make_plan(mapper_of(), dtype=torch.float16)
    with pytest.raises(UsageError, match=r"also has networks, of target layers \[1, 2\]"):
        TritonMap(plan)
    status = Status()
    on_gpu = SimpleNamespace(
        key_weight=SimpleNamespace(is_cuda=True), repair=plan.repair, repaired=plan.repaired
    )
    assert _kernels(on_gpu, 2**20, status) is None
    assert status.counters["error: kernels"] == 1


# ONNX.


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pair", [("partial_interleaved", "scaled"), ("default", "llama3")])
def test_float32_graphs_are_the_mapper(tmp_path, pair, heads):
    mapper = repaired_mapper(*(SPECS[name] for name in pair), heads)
    path = export_onnx(make_plan(mapper), tmp_path / "export")
    for tokens in (1, 13):
        arguments = caches(mapper, tokens)
        for found, expected in zip(run(path, *arguments), mapped(mapper, *arguments), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    content = onnx.load(path / "model.onnx")
    kinds = [node.op_type for node in content.graph.node]
    assert {*kinds} <= TENSORRT | {"Relu"}
    assert kinds.count("Relu") == 2 * 3  # two per network


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_graphs_pass_their_own_test_and_run(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(onnx_graph, "INLINE_BYTES", 0)
    mapper = repaired_mapper(SPECS["default"], SPECS["llama3"], dtype=dtype, scale=0.1)
    plan = make_plan(mapper)
    path = export_onnx(plan, tmp_path / "export")
    graph = onnx.load(path / "model.onnx", load_external_data=False).graph
    outside = {item.name for item in graph.initializer if item.external_data}
    assert {"key_repair_1_weight_0", "value_repair_2_weight_2"} <= outside
    if dtype == torch.float16:
        arguments = caches(mapper, 13, dtype)
        session = onnxruntime.InferenceSession(path / "model.onnx")
        names = ("source_keys", "source_values", "positions")
        feeds = {n: a.numpy() for n, a in zip(names, arguments, strict=True)}
        results = session.run(None, feeds)
        for result, expected in zip(results, mapped(mapper, *arguments), strict=True):
            error = (torch.from_numpy(result).float() - expected).abs()
            assert float(error.max()) < 8 * 2**-11 * float(expected.std())


def test_a_graph_without_its_networks_fails_the_test(tmp_path):
    mapper = repaired_mapper(SPECS["default"], SPECS["llama3"])
    plan = make_plan(mapper)
    path = export_onnx(
        replace(plan, config=replace(plan.config, repair=None), repair={}, repaired={}),
        tmp_path / "export",
    )
    with pytest.raises(VerificationError, match="does not map as the mapper does"):
        onnx_graph.self_test(path, plan)


# Directories that engines serve from.


@pytest.mark.parametrize("backend", ["trtllm", "vllm"])
def test_an_exported_directory_passes_by_plain_torch_and_says_so(tmp_path, backend):
    mapper = mapper_of(dtype=torch.bfloat16)
    path = export(mapper, backend, tmp_path / "export")
    assert (
        "Triton kernels: no, only plain torch: the mapper has networks"
        in (path / "README.md").read_text()
    )
    assert (path / PACKAGE / "networks.py").is_file()
    deployment = load_deployment(path)
    assert deployment.facts["repaired"] == {"key": [1, 2], "value": [2]}
    plan, found = make_plan(mapper), load_plan(deployment, "cpu", 0)
    assert found.repair.keys() == plan.repair.keys()
    for name, tensor in plan.repair.items():
        assert torch.equal(found.repair[name], tensor)
    results = {result.name: result for result in run_checks(path, [], None)}
    assert results["weights"].state == results["map in torch"].state == PASSED
    assert results["kernels"].state == SKIPPED
    assert "has networks" in str(results["kernels"])
    linear = replace(plan, repair={}, repaired={})
    with pytest.raises(VerificationError, match="rounding steps"):
        check_map(plan, deployment.settings, mapping_of(linear, 2**28, kernels=False))


def test_the_exported_code_runs_by_itself(tmp_path):
    """In a fresh interpreter that has the directory and no kvhub of ours on its mind."""
    path = export(mapper_of(heads="matched", dtype=torch.bfloat16), "trtllm", tmp_path / "export")
    code = (
        f"import sys; sys.path.insert(0, {str(path)!r}); from pathlib import Path;"
        f"from {PACKAGE}.serving import load_deployment, load_plan;"
        f"from {PACKAGE}.selftest_map import check_map, mapping_of;"
        f"d = load_deployment(Path({str(path)!r})); p = load_plan(d, 'cpu', 0);"
        "print(check_map(p, d.settings, mapping_of(p, 2**26, kernels=False)));"
        "print([name for name in sys.modules if name.split('.')[0] == 'kvhub'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "rounding steps from the equation" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("heads", HEADS)
def test_each_rank_adds_its_heads_share(tmp_path, heads):
    mapper = mapper_of(heads=heads, dtype=torch.bfloat16)
    path = export(mapper, "trtllm", tmp_path / "export")
    deployment = load_deployment(path, {"target_tp": 2})
    whole = make_plan(mapper)
    pages = fill_source(paged(mapper.config.source, 4))
    expected = paged(mapper.config.target, 8)
    map_paged(whole, pages, expected)
    for rank in range(2):
        plan = load_plan(deployment, "cpu", rank)
        read = pages
        if heads == "matched":
            read = replace(pages, pool=pages.pool[:, :, :, rank : rank + 1])
        found = replace(expected, pool=torch.zeros_like(expected.pool[:, :, :, :1]))
        map_paged(plan, read, found)
        cells = found.pool != 0
        share = expected.pool[:, :, :, rank : rank + 1]
        torch.testing.assert_close(found.pool[cells], share[cells], rtol=1e-4, atol=1e-4)
        assert bool(cells.any())


def test_the_digest_sees_networks_and_old_digests_stay(tmp_path):
    mapper = mapper_of(dtype=torch.bfloat16)
    facts = load_deployment(export(mapper, "trtllm", tmp_path / "export")).facts
    moved = {**facts, "repaired": {"key": [1, 3], "value": [2]}}
    assert mapper_digest(moved) != facts["digest"]
    specs = {name: side(getattr(mapper.config, name), name) for name in ("source", "target")}
    plain = {"weights_sha256": "0", "gather": [[0]], "heads": "all", **specs}
    assert mapper_digest(plain) == mapper_digest({**plain, "unknown": 1})


def test_damaged_networks_fail_the_self_test(tmp_path):
    path = export(mapper_of(dtype=torch.bfloat16), "trtllm", tmp_path / "export")
    file = path / "weights.safetensors"
    tensors = load_file(file)
    del tensors["value_repair_out"]
    save_file(tensors, file)
    results = {result.name: result.state for result in run_checks(path, [], None)}
    assert results["weights"] == results["map in torch"] == FAILED


def test_networks_of_one_kind_only(tmp_path):
    specs = [
        replace(spec, model_id="org/m", revision="0" * 40, tokenizer_digest="t")
        for spec in (SPECS["default"], SPECS["llama3"])
    ]
    mapper = repaired_mapper(*specs, dtype=torch.bfloat16, keys=(), values=(0, 3))
    path = export(with_networks(mapper, keys=(), values=(0, 3)), "trtllm", tmp_path / "export")
    assert load_plan(load_deployment(path), "cpu", 0).repaired == {"key": (), "value": (0, 3)}
