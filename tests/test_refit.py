"""A mapper fitted again: its equation, its ends, and that it is kept only where it is better."""

import json
import math
from dataclasses import replace

import pytest
import torch
from regression import random_rows, spec, statistics_of
from test_cli import assert_refused, fit_arguments, kvhub, pair  # noqa: F401  (fixtures)

from kvhub import KVMapper, Selection, fit, refit
from kvhub.data import TokenBatch, describe, evaluation_stream
from kvhub.errors import IncompatiblePairError, UsageError
from kvhub.mapper_config import Repair
from kvhub.moments import KINDS, group_features
from kvhub.package import Manifest, read_config
from kvhub.prior import merge_blocks
from kvhub.refitting import HELD_OUT_EVERY, held_out_part
from kvhub.ridge import regress
from kvhub.store import mapper_names, mapper_path

SOURCE, TARGET = spec(3, 2, 4), spec(2, 2, 6)
SELECTION = Selection([[2, 0], [1, 2]], [[0.0] * 3] * 2, "probe", "held_out")


def statistics(tokens, seed, heads="all", shift=0.0):
    """Of text that differs from others by its seed and by where its features lie."""
    rows, held_out = (
        random_rows(SOURCE, TARGET, n, s) for n, s in ((tokens, seed), (40, seed + 1))
    )
    for data in (rows, held_out):
        for kind in KINDS:
            data[kind] = (data[kind][0] + shift, data[kind][1] * (1 + shift))
    found = statistics_of(rows, SOURCE, TARGET, heads, held_out)
    found.provenance = {"data": f"text {seed}", "sequences": tokens, "length": 1}
    return found


def first_mapper(heads="all", dtype=torch.float64):
    found = statistics(300, 0)
    return fit(found, SELECTION, heads=heads, ridge_lambda=0.02, dtype=dtype), found


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_without_a_prior_it_is_the_plain_ridge_and_with_nothing_else_the_mapper(heads):
    mapper, _ = first_mapper(heads, torch.float32)
    own = statistics(100, 5, shift=0.5)
    plain = fit(own, SELECTION, heads=heads, ridge_lambda=0.02)
    alone = refit(mapper, own, strength=0)
    kept = refit(mapper, own, strength=math.inf)
    for name, tensor in mapper.tensors().items():
        assert torch.equal(alone.tensors()[name], plain.tensors()[name])
        assert torch.equal(kept.tensors()[name], tensor)
        assert not torch.equal(tensor, plain.tensors()[name])


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_a_refit_is_least_squares_on_the_text_and_on_what_the_prior_stands_for(heads):
    """The tokens of the prior as rows: m +- sqrt(features) s along each axis, mapped by it."""
    mapper, _ = first_mapper(heads)
    rows = random_rows(SOURCE, TARGET, 60, 7)
    strength = 35.0
    found = refit(mapper, statistics_of(rows, SOURCE, TARGET, "all", rows), strength=strength)
    for layer, chosen in enumerate(SELECTION.layers):
        for kind, name in (("keys", "key"), ("values", "value")):
            x_all = group_features(rows[kind][0][chosen], heads)
            y_all = group_features(rows[kind][1][[layer]], heads)
            weight0, bias0 = (
                getattr(mapper, f"{name}_{part}")[layer] for part in ("weight", "bias")
            )
            for group in range(x_all.shape[1]):
                x, y = x_all[:, group], y_all[:, group]
                mean, features = x.mean(0), x.shape[1]
                variance = ((x - mean) ** 2).sum(0).mean() / len(x)
                axes = (features * variance) ** 0.5 * torch.eye(features, dtype=x.dtype)
                prior_x = mean + torch.cat([axes, -axes])
                prior_y = prior_x @ weight0[group] + bias0[group]
                root = (strength / (2 * features)) ** 0.5
                ridge = (0.02 * len(x) * variance) ** 0.5 * torch.eye(features, dtype=x.dtype)

                def ones(value, count):
                    return torch.full((count, 1), value, dtype=torch.float64)

                design = torch.cat(
                    [
                        torch.cat([x, ones(1.0, len(x))], 1),
                        root * torch.cat([prior_x, ones(1.0, len(prior_x))], 1),
                        torch.cat([ridge, ones(0.0, features)], 1),
                    ]
                )
                outcome = torch.cat([y, root * prior_y, torch.zeros(features, y.shape[1]).to(y)])
                expected = torch.linalg.lstsq(design, outcome, driver="gelsd").solution
                weight, bias = (
                    getattr(found, f"{name}_{part}")[layer] for part in ("weight", "bias")
                )
                torch.testing.assert_close(weight[group], expected[:-1], rtol=1e-8, atol=1e-9)
                torch.testing.assert_close(bias[group], expected[-1], rtol=1e-8, atol=1e-9)


