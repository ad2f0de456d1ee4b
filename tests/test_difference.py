"""The difference of two packages is all that differs, exactly, and nothing else."""

import json
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from mapping import config_for, random_mapper
from regression import spec
from safetensors.torch import load_file, save_file

import kvhub.difference
from kvhub import KVMapper
from kvhub.difference import compare_packages
from kvhub.errors import NotFoundError, VerificationError
from kvhub.mapper_config import tensor_shapes
from kvhub.package import Manifest, load, save
from kvhub.report import SETTINGS, Estimate, Fidelity, Report, SettingMetrics

SMALL, LARGE = spec(12, name="org/small"), spec(12, name="org/large")


def estimate(value):
    return Estimate(value, value - 0.05, value + 0.05)


def report(shift=0.0, **provenance):
    metrics = SettingMetrics(*(estimate(0.1 * number + shift) for number in range(5)))
    return Report(
        settings=dict.fromkeys(SETTINGS, metrics),
        retention=estimate(0.9),
        floor_normalized_retention=None,
        gap_recovered=estimate(0.5),
        key_r2=0.8 + shift,
        value_r2=0.7,
        attention_output_cosine=estimate(0.97),
        layers=Fidelity(
            (0.8,), (0.7,), ((0.8,),), ((0.7,),), (0.97,), ((0.97,),), (1.0,), (1.0,), ()
        ),
        notes=(),
        provenance={"mapper": "m", "data": {"source": "text"}, "scored_tokens": 10, **provenance},
    )


@pytest.fixture
def mapper():
    return random_mapper(SMALL, LARGE)


@pytest.fixture
def package(mapper, tmp_path):
    save(mapper, tmp_path / "old", report=report().to_dict())
    return tmp_path / "old"


def with_tensors(mapper, **tensors):
    return KVMapper(mapper.config, {**mapper.tensors(), **tensors})


def saved(mapper, path, **options):
    save(mapper, path, **options)
    return path


def test_a_package_does_not_differ_from_itself_or_its_copy(package, tmp_path):
    shutil.copytree(package, tmp_path / "copy")
    for other in (package, tmp_path / "copy"):
        found = compare_packages(package, other)
        assert found.identical
        assert found.to_dict() == {
            "identical": True,
            "bump": "none",
            "files": (),
            "compatibility": (),
            "config": (),
            "metrics": (),
            "evaluation": (),
            "tensors": (),
        }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensor_deltas_are_those_of_torch_in_float64(mapper, tmp_path, dtype):
    old = mapper.to(dtype=dtype)
    new = random_mapper(SMALL, LARGE, seed=1).to(dtype=dtype)
    a, b = saved(old, tmp_path / "a"), saved(new, tmp_path / "b")
    found = {change.name: change for change in compare_packages(a, b).tensors}
    assert len(found) == 4 * LARGE.num_layers
    for stack, stored in load(a).tensors().items():
        other = load(b).tensors()[stack]
        for layer in range(LARGE.num_layers):
            x, y = stored[layer].double(), other[layer].double()
            change = found[f"{stack}.{layer}"]
            assert change.old_shape == change.new_shape == tuple(x.shape)
            assert change.max_abs == (y - x).abs().max().item()
            norm = torch.linalg.vector_norm
            expected = norm(y - x) / torch.maximum(norm(x), norm(y))
            assert change.relative == pytest.approx(expected.item(), rel=1e-15)


def test_a_single_changed_number_is_found_and_nothing_else(mapper, package, tmp_path):
    weight = mapper.value_weight.clone()
    place = (10, 0, 3, 2)
    weight[place] = torch.nextafter(weight[place], torch.tensor(torch.inf))
    changed = saved(
        with_tensors(mapper, value_weight=weight), tmp_path / "new", report=report().to_dict()
    )
    found = compare_packages(package, changed)
    assert [change.name for change in found.tensors] == ["value_weight.10"]
    delta = abs(float(weight[place].double() - mapper.value_weight[place].double()))
    assert found.tensors[0].max_abs == delta > 0
    assert found.compatibility == found.config == found.metrics == ()
    assert "model.safetensors" in {change.path for change in found.files}
    assert found.bump == "minor"


