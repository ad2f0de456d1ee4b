"""Moments and Statistics: equal to sums over all rows, however the rows arrive."""

import json

import numpy as np
import pytest
import torch
from regression import random_rows, spec, statistics_of
from safetensors.torch import load_file, save_file

from kvhub import Statistics
from kvhub.errors import IncompatiblePairError, NotFoundError, UsageError, VerificationError
from kvhub.moments import TENSORS, Moments, group_features

GROUPS, FEATURES, OUTPUTS = 2, 5, 3


def rows(tokens, seed=0, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, GROUPS, FEATURES, dtype=torch.float64, generator=generator)
    y = torch.randn(tokens, GROUPS, OUTPUTS, dtype=torch.float64, generator=generator)
    w = torch.rand(tokens, GROUPS, dtype=torch.float64, generator=generator) + 0.1
    return x + offset, y + offset, w


def moments_of(*parts):
    moments = Moments.zeros(GROUPS, FEATURES, OUTPUTS)
    for part in parts:
        moments.update(*part)
    return moments


def assert_equal(found, expected, tolerance=1e-11):
    assert found.tokens == expected.tokens
    for name in TENSORS:
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=tolerance, atol=tolerance
        )


def direct(x, y, w):
    """The definition, in numpy's extended precision."""
    x, y, w = (tensor.numpy().astype(np.longdouble) for tensor in (x, y, w))
    weight = w.sum(0)
    x_mean = np.einsum("tg,tgf->gf", w, x) / weight[:, None]
    y_mean = np.einsum("tg,tgo->go", w, y) / weight[:, None]
    dx, dy = x - x_mean, y - y_mean
    found = (
        weight,
        (w**2).sum(0),
        x_mean,
        y_mean,
        np.einsum("tg,tgf,tge->gfe", w, dx, dx),
        np.einsum("tg,tgf,tgo->gfo", w, dx, dy),
        np.einsum("tg,tgo->go", w, dy**2),
    )
    return Moments(len(x), *(torch.from_numpy(array.astype(np.float64)) for array in found))


def test_update_equals_the_definition_in_higher_precision():
    data = rows(40)
    assert_equal(moments_of(data), direct(*data))


@pytest.mark.parametrize("sizes", [(40,), (1, 39), (7, 1, 20, 12)])
def test_rows_may_arrive_in_any_portions(sizes):
    data = rows(40)
    parts = [tuple(part) for part in zip(*(tensor.split(sizes) for tensor in data), strict=True)]
    assert_equal(moments_of(*parts), direct(*data))


def test_merge_equals_one_run_and_is_commutative():
    data = rows(40)
    first, second = ([t[:13] for t in data], [t[13:] for t in data])
    for one, other in ((first, second), (second, first)):
        merged = moments_of(one)
        merged.merge(moments_of(other))
        assert_equal(merged, direct(*data))


def test_merging_nothing_changes_nothing():
    data = rows(9)
    merged = moments_of(data)
    merged.merge(Moments.zeros(GROUPS, FEATURES, OUTPUTS))
    merged.update(*(tensor[:0] for tensor in data))
    assert_equal(merged, direct(*data))


def test_a_large_constant_offset_does_no_harm():
    """With raw sums of squares the offset 1e6 would leave no correct digit of the Gram."""
    near, far = rows(400), rows(400, offset=1e6)
    found = moments_of(*zip(*(tensor.split(50) for tensor in far), strict=True))
    expected = direct(*near)
    torch.testing.assert_close(found.gram, expected.gram, rtol=1e-7, atol=1e-5)
    torch.testing.assert_close(found.cross, expected.cross, rtol=1e-7, atol=1e-5)
    assert float(torch.linalg.eigvalsh(found.gram).min()) > 0


def test_a_weight_of_two_is_the_row_twice():
    x, y, _ = rows(6)
    twice = moments_of((torch.cat([x, x[:2]]), torch.cat([y, y[:2]]), None))
    weights = torch.ones(6, GROUPS, dtype=torch.float64)
    weights[:2] = 2
    weighted = moments_of((x, y, weights))
    for name in ("gram", "cross", "target_square", "source_mean", "target_mean", "weight"):
        torch.testing.assert_close(getattr(weighted, name), getattr(twice, name))
    assert weighted.effective_tokens == pytest.approx(64 / 12)


def test_no_weight_at_all_is_refused():
    x, y, w = rows(3)
    with pytest.raises(UsageError, match="not all zero"):
        moments_of((x, y, 0 * w))


