"""The closed form against independent solutions, and its behaviour on bad data."""

import pytest
import torch
from regression import random_rows, spec, statistics_of

from kvhub import Selection, fit
from kvhub.errors import UsageError
from kvhub.moments import group_features
from kvhub.ridge import penalty, regress, require_rows, solve_ridge

SOURCE, TARGET = spec(3, 2, 4), spec(2, 2, 6)
SELECTION = Selection([[2, 0], [1, 2]], [[0.0] * 3] * 2, "probe", "held_out")


def augmented_ridge(x, y, amount):
    """Ridge by least squares on rows sqrt(penalty) I appended to the centred data, with a bias."""
    dx, dy = x - x.mean(0), y - y.mean(0)
    rows = amount**0.5 * torch.eye(x.shape[1], dtype=x.dtype)
    zeros = torch.zeros(x.shape[1], y.shape[1], dtype=y.dtype)
    weights = torch.linalg.lstsq(torch.cat([dx, rows]), torch.cat([dy, zeros]), driver="gelsd")
    return weights.solution, y.mean(0) - x.mean(0) @ weights.solution


@pytest.mark.parametrize("heads", ["all", "matched"])
@pytest.mark.parametrize("scale", ["relative", "per_token", "absolute"])
def test_fit_is_ridge_by_augmented_least_squares(heads, scale):
    data = random_rows(SOURCE, TARGET, 200)
    statistics = statistics_of(data, SOURCE, TARGET, "all", held_out=data)
    mapper = fit(
        statistics,
        SELECTION,
        heads=heads,
        ridge_lambda=0.02,
        lambda_scale=scale,
        dtype=torch.float64,
    )
    for layer, chosen in enumerate(SELECTION.layers):
        for kind, weight, bias in (
            ("keys", mapper.key_weight, mapper.key_bias),
            ("values", mapper.value_weight, mapper.value_bias),
        ):
            x = group_features(data[kind][0][chosen], heads)
            y = group_features(data[kind][1][[layer]], heads)
            for group in range(x.shape[1]):
                dx = x[:, group] - x[:, group].mean(0)
                amount = {"relative": (dx**2).sum(0).mean(), "per_token": len(x), "absolute": 1}
                expected = augmented_ridge(x[:, group], y[:, group], 0.02 * amount[scale])
                torch.testing.assert_close(weight[layer, group], expected[0], rtol=1e-8, atol=1e-9)
                torch.testing.assert_close(bias[layer, group], expected[1], rtol=1e-8, atol=1e-9)


def test_no_penalty_is_least_squares():
    data = random_rows(SOURCE, TARGET, 200)
    block = statistics_of(data, SOURCE, TARGET).block("fitted", "keys", [0, 1], 0)
    weights, bias = regress(block, 0.0, "relative")
    x = group_features(data["keys"][0][[0, 1]], "all")[:, 0]
    y = group_features(data["keys"][1][[0]], "all")[:, 0]
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    expected = torch.linalg.lstsq(design, y, driver="gelsd").solution
    torch.testing.assert_close(weights[0], expected[:-1], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(bias[0], expected[-1], rtol=1e-8, atol=1e-9)


def test_doubling_the_data_keeps_a_relative_or_per_token_fit():
    data = random_rows(SOURCE, TARGET, 200)
    once = statistics_of(data, SOURCE, TARGET)
    twice = once + once
    for scale in ("relative", "per_token"):
        first = regress(once.block("fitted", "keys", [0, 1], 0), 0.1, scale)
        second = regress(twice.block("fitted", "keys", [0, 1], 0), 0.1, scale)
        torch.testing.assert_close(first, second)
    block = twice.block("fitted", "keys", [0, 1], 0)
    absolute = regress(block, 100.0, "absolute")
    half = regress(once.block("fitted", "keys", [0, 1], 0), 50.0, "absolute")
    torch.testing.assert_close(absolute, half)


def test_a_relative_penalty_does_not_depend_on_units():
    """Scaling sources by 1000 scales the weights by 1/1000 and leaves the predictions alone."""
    data = random_rows(SOURCE, TARGET, 200)
    scaled = {kind: (1000 * x, y) for kind, (x, y) in data.items()}
    weights, bias = regress(
        statistics_of(data, SOURCE, TARGET).block("fitted", "keys", [0], 0), 0.1, "relative"
    )
    small, same = regress(
        statistics_of(scaled, SOURCE, TARGET).block("fitted", "keys", [0], 0), 0.1, "relative"
    )
    torch.testing.assert_close(small * 1000, weights)
    torch.testing.assert_close(same, bias)


def predictions(statistics, data, ridge_lambda):
    block = statistics.block("fitted", "keys", [0, 1, 2], 1)
    weights, bias = regress(block, ridge_lambda, "relative")
    assert torch.isfinite(weights).all()
    x = group_features(data["keys"][0], "all")[:, 0]
    return x @ weights[0] + bias[0]


@pytest.mark.parametrize("ridge_lambda", [0.0, 1e-3])
def test_a_constant_shift_changes_no_prediction(ridge_lambda):
    data = random_rows(SOURCE, TARGET, 200)
    shifted = {kind: (x + 1e3, y) for kind, (x, y) in data.items()}
    torch.testing.assert_close(
        predictions(statistics_of(shifted, SOURCE, TARGET), shifted, ridge_lambda),
        predictions(statistics_of(data, SOURCE, TARGET), data, ridge_lambda),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("ridge_lambda", [0.0, 1e-3])
def test_dead_features_get_weight_zero(ridge_lambda):
    data = random_rows(SOURCE, TARGET, 200)
    for kind in data:
        data[kind][0][1, 0] = 7.0  # one head of layer 1 never varies
    block = statistics_of(data, SOURCE, TARGET).block("fitted", "keys", [1, 0], 0)
    weights, bias = regress(block, ridge_lambda, "relative")
    assert torch.isfinite(weights).all()
    assert torch.isfinite(bias).all()
    torch.testing.assert_close(weights[0, :4], torch.zeros(4, 12, dtype=torch.float64))


def test_duplicated_layers_give_the_prediction_of_one():
    data = random_rows(SOURCE, TARGET, 200)
    for kind in data:
        data[kind][0][2] = data[kind][0][0]  # layer 2 repeats layer 0: the Gram is singular
    statistics = statistics_of(data, SOURCE, TARGET)
    twice = predictions(statistics, data, 0.0)
    block = statistics.block("fitted", "keys", [0, 1], 1)
    weights, bias = regress(block, 0.0, "relative")
    x = group_features(data["keys"][0][[0, 1]], "all")[:, 0]
    torch.testing.assert_close(twice, x @ weights[0] + bias[0], rtol=1e-7, atol=1e-7)


def test_a_nearly_singular_gram_gives_a_small_residual():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, dtype=torch.float64, generator=generator)
    x[:, 5] = x[:, 4] + 1e-9 * x[:, 5]
    y = x[:, :5] @ torch.randn(5, 2, dtype=torch.float64, generator=generator)
    weights = solve_ridge((x.T @ x)[None], (x.T @ y)[None], torch.zeros(1, dtype=torch.float64))[0]
    assert torch.isfinite(weights).all()
    assert float((x @ weights - y).norm() / y.norm()) < 1e-5


def test_features_of_very_different_size_are_all_used():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, dtype=torch.float64, generator=generator)
    x = x * torch.tensor([1e-8, 1.0, 1e3, 1e8], dtype=torch.float64)
    truth = torch.tensor([[1e8], [1.0], [1e-3], [1e-8]], dtype=torch.float64)
    weights = solve_ridge(
        (x.T @ x)[None], (x.T @ (x @ truth))[None], torch.zeros(1, dtype=torch.float64)
    )[0]
    torch.testing.assert_close(weights, truth, rtol=1e-8, atol=0)