def test_the_difference_is_the_same_size_in_both_directions(mapper, package, tmp_path):
    weight = mapper.key_weight.clone()
    weight[3] *= 5
    weight[4] = 0
    new = KVMapper(
        replace(mapper.config, ridge={**mapper.config.ridge, "lambda": 0.5, "new": [1, 2]}),
        {**mapper.tensors(), "key_weight": weight},
    )
    other = saved(new, tmp_path / "new", report=report(0.01).to_dict())
    there, back = compare_packages(package, other), compare_packages(other, package)
    assert there.tensors == back.tensors
    for part in ("files", "compatibility", "config", "metrics", "evaluation"):
        changes = {turned(change) for change in getattr(there, part)}
        assert changes == {key(change) for change in getattr(back, part)}
    assert [change.relative for change in there.tensors] == [pytest.approx(0.8), pytest.approx(1)]


def key(change):
    name = getattr(change, "path", None) or change.name
    return name, json.dumps(change.old, default=vars), json.dumps(change.new, default=vars)


def turned(change):
    name, old, new = key(change)
    return name, new, old


def test_layers_come_in_their_order(mapper, package, tmp_path):
    new = saved(random_mapper(SMALL, LARGE, seed=1), tmp_path / "new")
    names = [change.name for change in compare_packages(package, new).tensors]
    assert names[:12] == [f"key_bias.{layer}" for layer in range(12)]


