"""Layer selection: the layers that carry the signal are the ones chosen."""

import pytest
import torch
from regression import random_rows, spec, statistics_of

from kvhub import select_layers
from kvhub.errors import UsageError
from kvhub.moments import group_features
from kvhub.selection import probe_scores

SOURCE, TARGET = spec(4, 2, 4), spec(3, 2, 4)


def noise_rows(tokens, seed):
    generator = torch.Generator().manual_seed(seed)

    def states(layers):
        return torch.randn(layers, 2, tokens, 4, dtype=torch.float64, generator=generator)

    return {kind: (states(4), states(3)) for kind in ("keys", "values")}


def copied_rows(tokens, seed):
    """Target layer 0 copies source 3, layer 1 source 0, layer 2 the sum of sources 1 and 2."""
    rows = noise_rows(tokens, seed)
    for x, y in rows.values():
        y *= 0.1
        y[0] += x[3]
        y[1] += x[0]
        y[2] += x[1] + 0.9 * x[2]
    return rows


def test_the_layers_with_the_signal_are_chosen():
    statistics = statistics_of(copied_rows(300, 0), SOURCE, TARGET, held_out=copied_rows(100, 1))
    for method in ("probe", "greedy"):
        selection = select_layers(statistics, 2, method=method)
        assert [chosen[0] for chosen in selection.layers] == [3, 0, 1]
        assert selection.layers[2] == [1, 2]
    assert selection.scores[0][3] > 0.9
    assert selection.top_k == 2


def test_greedy_avoids_a_layer_that_repeats_another():
    """The probe takes the two copies, which say the same; greedy takes what is new."""

    def rows(tokens, seed):
        data = noise_rows(tokens, seed)
        for x, y in data.values():
            x[1] = x[0] + 0.01 * x[1]
            y[:] = 0.1 * y + x[0] + 0.5 * x[2]
        return data

    statistics = statistics_of(rows(300, 0), SOURCE, TARGET, held_out=rows(100, 1))
    assert {*select_layers(statistics, 2, method="probe").layers[0]} == {0, 1}
    assert 2 in select_layers(statistics, 2, method="greedy").layers[0]


def test_scores_are_head_averaged_least_squares_r2():
    data, other = random_rows(SOURCE, TARGET, 300, 0), random_rows(SOURCE, TARGET, 100, 1)
    statistics = statistics_of(data, SOURCE, TARGET, held_out=other)
    for scored_on, scored in (("held_out", other), ("fitted", data)):
        scores = probe_scores(statistics, scored_on=scored_on)
        expected = []
        for kind in ("keys", "values"):
            for head in range(2):
                x, y = data[kind][0][1, head], data[kind][1][2, head]
                ones = torch.ones(len(x), 1, dtype=x.dtype)
                weights = torch.linalg.lstsq(torch.cat([x, ones], 1), y).solution
                x, y = scored[kind][0][1, head], scored[kind][1][2, head]
                residual = y - torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1) @ weights
                expected.append(1 - (residual**2).sum() / ((y - y.mean(0)) ** 2).sum())
        assert float(scores[2, 1]) == pytest.approx(float(sum(expected) / 4), abs=1e-9)


def test_held_out_scores_see_through_a_layer_that_only_overfits():
    """On 12 rows pure noise fits well in sample; on held-out rows it scores below zero."""
    statistics = statistics_of(noise_rows(12, 0), SOURCE, TARGET, held_out=noise_rows(500, 1))
    assert float(probe_scores(statistics, scored_on="fitted").min()) > 0.1
    assert float(probe_scores(statistics, scored_on="held_out").max()) < 0


def test_models_with_different_heads_are_probed_with_all_heads():
    source, target = spec(4, 2, 4), spec(2, 1, 8)
    data = random_rows(source, target, 300)
    statistics = statistics_of(data, source, target, held_out=data)
    scores = probe_scores(statistics, scored_on="fitted")
    expected = []
    for kind in ("keys", "values"):
        x = group_features(data[kind][0][[3]], "all")[:, 0]
        y = group_features(data[kind][1][[0]], "all")[:, 0]
        dx, dy = x - x.mean(0), y - y.mean(0)
        residual = dy - dx @ torch.linalg.lstsq(dx, dy).solution
        expected.append(1 - (residual**2).sum() / (dy**2).sum())
    assert float(scores[0, 3]) == pytest.approx(float(sum(expected) / 2), abs=1e-9)


def test_bad_requests_are_refused():
    data = random_rows(SOURCE, TARGET, 50)
    statistics = statistics_of(data, SOURCE, TARGET, held_out=data)
    for top_k in (0, 5):
        with pytest.raises(UsageError, match="top_k"):
            select_layers(statistics, top_k)
    with pytest.raises(UsageError, match="method"):
        select_layers(statistics, 1, method="best")
    with pytest.raises(UsageError, match="No held_out tokens"):
        select_layers(statistics_of(data, SOURCE, TARGET), 1)