def test_more_strength_leaves_less_of_a_change():
    mapper, _ = first_mapper()
    own = statistics(100, 5, shift=0.5)

    def change(strength):
        tensors = refit(mapper, own, strength=strength).tensors()
        return sum(float((tensors[name] - own_).norm()) for name, own_ in mapper.tensors().items())

    changes = [change(strength) for strength in (1, 30, 1000, 1e9)]
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] < 1e-5 * changes[0]


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_to_count_a_text_twice_is_to_add_it_twice(heads):
    first, own = statistics(120, 0, heads), statistics(50, 5, heads, shift=0.5)
    for factor, sums in ((1.0, first + own), (2.0, first + first + own)):
        for kind in KINDS:
            parts = [each.block("fitted", kind, [2, 0], 1) for each in (first, own, sums)]
            merged = merge_blocks(parts[0], parts[1], factor)
            for name, expected in vars(parts[2]).items():
                torch.testing.assert_close(getattr(merged, name), expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(
                regress(merged, 0.02, "relative"), regress(parts[2], 0.02, "relative")
            )


def test_with_statistics_the_strength_is_how_many_tokens_they_count_as():
    mapper, original = first_mapper()
    own = statistics(100, 5, shift=0.5)
    for strength, sums in ((300, original + own), (600, original + original + own)):
        expected = fit(sums, SELECTION, ridge_lambda=0.02, dtype=torch.float64)
        found = refit(mapper, own, strength=strength, original=original)
        for name, tensor in expected.tensors().items():
            torch.testing.assert_close(found.tensors()[name], tensor, rtol=1e-9, atol=1e-11)


def test_a_refit_on_its_own_statistics_changes_nothing():
    mapper, original = first_mapper()
    for prior in (original, None):
        # The ridge of the sum is that of the part; with weights as the prior only without penalty.
        start = mapper if prior else fit(original, SELECTION, ridge_lambda=0, dtype=torch.float64)
        found = refit(start, original, strength=77.0, original=prior)
        for name, tensor in start.tensors().items():
            torch.testing.assert_close(found.tensors()[name], tensor, rtol=1e-8, atol=1e-9)


def test_where_a_refit_came_from_is_kept_through_a_second_one():
    mapper, original = first_mapper()
    own = statistics(100, 5, shift=0.5)
    once = refit(mapper, own, strength=50)
    calibration = once.config.calibration
    assert {key: calibration[key] for key in original.provenance} == original.provenance
    record = calibration["refit"]
    assert (record["method"], record["strength"], record["tokens"]) == ("weights", 50, 100)
    assert {key: record[key] for key in own.provenance} == own.provenance
    for kind in KINDS:
        assert record["held_out_r2"]["before"][kind] < record["held_out_r2"]["after"][kind]
        assert once.config.quality["held_out_r2"][kind] == record["held_out_r2"]["after"][kind]
    twice = refit(once, statistics(100, 9), strength=50).config.calibration
    assert twice["refit"]["data"] == "text 9"
    assert twice["refit"]["refit"] == record
    assert json.loads(json.dumps(twice, allow_nan=False)) == twice


def test_what_cannot_be_refitted_is_refused():
    mapper, original = first_mapper()
    own = statistics(100, 5)
    with pytest.raises(UsageError, match="must not be negative; found nan"):
        refit(mapper, own, strength=math.nan)
    with pytest.raises(UsageError, match="Too few calibration tokens: 10 for 16 features"):
        refit(mapper, statistics(10, 5), strength=0)
    with pytest.raises(UsageError, match="matched heads only"):
        refit(mapper, statistics(100, 5, "matched"), strength=1)
    with pytest.raises(UsageError, match=r"expected those of .*text 0.*found .*text 5"):
        refit(mapper, own, strength=1, original=own)
    with pytest.raises(UsageError, match="weighting uniform and attention"):
        refit(mapper, replace(own, weighting="attention"), strength=1, original=original)
    with pytest.raises(IncompatiblePairError, match="num_layers"):
        refit(mapper, replace(own, source=spec(4, 2, 4)), strength=1)
    mapper.config = replace(mapper.config, ridge={**mapper.config.ridge, "alignment": {}})
    with pytest.raises(UsageError, match="aligned"):
        refit(mapper, own, strength=1, original=original)
    refit(mapper, own, strength=1)
    mapper.config = replace(mapper.config, repair=Repair(4, (0,), ()))
    with pytest.raises(UsageError, match="networks beside its linear map"):
        refit(mapper, own, strength=1)


def test_evaluation_passes_over_what_a_refit_saw():
    first = {**describe("stdlib"), "sequences": 9, "length": 32}
    record = {**describe("english"), "sequences": 12, "length": 24}
    calibration = {**first, "refit": record}
    assert evaluation_stream(calibration, "english", 24) == ("english", 12, 24)
    assert evaluation_stream(calibration) == ("stdlib-held-out", 0, 32)
    assert evaluation_stream(first, "english", 24) == ("english", 0, 24)
    with pytest.raises(UsageError, match="sequences of 24 tokens; which of those of 32"):
        evaluation_stream(calibration, "english")


def test_the_held_out_sequences_are_those_that_calibration_keeps_apart():
    ids = torch.arange(6 * 5).view(6, 5)
    parts = [TokenBatch(ids[:4], torch.ones_like(ids[:4]), (0, 1, 2, 3))]
    parts.append(TokenBatch(ids[4:], torch.ones_like(ids[4:]), (6, 7)))
    found = list(held_out_part(parts, HELD_OUT_EVERY))
    assert [batch.sequence_ids for batch in found] == [(3,), (7,)]
    assert [batch.input_ids.tolist() for batch in found] == [ids[3:4].tolist(), ids[5:].tolist()]


@pytest.fixture
def text(tmp_path):
    """Text of another kind than the standard library's sources."""
    path = tmp_path / "own.txt"
    words = [f"{a}{b}" for a in ("ab", "ra", "ka", "da") for b in ("bra", "lo", "mi", "nu")]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(words), (1500,), generator=generator).tolist()
    path.write_text(" ".join(words[index] for index in drawn), encoding="utf-8")
    return path


