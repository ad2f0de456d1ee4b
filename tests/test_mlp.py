"""Networks beside a linear map: the equation, a package's round trip, and training that pays."""

import json
from dataclasses import replace

import pytest
import torch
from kvhub.cards import render_card
from mapping import identity_mapper, random_mapper
from networks import network_outputs, repaired_mapper, with_networks
from tiny import tiny_config, tiny_model
from typer.testing import CliRunner

import kvhub.mapper
from kvhub import KVMapper, MapperConfig, ModelSpec, calibrate, fit, select_layers
from kvhub.cache import cache_of, prefill
from kvhub.cli import app
from kvhub.errors import ConflictError, UsageError, VerificationError
from kvhub.mapper_config import Repair
from kvhub.mlp import LayerGain, choose, repair
from kvhub.mlp_training import Task, batches_of, train
from kvhub.package import read_config
from kvhub.repairing import RepairPlan, repair_mapper
from kvhub.rope import apply_rope, strip_rope
from kvhub.store import mapper_path


def prompt(batch=2, tokens=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (batch, tokens), generator=generator)


@pytest.fixture(scope="module")
def source():
    return tiny_model("qwen3", 3, seed=1)


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama", 4, seed=2, head_dim=8)


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_mapping_is_the_equation_per_head(source, target, heads):
    """apply_rope(X W + b + relu(relu(X W1 + b1) W2 + b2) W3 + b3), in float64, head by head."""
    mapper = repaired_mapper(source, target, heads)
    cache = cache_of(prefill(source, prompt()))
    found, config, positions = mapper(cache), mapper.config, torch.arange(9)
    for layer, chosen in enumerate(config.selection):
        for kind in ("key", "value"):
            read = [getattr(cache.layers[index], f"{kind}s").double() for index in chosen]
            if kind == "key":
                read = [strip_rope(keys, positions, config.source.rope) for keys in read]
            heads_of = [[0, 1]] if heads == "all" else [[0], [1]]
            features = [
                torch.cat([states[:, head] for states in read for head in group], -1)
                for group in heads_of
            ]
            weight, bias = (
                getattr(mapper, f"{kind}_{part}")[layer].double() for part in ("weight", "bias")
            )
            added = network_outputs(mapper, kind, layer, features)
            outputs = [
                x @ weight[group] + bias[group] + added[group] for group, x in enumerate(features)
            ]
            expected = torch.cat(outputs, -1).unflatten(-1, (2, 8)).transpose(1, 2)
            if kind == "key":
                expected = apply_rope(expected, positions, config.target.rope)
            states = getattr(found.layers[layer], f"{kind}s").double()
            torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_networks_change_their_layers_and_no_others(source, target, heads):
    linear = random_mapper(source, target, heads)
    mapper = with_networks(linear)
    cache = cache_of(prefill(source, prompt()))
    found, plain = mapper(cache), linear(cache)
    for kind, layers in (("keys", (1, 2)), ("values", (2,))):
        changed = [
            layer
            for layer in range(4)
            if not torch.equal(*(getattr(c.layers[layer], kind) for c in (found, plain)))
        ]
        assert changed == list(layers)
    zero = with_networks(linear, scale=0.0)(cache)
    for a, b in zip(zero.layers, plain.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


def test_chunks_do_not_show_and_size_counts_the_networks(source, target, monkeypatch):
    linear = random_mapper(source, target)
    mapper = with_networks(linear, hidden=200, scale=0.05)
    one = 64 * 200 + 200 + 200 * 200 + 200 + 200 * 16 + 16
    assert mapper.num_parameters == linear.num_parameters + 3 * one
    assert mapper.size_bytes == 4 * mapper.num_parameters
    # A workspace counts the hidden layers.
    monkeypatch.setattr(kvhub.mapper, "WORKSPACE_BYTES", 100_000)
    assert mapper._tokens_at_once(1) < linear._tokens_at_once(1)
    cache = cache_of(prefill(source, prompt(3, 17)))
    whole = mapper(cache)
    monkeypatch.setattr(kvhub.mapper, "WORKSPACE_BYTES", 1)
    for a, b in zip(mapper(cache).layers, whole.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.values, b.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("keys", "values"), [((0, 3), (1,)), ((), (2,))])
def test_a_package_comes_back_bit_by_bit(source, target, tmp_path, keys, values, dtype):
    mapper = repaired_mapper(source, target, "matched", dtype, keys=keys, values=values)
    path = tmp_path / "mapper"
    mapper.save_pretrained(path)
    found = KVMapper.from_pretrained(path)
    assert found.config == mapper.config
    assert found.tensors().keys() == mapper.tensors().keys()
    for name, tensor in mapper.tensors().items():
        assert torch.equal(getattr(found, name), tensor)
    assert "Networks of width 12" in (path / "README.md").read_text()


def test_configs_without_networks_do_not_speak_of_them(source, target):
    config = random_mapper(source, target).config
    assert "repair" not in config.to_dict()
    repaired = repaired_mapper(source, target).config
    data = json.loads(json.dumps(repaired.to_dict()))
    assert data["repair"] == {"hidden": 12, "keys": [1, 2], "values": [2]}
    assert MapperConfig.from_dict(data) == repaired
    assert data.keys() - config.to_dict().keys() == {"repair"}  # unknown to an older kvhub
    for bad in ({}, {"hidden": 4, "keys": 1, "values": []}, {**data["repair"], "depth": 3}, []):
        with pytest.raises(VerificationError, match="expected repair to hold"):
            MapperConfig.from_dict({**data, "repair": bad})
    for bad in (
        Repair(0, (1,), ()),
        Repair(4, (), ()),
        Repair(4, (2, 1), ()),
        Repair(4, (1,), (4,)),
        Repair(4, (1, 1), ()),
    ):
        with pytest.raises(VerificationError, match="contradicts itself"):
            replace(config, repair=bad).validate()


def test_a_card_tells_how_to_make_the_networks_again(source, target):
    mapper = repaired_mapper(source, target)
    made = {"data": "english", "sequences": 7, "size_budget": 0.25, "hidden": 12}
    config = replace(
        mapper.config,
        calibration={
            **{"data": "english", "sequences": 9, "length": 32, "stride": 1, "held_out_every": 10}
        },
        quality={**mapper.config.quality, "repair": made},
    )
    data = {**config.to_dict(), "kvhub_version": "1", "dtype": "float32"}
    card = render_card("mine", data, None, [])
    commands = card.replace(" \\\n ", "")
    assert "--name mine-linear" in commands
    assert (
        "kvhub repair mine-linear --name mine --dtype float32 --sequences 7 --size-budget 0.25 "
        "--hidden 12 --data english" in commands
    )


# Training.


def sequences(count=40, length=48, seed=3):
    return prompt(count, length, seed)


@pytest.fixture(scope="module")
def linear_pair():
    """A model and itself."""
    model = tiny_model("qwen3", 2, seed=1)
    return model, model


@pytest.fixture(scope="module")
def nonlinear_pair():
    """Two models of one vocabulary with other weights: keys of one are no linear map of another's.

    With one layer, keys and values are functions of the token alone, of which there are few: far
    from linear ones of the source's narrow states, and easy to learn.
    """
    narrow = {"num_key_value_heads": 1, "num_attention_heads": 2}
    return tiny_model("qwen3", 1, seed=1, **narrow), tiny_model("qwen3", 1, seed=2)


def fitted(models, ids):
    statistics = calibrate(*models, ids.split(8))
    return fit(statistics, select_layers(statistics, top_k=1))


def residual_square(mapper, models, ids, kind, layer):
    """Sum of squared errors of a layer's content keys or values, by the models' own caches."""
    caches = [cache_of(prefill(model, ids)).layers for model in models]
    spec, positions = mapper.config, torch.arange(ids.shape[1])
    source, target = (
        torch.stack([getattr(states, f"{kind}s") for states in layers]) for layers in caches
    )
    if kind == "key":
        source = strip_rope(source, positions, spec.source.rope)
        target = strip_rope(target, positions, spec.target.rope)
    mapped = (mapper.map_keys if kind == "key" else mapper.map_values)(source)
    return float((mapped - target)[layer].double().square().sum())


def test_training_reduces_the_held_out_residual(nonlinear_pair):
    ids = sequences()
    mapper = fitted(nonlinear_pair, ids)
    found = repair(
        mapper, *nonlinear_pair, ids.split(8), size_budget=1e3, hidden=64, held_out_every=4
    )
    assert found.config.repair == Repair(64, (0,), (0,))
    fresh = sequences(8, seed=9)  # that neither has seen
    for kind in ("key", "value"):
        before = residual_square(mapper, nonlinear_pair, fresh, kind, 0)
        assert residual_square(found, nonlinear_pair, fresh, kind, 0) < 0.7 * before
    (gain,) = found.config.quality["repair"]["layers"]
    assert gain["kept"] == ["keys", "values"]
    assert gain["both"] > gain["linear"] + 0.01
    for name, tensor in mapper.tensors().items():
        assert torch.equal(getattr(found, name), tensor)  # the linear map stays
    with pytest.raises(UsageError, match="has networks already"):
        repair(found, *nonlinear_pair, ids.split(8))


def test_a_useless_network_is_not_kept(linear_pair):
    """The identity is exact: nothing is left over but rounding."""
    mapper = identity_mapper(linear_pair[0])
    found = repair(mapper, *linear_pair, sequences(20).split(8), size_budget=100.0, hidden=16)
    assert found.config.repair is None
    assert found.tensors().keys() == mapper.tensors().keys()
    assert all(not layer["kept"] for layer in found.config.quality["repair"]["layers"])


def test_a_small_buffer_streams_the_models_again_and_learns_as_well(nonlinear_pair):
    ids = sequences(24)
    mapper = fitted(nonlinear_pair, ids)
    tasks = [Task("key", 0), Task("value", 0)]
    calls = []
    hook = nonlinear_pair[0].register_forward_pre_hook(lambda *_: calls.append(1))
    options = {"hidden": 32, "epochs": 4, "progress": None}
    rows = [list(ids[:16]), list(ids[16:])]
    kept, counts = [], []
    for buffer_bytes in (2**30, 300 * 8 * 48):
        calls.clear()
        kept.append(
            train(mapper, nonlinear_pair, *rows, tasks, buffer_bytes=buffer_bytes, **options)
        )
        counts.append(len(calls))
    hook.remove()
    assert kept[0].keys() == kept[1].keys() == set(tasks)
    assert counts[0] == 2 < counts[1]


def test_equal_seeds_give_equal_networks(nonlinear_pair):
    ids = sequences(24)
    mapper = fitted(nonlinear_pair, ids)
    first, second = (
        repair(mapper, *nonlinear_pair, ids.split(8), size_budget=1e3, hidden=16, epochs=2)
        for _ in range(2)
    )
    assert first.config == second.config
    for name, tensor in first.tensors().items():
        assert torch.equal(getattr(second, name), tensor)


def test_batches_keep_order_and_length():
    ids = [torch.full((length,), number) for number, length in enumerate([400, 400, 400, 7, 7])]
    found = list(batches_of(ids))
    assert [tuple(batch.shape) for batch in found] == [(2, 400), (1, 400), (2, 7)]
    assert [row[0] for batch in found for row in batch.tolist()] == [0, 1, 2, 3, 4]


def test_what_gains_most_is_kept_within_the_budget():
    gains = [
        LayerGain(0, 0.50, keys=0.60, values=0.51, both=0.62),
        LayerGain(1, 0.50, keys=0.51, values=0.50, both=0.70),  # only together
        LayerGain(2, 0.90, keys=0.901, values=0.89, both=0.901),  # within the margin
        LayerGain(3, 0.50, keys=0.49, values=0.55, both=0.56),
    ]

    def kept(affordable):
        return [gain.kept for gain in choose(gains, affordable)]

    both = ("keys", "values")
    assert kept(9) == [both, both, (), both]
    assert kept(4) == [("keys",), both, (), ("values",)]
    assert kept(2) == [("keys",), (), (), ("values",)]
    assert kept(0) == [(), (), (), ()]


def test_wrong_arguments_are_refused(source, target):
    mapper, ids = random_mapper(source, target), sequences(20)
    for options, message in (
        ({"size_budget": 1e-6}, "expected at least"),
        ({"hidden": 0}, "hidden"),
        ({"epochs": 0}, "epochs"),
        ({"held_out_every": 1}, "held_out_every"),
    ):
        with pytest.raises(UsageError, match=message):
            repair(mapper, source, target, [ids], **{"size_budget": 50.0, "hidden": 8, **options})
    with pytest.raises(UsageError, match="0 held out"):
        repair(mapper, source, target, [ids[:5]], size_budget=50.0, hidden=8)
    with pytest.raises(UsageError, match="smaller vocabulary, 64"):
        repair(mapper, source, target, [ids + 60], size_budget=50.0, hidden=8)


# The command.


def test_the_command_writes_a_new_mapper_or_nothing(kvhub_home):
    from kvhub.fitting import FitPlan, fit_mapper
    from kvhub.recipe import load_recipe

    recipe = load_recipe("tiny-middle-to-large")
    plan = FitPlan(
        *("mine", recipe.source, recipe.target), top_k=1, data="stdlib", sequences=20, length=48
    )

    def track(_):
        from contextlib import nullcontext

        return nullcontext(lambda *_: None)

    fit_mapper(plan, track, print)
    before = {file: file.read_bytes() for file in mapper_path("mine").rglob("*") if file.is_file()}
    options = ["--size-budget", "1", "--hidden", "32", "--json"]
    result = CliRunner().invoke(app, ["repair", "mine", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {file: file.read_bytes() for file in before} == before
    kept = [kind for layer in found["layers"] for kind in layer["kept"]]
    assert bool(kept) == (found["name"] == "mine-repaired")
    assert found["repaired_size_bytes"] - found["size_bytes"] <= found["size_bytes"]
    mapper_path("mine-repaired").mkdir(exist_ok=True)
    for change, error, message in (
        ({}, ConflictError, "There is a mapper 'mine-repaired' already"),
        ({"name": "mine"}, UsageError, "that it starts from"),
        ({"name": "other", "sequences": 21}, UsageError, "Calibration saw 20 sequences"),
    ):
        with pytest.raises(error, match=message):
            repair_mapper(replace(RepairPlan("mine"), **change), track, print)
    if kept:
        record = read_config(mapper_path("mine-repaired"))[0].quality["repair"]
        assert (record["data"], record["sequences"]) == ("stdlib", 20)


def test_no_gpu_is_predicted_for_networks_that_the_kernels_refuse(kvhub_home):
    from kvhub.pairs import read_spec
    from kvhub.recipe import load_recipe

    recipe = load_recipe("tiny-middle-to-large")
    specs = (read_spec(recipe.source), read_spec(recipe.target))
    repaired_mapper(*specs, keys=(0,), values=()).save_pretrained(mapper_path("repaired"))
    command = ["bench", "repaired", "--lengths", "16", "--repeats", "1"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [timing["tokens"] for timing in found["timings"]] == [16]
    assert found["predictions"] == []
    assert "not predicted" in CliRunner().invoke(app, command).output


def test_other_text_is_on_record_for_evaluations():
    from kvhub.repairing import _recorded

    calibration = {"data": "stdlib", "refit": {"data": "a"}}
    assert _recorded(calibration, {"data": "b"}) == {
        "data": "stdlib",
        "refit": {"data": "a", "repair": {"data": "b"}},
    }


def test_the_spec_of_a_tiny_pair_is_enough_for_a_config():
    spec = ModelSpec.from_config(tiny_config("qwen3", 3))
    mapper = repaired_mapper(spec, spec, keys=(0,), values=())
    assert {name for name in mapper.tensors() if "repair" in name} == {
        f"key_repair_{part}" for part in ("in", "in_bias", "mid", "mid_bias", "out", "out_bias")
    }