def test_the_held_out_r2_is_that_of_the_predictions():
    data, other = random_rows(SOURCE, TARGET, 200, 0), random_rows(SOURCE, TARGET, 80, 1)
    statistics = statistics_of(data, SOURCE, TARGET, held_out=other)
    mapper = fit(statistics, SELECTION, dtype=torch.float64)
    x, y = other["values"]
    found = mapper.map_values(x[:, None])[:, 0]
    for layer in range(TARGET.num_layers):
        error = ((found[layer] - y[layer]) ** 2).sum()
        total = ((y[layer] - y[layer].mean(1, keepdim=True)) ** 2).sum()
        reported = mapper.config.quality["held_out_r2_per_layer"]["values"][layer]
        assert reported == pytest.approx(float(1 - error / total), abs=1e-9)


def test_fewer_tokens_than_features_are_refused():
    data = random_rows(SOURCE, TARGET, 16)
    statistics = statistics_of(data, SOURCE, TARGET, held_out=data)
    with pytest.raises(UsageError, match="Too few calibration tokens: 16 for 16 features"):
        fit(statistics, SELECTION)
    assert require_rows(161, 16, 2)
    assert not require_rows(159, 16, 2)


def test_weights_make_few_tokens_count_as_few():
    """Of 200 rows all weight is on 10: they must not pass for 200."""
    data = random_rows(SOURCE, TARGET, 200)
    weights = torch.full((200, 1), 1e-9, dtype=torch.float64)
    weights[:10] = 1.0
    statistics = statistics_of(data, SOURCE, TARGET, held_out=data, weights=None)
    for kind in statistics.fitted:
        x, y = (group_features(states, "all") for states in data[kind])
        moments = statistics.fitted[kind] = type(statistics.fitted[kind]).zeros(1, 24, 24)
        moments.update(x, y, weights)
    with pytest.raises(UsageError, match="Too few calibration tokens: 10 "):
        fit(statistics, SELECTION)


def test_bad_arguments_are_refused():
    data = random_rows(SOURCE, TARGET, 200)
    matched = statistics_of(data, SOURCE, TARGET, "matched", held_out=data)
    with pytest.raises(UsageError, match="matched heads only"):
        fit(matched, SELECTION, heads="all")
    with pytest.raises(UsageError, match="negative"):
        fit(matched, SELECTION, ridge_lambda=-1.0)
    with pytest.raises(UsageError, match="negative"):
        fit(matched, SELECTION, ridge_lambda=float("nan"))
    with pytest.raises(UsageError, match="lambda scale"):
        penalty(matched.block("fitted", "keys", [0], 0), 1.0, "summed")
    wrong = Selection([[0, 3], [0, 1]], [], "probe", "held_out")
    with pytest.raises(UsageError, match="selection does not fit"):
        fit(matched, wrong)