def test_features_are_grouped_layer_by_layer():
    states = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).double()  # layers, heads, tokens, dim
    together = group_features(states, "all")
    assert together.shape == (4, 1, 30)
    torch.testing.assert_close(together[1, 0, :5], states[0, 0, 1])
    torch.testing.assert_close(together[1, 0, 5:10], states[0, 1, 1])
    torch.testing.assert_close(together[1, 0, 15:20], states[1, 0, 1])
    apart = group_features(states, "matched")
    assert apart.shape == (4, 3, 10)
    torch.testing.assert_close(apart[1, 2, 5:], states[1, 2, 1])


def test_matched_moments_come_out_of_all_heads():
    source, target = spec(3, 2, 4), spec(2, 2, 6)
    data = random_rows(source, target, 50)
    derived = statistics_of(data, source, target, "all").matched()
    direct_ones = statistics_of(data, source, target, "matched")
    for kind in ("keys", "values"):
        assert_equal(derived.fitted[kind], direct_ones.fitted[kind])


def test_a_block_is_the_regression_of_its_layers():
    source, target = spec(4, 2, 4), spec(2, 2, 6)
    data = random_rows(source, target, 60)
    for heads in ("all", "matched"):
        block = statistics_of(data, source, target, heads).block("fitted", "values", [2, 0], 1)
        x, y = data["values"]
        x = group_features(x[[2, 0]], heads)
        y = group_features(y[[1]], heads)
        dx, dy = x - x.mean(0), y - y.mean(0)
        torch.testing.assert_close(block.gram, torch.einsum("tgf,tge->gfe", dx, dx))
        torch.testing.assert_close(block.cross, torch.einsum("tgf,tgo->gfo", dx, dy))
        torch.testing.assert_close(block.source_mean, x.mean(0))
        weights = torch.randn(block.cross.shape, dtype=torch.float64)
        bias = torch.randn(block.target_mean.shape, dtype=torch.float64)
        residual = y - torch.einsum("tgf,gfo->tgo", x, weights) - bias
        torch.testing.assert_close(block.residual_square(weights, bias), (residual**2).sum(0))


def test_statistics_survive_a_file(tmp_path):
    source, target = spec(2), spec(3)
    statistics = statistics_of(random_rows(source, target, 30), source, target)
    statistics.provenance["data"] = "somewhere"
    statistics.save(tmp_path / "s.safetensors")
    loaded = Statistics.load(tmp_path / "s.safetensors")
    assert (loaded.source, loaded.target, loaded.heads) == (source, target, "all")
    assert loaded.provenance == statistics.provenance
    for kind in ("keys", "values"):
        assert_equal(loaded.fitted[kind], statistics.fitted[kind], 0)
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]


def test_damaged_statistics_are_refused(tmp_path):
    source, target = spec(2), spec(3)
    path = tmp_path / "s.safetensors"
    statistics_of(random_rows(source, target, 30), source, target).save(path)
    whole = path.read_bytes()
    with pytest.raises(NotFoundError):
        Statistics.load(tmp_path / "other")
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(VerificationError, match="whole safetensors"):
        Statistics.load(path)
    path.write_bytes(whole)
    tensors = load_file(path)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(VerificationError, match="not a statistics file"):
        Statistics.load(path)
    path.write_bytes(whole)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors["fitted.keys.gram"] = tensors["fitted.keys.gram"][:, :-1].contiguous()
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(VerificationError, match=r"fitted\.keys\.gram should have shape"):
        Statistics.load(path)
    header = json.loads(metadata["kvhub"])
    assert header["heads"] == "all"


def test_statistics_of_other_pairs_do_not_add():
    source, target, other = spec(2), spec(3), spec(4)
    one = statistics_of(random_rows(source, target, 30), source, target)
    two = statistics_of(random_rows(source, other, 30), source, other)
    with pytest.raises(IncompatiblePairError, match="target"):
        one + two


def test_statistics_add_like_their_rows():
    source, target = spec(2), spec(3)
    parts = [random_rows(source, target, 30, seed) for seed in (1, 2)]
    both = {
        kind: tuple(torch.cat([parts[0][kind][i], parts[1][kind][i]], dim=2) for i in (0, 1))
        for kind in ("keys", "values")
    }
    total = statistics_of(parts[0], source, target) + statistics_of(parts[1], source, target)
    expected = statistics_of(both, source, target)
    for kind in ("keys", "values"):
        assert_equal(total.fitted[kind], expected.fitted[kind])