def test_how_the_tensors_are_spread_over_files_makes_no_difference(mapper, package, tmp_path):
    sharded = saved(mapper, tmp_path / "new", report=report().to_dict(), max_shard_size="4KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    found = compare_packages(package, sharded)
    assert found.tensors == ()
    assert not found.identical
    changed = random_mapper(SMALL, LARGE, seed=1)
    whole = saved(changed, tmp_path / "whole", report=report().to_dict())
    parts = saved(changed, tmp_path / "parts", report=report().to_dict(), max_shard_size="4KB")
    for old in (package, sharded):
        assert compare_packages(old, whole).tensors == compare_packages(old, parts).tensors


def test_tensors_of_other_shapes_and_missing_layers_are_told(mapper, package, tmp_path):
    wider = saved(random_mapper(SMALL, LARGE, top_k=3), tmp_path / "wider")
    found = compare_packages(package, wider)
    weights = [change for change in found.tensors if "weight" in change.name]
    assert len(weights) == 24
    shapes = (
        tuple(tensor_shapes(config)["key_weight"][1:])
        for config in (mapper.config, config_for(SMALL, LARGE, top_k=3))
    )
    assert (weights[0].old_shape, weights[0].new_shape) == tuple(shapes)
    assert weights[0].max_abs is weights[0].relative is None
    assert "top_k" in {change.path for change in found.compatibility}
    shallow = random_mapper(
        SMALL, replace(LARGE, num_layers=11, layer_types=LARGE.layer_types[:11])
    )
    found = compare_packages(package, saved(shallow, tmp_path / "shallow"))
    gone = [change for change in found.tensors if change.new_shape is None]
    assert {change.name for change in gone} == {f"{stack}.11" for stack in mapper.tensors()}


def test_config_and_compatibility_are_told_apart_by_path(mapper, package, tmp_path):
    config = replace(
        mapper.config,
        target=replace(LARGE, revision="a" * 40),
        selection=((1, 2), *mapper.config.selection[1:]),
        calibration={"data": "text", "rows": [1, 2]},
    )
    new = saved(KVMapper(config, mapper.tensors()), tmp_path / "new", report=report().to_dict())
    found = compare_packages(package, new)
    assert [(c.path, c.old, c.new) for c in found.compatibility] == [
        ("target.revision", None, "a" * 40)
    ]
    assert {(c.path, str(c.old), str(c.new)) for c in found.config} == {
        ("selection.0", "[0, 1]", "[1, 2]"),
        ("calibration.data", "none", "text"),
        ("calibration.rows", "None", "[1, 2]"),
    }
    assert found.bump == "major"
    assert found.tensors == ()


def test_figures_come_with_their_intervals(mapper, package, tmp_path):
    new = saved(mapper, tmp_path / "new", report=report(0.01, scored_tokens=11).to_dict())
    found = compare_packages(package, new)
    changed = {change.name: change for change in found.metrics}
    assert {*changed} == {"key_r2"} | {
        f"{setting}.{name}"
        for setting in SETTINGS
        for name in ("nll", "perplexity", "accuracy", "kl", "agreement")
    }
    assert (changed["key_r2"].old, changed["key_r2"].new) == (0.8, 0.81)
    assert changed["mapped.kl"].old == estimate(0.1 * 3)
    assert changed["mapped.kl"].new == estimate(0.1 * 3 + 0.01)
    assert [(c.path, c.old, c.new) for c in found.evaluation] == [("scored_tokens", 10, 11)]
    assert found.bump == "patch"
    assert json.loads(json.dumps(found.to_dict()))["metrics"][0] == {
        "name": "key_r2",
        "old": 0.8,
        "new": 0.81,
    }


def test_a_package_without_a_report_has_no_figures(mapper, package, tmp_path):
    bare = saved(mapper, tmp_path / "bare")
    found = compare_packages(bare, package)
    assert {change.old for change in found.metrics} == {None}
    assert "retention" in {change.name for change in found.metrics}
    assert "floor_normalized_retention" not in {change.name for change in found.metrics}
    assert found.evaluation == ()
    back = compare_packages(package, bare)
    assert [change.name for change in back.metrics] == [change.name for change in found.metrics]


def test_a_changed_card_is_a_changed_file_and_no_more(package, tmp_path):
    shutil.copytree(package, tmp_path / "new")
    (tmp_path / "new" / "README.md").write_text("# My own words\n")
    Manifest.of(tmp_path / "new").write(tmp_path / "new")
    found = compare_packages(package, tmp_path / "new")
    assert [change.path for change in found.files] == ["README.md"]
    assert found.bump == "none"
    assert not found.identical


def test_one_tensor_of_each_package_is_in_memory_at_a_time(package, tmp_path, monkeypatch):
    read, most = [], []
    original = kvhub.difference._read_tensor

    def watched(path, name):
        tensor = original(path, name)
        read.append(weakref.ref(tensor))
        most.append(sum(seen() is not None for seen in read))
        return tensor

    new = saved(random_mapper(SMALL, LARGE, seed=1), tmp_path / "new")
    monkeypatch.setattr(kvhub.difference, "_read_tensor", watched)
    compare_packages(package, new)
    assert len(read) == 2 * 4 * LARGE.num_layers
    assert max(most) == 2


def test_equal_tensors_are_not_read_at_all(mapper, package, tmp_path, monkeypatch):
    config = replace(mapper.config, calibration={"data": "text"})
    new = saved(KVMapper(config, mapper.tensors()), tmp_path / "new")
    monkeypatch.delattr("kvhub.difference._read_tensor")
    assert compare_packages(package, new).tensors == ()


def test_what_cannot_be_compared_is_refused(mapper, package, tmp_path):
    with pytest.raises(NotFoundError, match="not a mapper package"):
        compare_packages(package, tmp_path / "none")
    new = saved(random_mapper(SMALL, LARGE, seed=1), tmp_path / "new")
    tensors = load_file(new / "model.safetensors")
    tensors["key_bias.2"][0] = float("nan")
    save_file(tensors, new / "model.safetensors")
    for pair in ((package, new), (new, package)):
        with pytest.raises(VerificationError, match="edited"):
            compare_packages(*pair)
    Manifest.of(new).write(new)
    with pytest.raises(VerificationError, match=r"key_bias\.2 of .* is not finite"):
        compare_packages(package, new)
    (new / "model.safetensors").write_bytes(b"\xff" * 100)
    Manifest.of(new).write(new)
    with pytest.raises(VerificationError, match="not a safetensors file"):
        compare_packages(package, new)


def test_the_module_is_light():
    code = "import kvhub.difference, sys; print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
