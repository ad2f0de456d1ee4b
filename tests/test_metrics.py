from dataclasses import astuple

import pytest
import torch

from kvhub import metrics
from kvhub.bootstrap import Bootstrap
from kvhub.metrics import (
    attention_output_cosine,
    exact_curve,
    floor_normalized_retention,
    gap_recovered,
    retention,
    score_predictions,
    setting_metrics,
    sums_table,
)
from kvhub.report import SETTINGS


def predictions(seed=0, vocabulary=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(3, 7, vocabulary, generator=generator, dtype=dtype)


LABELS = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(9))


def brute_force(logits, reference, labels):
    """One token at a time from the definitions, in float64."""
    sums = torch.zeros(len(labels), 4, dtype=torch.float64)
    for row in range(labels.shape[0]):
        for token in range(labels.shape[1]):
            q = logits[row, token].double().exp()
            p = reference[row, token].double().exp()
            common = min(len(p), len(q))
            label = labels[row, token]
            sums[row, 0] -= (q / q.sum())[label].log()
            sums[row, 1] += int(q.argmax()) == int(label)
            p, q = p[:common] / p[:common].sum(), q[:common] / q[:common].sum()
            sums[row, 2] += sum(p[i] * (p[i] / q[i]).log() for i in range(common))
            sums[row, 3] += int(p.argmax()) == int(q.argmax())
    return sums


@pytest.mark.parametrize("budget", [1, 100, 2**24])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_equal_their_definitions_whatever_the_chunks(monkeypatch, budget, dtype):
    monkeypatch.setattr(metrics, "MAX_LOGITS", budget)
    logits, reference = predictions(0).to(dtype), predictions(1).to(dtype)
    found = score_predictions(logits, reference, LABELS)
    assert found.dtype == torch.float64
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    expected = brute_force(logits, reference, LABELS)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_padded_vocabulary_is_left_out_of_the_comparison():
    logits, reference = predictions(0, vocabulary=14), predictions(1)
    expected = brute_force(logits, reference, LABELS)
    torch.testing.assert_close(score_predictions(logits, reference, LABELS), expected)
    expected = brute_force(reference, logits, LABELS)
    torch.testing.assert_close(score_predictions(reference, logits, LABELS), expected)


def test_a_model_agrees_with_itself_also_where_ids_are_masked():
    logits = predictions()
    logits[..., 4] = -torch.inf
    labels = LABELS.masked_fill(LABELS == 4, 5)
    scores = score_predictions(logits, logits, labels)
    assert scores[:, 2].tolist() == [0, 0, 0]
    assert scores[:, 3].tolist() == [7, 7, 7]


def table(rows=40, source_nll=2.0, **nll):
    """Sums with the given NLL and accuracy per token, and ten tokens in each sequence."""
    means = {
        "target_alone": (1.0, 0.8),
        "source_alone": (source_nll, 0.5),
        "mapped": (1.25, 0.7),
        "no_context": (3.0, 0.4),
    }
    generator = torch.Generator().manual_seed(0)
    scores = {}
    for setting in SETTINGS:
        noise = 0.1 * torch.randn(rows, generator=generator, dtype=torch.float64)
        noise -= noise.mean()
        mean, accuracy = means[setting]
        zeros = torch.zeros(rows, dtype=torch.float64)
        scores[setting] = 10 * torch.stack(
            [mean + noise, zeros + accuracy, zeros + 0.3, zeros + 0.9], dim=1
        )
    return sums_table(10, torch.full((rows,), 0.75, dtype=torch.float64), scores)


def test_figures_read_the_right_columns():
    bootstrap = Bootstrap(table())
    notes = []
    metrics = setting_metrics(bootstrap, "mapped")
    assert metrics.nll.value == pytest.approx(1.25)
    assert metrics.perplexity.value == pytest.approx(2.718281828**1.25)
    assert metrics.accuracy.value == pytest.approx(0.7)
    assert metrics.kl.value == pytest.approx(0.3)
    assert metrics.agreement.value == pytest.approx(0.9)
    assert attention_output_cosine(bootstrap).value == pytest.approx(0.75)
    assert retention(bootstrap, notes).value == pytest.approx(0.7 / 0.8)
    assert floor_normalized_retention(bootstrap, notes).value == pytest.approx(0.3 / 0.4)
    gap = gap_recovered(bootstrap, notes)
    assert gap.value == pytest.approx(0.75)
    assert gap.low < 0.75 < gap.high
    assert notes == []


def test_each_budget_of_exact_tokens_has_its_own_gap():
    sums = table()
    source, target, mapped = (
        sums[:, metrics._column(setting, "nll")]
        for setting in ("source_alone", "target_alone", "mapped")
    )
    exact = []
    for nll in (source, mapped, target):
        scores = torch.zeros(len(sums), len(metrics.SCORES), dtype=torch.float64)
        scores[:, metrics.SCORES.index("nll")] = nll
        exact.append(scores)
    bootstrap = Bootstrap(torch.cat([sums, *exact], dim=1))
    none, some, all_of_it = exact_curve(bootstrap, {0: 0.0, 4: 0.5, 8: 1.0})
    same = gap_recovered(bootstrap, [])
    for point, expected in ((none, [0, 0, 0]), (some, astuple(same)), (all_of_it, [1, 1, 1])):
        assert astuple(point.gap_recovered) == pytest.approx(tuple(expected), abs=1e-12)


@pytest.mark.parametrize("source_nll", [0.5, 1.0, 1.001])
def test_a_gap_that_is_not_above_noise_is_none_and_says_so(source_nll):
    notes = []
    assert gap_recovered(Bootstrap(table(source_nll=source_nll)), notes) is None
    assert "gap_recovered is not defined" in notes[0]
    assert "interval" in notes[0]


def test_retention_of_a_target_that_is_never_right_is_none():
    sums = table()
    for setting in SETTINGS:
        sums[:, metrics._column(setting, "accuracy")] = 0
    notes = []
    assert retention(Bootstrap(sums), notes) is None
    assert floor_normalized_retention(Bootstrap(sums), notes) is None
    assert len(notes) == 2