def test_the_command_keeps_a_refit_only_where_it_is_better(kvhub, pair, text, tmp_path):  # noqa: F811
    statistics_file = tmp_path / "statistics"
    fitted = kvhub(*fit_arguments(pair, "mine", "--no-align", "--statistics", statistics_file))
    assert fitted.code == 0, fitted.err
    before = Manifest.of(mapper_path("mine"))
    arguments = ("refit", "mine", "--data", text, "--sequences", "16")

    for more, name, method in (
        ((), "mine-refit", "weights"),
        (("--statistics", statistics_file, "--name", "added"), "added", "statistics"),
    ):
        done = kvhub(*arguments, *more, "--json")
        assert done.code == 0, done.err
        as_it_is, *tried = done.json["candidates"]
        assert as_it_is["strength"] is None
        best = min((as_it_is, *tried), key=lambda one: one["kl"])
        assert done.json["best"] == best
        assert done.json["gained"] is (best["kl"] < as_it_is["kl"])
        assert done.json["gained"], "the text is so unlike the other that the best strength gains"
        assert (done.json["name"], done.json["method"]) == (name, method)
        config = read_config(mapper_path(name))[0]
        record = config.calibration["refit"]
        assert record["mapper"] == "mine"
        assert record["mapper_digest"] == before.digest
        assert record["held_out"] == {"before": as_it_is, "after": best}
        assert record["data"] == "own.txt"
        assert (record["sequences"], record["held_out_sequences"]) == (16, 4)
        assert record["strength"] == best["strength"]
        assert config.selection == read_config(mapper_path("mine"))[0].selection
        KVMapper.from_pretrained(name)
    assert Manifest.of(mapper_path("mine")) == before
    card = (mapper_path("mine-refit") / "README.md").read_text(encoding="utf-8")
    assert "kvhub refit mine" in card

    assert_refused(kvhub(*arguments), 8, "mine-refit.* already")
    assert_refused(kvhub(*arguments, "--name", "mine", "--overwrite"), 2, "would replace")
    again = ("refit", "mine-refit", "--data", text)
    assert_refused(kvhub(*again), 2, "was fitted on .*own.txt already")
    assert_refused(kvhub(*again[:3], "stdlib"), 2, "was fitted on stdlib already")
    assert_refused(kvhub(*arguments, "--name", "x", "--strength", "inf"), 2, "found inf")
    assert_refused(kvhub("refit", "nobody", "--data", text), 3, "No mapper")
    assert mapper_names() == ["added", "mine", "mine-refit"]


def test_the_command_writes_nothing_where_nothing_is_gained(kvhub, pair, text, monkeypatch):  # noqa: F811
    assert kvhub(*fit_arguments(pair)).code == 0
    # A prior of so many tokens moves the weights by less than their dtype can hold.
    arguments = ("refit", "mine", "--data", text, "--sequences", "8", "--strength", "1e30")
    done = kvhub(*arguments, "--json")
    assert done.code == 0, done.err
    assert done.json["gained"] is False
    assert done.json["name"] is None
    assert done.json["candidates"][0]["kl"] == done.json["candidates"][1]["kl"]
    assert "Nothing gained" in done.err
    assert mapper_names() == ["mine"]
    assert "as it is" in kvhub(*arguments).out
