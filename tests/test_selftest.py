"""An exported directory's own test: it passes as exported, and each kind of damage fails it."""

import json
import shutil
import sys
from dataclasses import replace

import pytest
import torch
import triton_interpreter  # noqa: F401
from kvhub.exporters import selftest, selftest_map, triton_map
from kvhub.exporters.plan import make_plan
from kvhub.exporters.selftest import FAILED, PASSED, SKIPPED, main, run_checks
from kvhub.exporters.selftest_map import Pool, check_map, mapping_of
from kvhub.exporters.serving import load_deployment, load_plan, mapper_digest
from kvhub.exporters.store_files import FileStore
from kvhub.exporters.trtllm import export_trtllm
from mapping import random_mapper
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_model

from kvhub import ModelSpec
from kvhub.errors import VerificationError

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
PAIRS = [("qwen3", "llama"), ("arcee", "glm4"), ("cohere", "stablelm")]


def mapper_of(source="qwen3", target="llama", heads="all", dtype=torch.float16):
    """Of two models that differ in their numbers of layers."""
    specs = [
        ModelSpec.from_config(
            tiny_config(name, layers, head_dim=16, dtype="float16"),
            *(f"org/{name}", "0" * 40, "tokens"),
        )
        for name, layers in ((source, 3), (target, 4))
    ]
    return random_mapper(*specs, heads, dtype=dtype)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_trtllm(make_plan(mapper_of()), tmp_path_factory.mktemp("selftest") / "export")


@pytest.fixture
def directory(exported, tmp_path):
    """A copy to damage, with a store of its own."""
    path = shutil.copytree(exported, tmp_path / "export")
    settings(
        path,
        store={"kind": "files", "path": str(tmp_path / "store"), "capacity_bytes": 2**24},
        staging_path=str(tmp_path / "stage"),
    )
    return path


def settings(path, **changes):
    file = path / "settings.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def facts(path, change, *, seal=False):
    """Edit kvhub.json; sealed, its digest fits again."""
    file = path / "kvhub.json"
    content = json.loads(file.read_text())
    change(content)
    if seal:
        content["digest"] = mapper_digest(content)
    file.write_text(json.dumps(content))


def states(path, *models, side=None):
    return {result.name: result.state for result in run_checks(path, models, side)}


def test_an_export_passes(directory, tmp_path):
    expected = {
        "versions": PASSED,
        "weights": PASSED,
        "kernels": PASSED,  # by Triton's interpreter
        "map in torch": PASSED,
        "store": PASSED,
        "model": SKIPPED,
    }
    assert states(directory) == expected
    assert not [*(tmp_path / "store").glob("*.kvhub")]
    assert [file.name for file in (tmp_path / "stage").iterdir()] == ["lock"]


@pytest.mark.parametrize("heads", ["all", "matched"])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_rope_and_every_rank_passes(tmp_path, source, target, heads):
    path = export_trtllm(make_plan(mapper_of(source, target, heads)), tmp_path / "export")
    settings(path, target_tp=2, chunk_tokens=16)
    deployment = load_deployment(path)
    for rank in range(2):
        plan = load_plan(deployment, "cpu", rank)
        for kernels in (True, False):
            mapping = mapping_of(plan, 2**24, kernels=kernels)
            assert "4 layers, 1 KV heads" in check_map(plan, deployment.settings, mapping)


def flip(path):
    content = bytearray((path / "weights.safetensors").read_bytes())
    content[-1] ^= 0x10
    (path / "weights.safetensors").write_bytes(content)


def replace_weights(path):
    """Others, with their own sha256 in kvhub.json."""
    file = path / "weights.safetensors"
    tensors = load_file(file)
    tensors["value_bias"] += 1
    save_file(tensors, file)
    from kvhub.exporters.serving import _sha256

    facts(path, lambda content: content.update(weights_sha256=_sha256(file)))


def turn(side):
    def change(content):
        content[side]["rope"]["inv_freq"][1] *= 1.01

    return change


DAMAGE = {
    "a flipped bit": (flip, {"weights", "kernels", "map in torch"}),
    "other weights": (replace_weights, {"directory"}),
    "source inv_freq": (lambda path: facts(path, turn("source")), {"directory"}),
    "target inv_freq": (lambda path: facts(path, turn("target")), {"directory"}),
    "another gather": (
        lambda path: facts(path, lambda content: content["gather"][0].reverse()),
        {"directory"},
    ),
    "no weights": (
        lambda path: (path / "weights.safetensors").unlink(),
        {"weights", "kernels", "map in torch"},
    ),
    "no facts": (lambda path: (path / "kvhub.json").unlink(), {"directory"}),
    "an unknown setting": (lambda path: settings(path, chunks=1), {"directory"}),
    "a small store": (
        lambda path: settings(
            path, store={"kind": "files", "capacity_bytes": 2**10, "path": f"{path}/store"}
        ),
        {"store"},
    ),
    "a small stage": (lambda path: settings(path, staging_bytes=2**10), {"store"}),
    "no such store": (lambda path: settings(path, store={"kind": "disks"}), {"store"}),
    "ranks that do not divide": (
        lambda path: settings(path, target_tp=3),
        {*(f"{name} of rank {rank}" for name in ("kernels", "map in torch") for rank in range(3))}
        | {"store"},
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_fails_it(directory, capsys, damage):
    damaging, failing = DAMAGE[damage]
    damaging(directory)
    assert main(["--json"], directory) == 1
    shown = json.loads(capsys.readouterr().out)
    assert not shown["passed"]
    failed = {check["name"]: check for check in shown["checks"] if check["state"] == FAILED}
    assert set(failed) == failing
    assert all(check["found"] for check in failed.values())


def test_a_broken_kernel_fails_it(directory, monkeypatch):
    monkeypatch.setattr(triton_map, "_pair_order", lambda rope, size: torch.arange(size))
    assert states(directory)["kernels"] == FAILED


def test_a_kernel_that_does_not_compile_fails_it(directory, monkeypatch):
    def fail(self, *arguments):
        raise RuntimeError("ptxas")

    monkeypatch.setattr(triton_map.TritonMap, "enqueue", fail)
    found = {result.name: result for result in run_checks(directory)}
    assert found["kernels"].state == FAILED
    assert "RuntimeError: ptxas" in found["kernels"].found
    assert found["map in torch"].state == PASSED


def test_without_a_gpu_kernels_are_skipped_by_name(directory, monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    found = {result.name: result for result in run_checks(directory)}
    assert found["kernels"].state == SKIPPED
    assert "compute capability 9.0" in found["kernels"].found


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((0, 0, 0, 0, 0, 0), "found others"),  # of a block that holds no token, see below
        (None, "the keys of target layer 2 within"),
    ],
)
def test_one_wrong_cell_is_found(exported, place, message):
    deployment = load_deployment(exported)
    plan = load_plan(deployment, "cpu", 0)
    mapping = mapping_of(plan, 2**24, kernels=False)

    def wrong(source, target):
        mapping(source, target)
        used = {*target.block_table.flatten().tolist()}
        spare = min({*range(len(target.pool))} - used)
        if place is None:
            target.pool[int(target.block_table[1, 0]), 2, 0, 1, 3, 5] += 1
        else:
            target.pool[spare][place[1:]] = 0

    with pytest.raises(VerificationError, match=message):
        check_map(plan, deployment.settings, wrong)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_is_found(exported, number):
    deployment = load_deployment(exported)
    plan = load_plan(deployment, "cpu", 0)

    def wrong(source, target):
        target.pool.fill_(number)

    with pytest.raises(VerificationError, match="the keys of target layer 0"):
        check_map(plan, deployment.settings, wrong)


def test_pools_that_put_tokens_before_heads_fail(exported, monkeypatch):
    """What a wrong attention backend would do."""
    deployment = load_deployment(exported)
    plan = load_plan(deployment, "cpu", 0)
    cache = Pool.cache

    def swapped(self, starts):
        found = cache(self, starts)
        blocks, layers, kinds, heads, tokens, size = found.pool.shape
        other = found.pool.view(blocks, layers, kinds, tokens, heads, size).transpose(3, 4)
        return replace(found, pool=other)

    monkeypatch.setattr(selftest_map.Pool, "cache", swapped)
    with pytest.raises(VerificationError):
        check_map(plan, deployment.settings, mapping_of(plan, 2**24, kernels=False))


def test_a_store_that_changes_entries_fails_it(directory, monkeypatch):
    get = FileStore.get

    def damaged(self, key):
        found = bytearray(get(self, key))
        found[-1] ^= 1
        return memoryview(found)

    monkeypatch.setattr(FileStore, "get", damaged)
    assert states(directory)["store"] == FAILED


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    paths = {}
    for name, layers in (("qwen3", 3), ("llama", 4)):
        paths[name] = tmp_path_factory.mktemp("models") / name
        tiny_model(name, layers, head_dim=16).save_pretrained(paths[name])
    return paths


def test_models_are_told_apart_and_compared(directory, models):
    found = {result.name: result for result in run_checks(directory, [*models.values()])}
    for side in ("source", "target"):
        assert found[f"rope of the {side}"].state == PASSED
        assert "cannot be told" in found[f"files of the {side}"].found


@pytest.mark.parametrize(("side", "name"), [("source", "qwen3"), ("target", "llama")])
def test_a_changed_rope_fails_against_the_model(directory, models, side, name):
    """Also where the digest was made to fit."""
    facts(directory, turn(side), seal=True)
    found = {result.name: result for result in run_checks(directory, [models[name]])}
    assert found["weights"].state == PASSED
    assert found[f"rope of the {side}"].state == FAILED
    assert "to agree within 0.02" in found[f"rope of the {side}"].found


def test_another_model_fails_it(directory, models, tmp_path):
    tiny_model("qwen3", 5).save_pretrained(tmp_path / "other")
    assert states(directory, tmp_path / "other")[f"model {tmp_path / 'other'}"] == FAILED
    wrong_side = states(directory, models["qwen3"], side="target")
    assert wrong_side[f"model {models['qwen3']}"] == FAILED
    assert states(directory, tmp_path / "no")[f"model {tmp_path / 'no'}"] == FAILED


def test_two_models_of_one_geometry_need_a_side(tmp_path):
    spec = mapper_of().config.source
    twin = random_mapper(spec, replace(spec, model_id="org/twin"), dtype=torch.float16)
    path = export_trtllm(make_plan(twin), tmp_path / "export")
    tiny_model("qwen3", 3, head_dim=16).save_pretrained(tmp_path / "model")
    deployment = load_deployment(path)
    (result,) = selftest._models(deployment, tmp_path / "model", None)
    assert "--side source" in result.hint
    results = selftest._models(deployment, tmp_path / "model", "target")
    assert {result.name: result.state for result in results} == {
        "files of the target": PASSED,
        "rope of the target": PASSED,
    }


def test_without_transformers_rope_is_skipped_and_said_so(directory, models, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = {result.name: result for result in run_checks(directory, [models["qwen3"]])}
    assert found["rope of the source"].state == SKIPPED
    assert "transformers cannot be imported" in found["rope of the source"].found


def test_people_read_lines_and_what_to_do(directory, capsys):
    assert main([], directory) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("passed  versions: python")
    facts(directory, turn("target"))
    assert main([], directory) == 1
    shown = capsys.readouterr().out
    assert "kvhub.json says that its digest is" in shown
    assert "Export the mapper again" in shown
    assert shown.splitlines()[-1] == "Do not serve: directory failed."
