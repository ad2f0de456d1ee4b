import pytest
import torch

from kvhub.bootstrap import Bootstrap, positive_ratio
from kvhub.errors import UsageError, VerificationError


def mean(sums):
    return sums[..., 0] / sums[..., 1]


def rows(values, counts=None):
    counts = torch.ones_like(values) if counts is None else counts
    return torch.stack([values * counts, counts], dim=1)


def normal(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64)


def test_every_token_weighs_alike():
    values = torch.tensor([1.0, 4.0], dtype=torch.float64)
    counts = torch.tensor([30.0, 10.0], dtype=torch.float64)
    estimate = Bootstrap(rows(values, counts)).estimate(mean)
    assert estimate.value == pytest.approx((30 + 40) / 40)


def test_resampled_sums_are_those_of_drawn_sequences():
    sums = rows(normal(5))
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(5, (50, 5), generator=generator)
    expected = torch.stack([sums[row].sum(0) for row in drawn])
    torch.testing.assert_close(Bootstrap(sums, 50, seed=3)._resampled, expected)


def test_the_interval_is_that_of_95_percent():
    """Of a mean of many normal numbers it is 1.96 standard errors to each side."""
    values = normal(500)
    estimate = Bootstrap(rows(values), 20_000).estimate(mean)
    error = float(values.std() / 500**0.5)
    assert (estimate.value - estimate.low) / error == pytest.approx(1.96, rel=0.03)
    assert (estimate.high - estimate.value) / error == pytest.approx(1.96, rel=0.03)


def test_the_interval_covers_the_true_mean_about_19_times_in_20():
    covered = 0
    for seed in range(200):
        estimate = Bootstrap(rows(normal(60, seed)), 400).estimate(mean)
        covered += estimate.low <= 0 <= estimate.high
    assert 180 <= covered <= 198


def test_four_times_the_sequences_halve_the_interval():
    few, many = (Bootstrap(rows(normal(count))).estimate(mean) for count in (200, 3200))
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(4, rel=0.2)


def test_equal_sequences_have_no_spread_and_seeds_repeat():
    same = Bootstrap(rows(torch.full((9,), 0.5, dtype=torch.float64))).estimate(mean)
    assert (same.low, same.value, same.high) == (0.5, 0.5, 0.5)
    first, again, other = (Bootstrap(rows(normal(30)), seed=s).estimate(mean) for s in (1, 1, 2))
    assert first == again
    assert first.low != other.low


def test_two_settings_are_resampled_together():
    values = normal(50)
    paired = torch.stack([values, values + 1], dim=1)
    difference = Bootstrap(paired).estimate(lambda sums: (sums[..., 1] - sums[..., 0]) / 50)
    assert difference.low == pytest.approx(1)
    assert difference.high == pytest.approx(1)


def test_resamples_without_a_meaningful_ratio_are_left_out():
    values = torch.tensor([1.0, 1.0, 1.0, -0.5], dtype=torch.float64)
    sums = torch.stack([torch.ones_like(values), values], dim=1)
    estimate = Bootstrap(sums).estimate(lambda sums: positive_ratio(sums[..., 0], sums[..., 1]))
    assert estimate.value == pytest.approx(4 / 2.5)
    assert 0 < estimate.low <= estimate.value <= estimate.high


def test_no_sequence_and_no_number_are_refused():
    with pytest.raises(UsageError, match="no sequence"):
        Bootstrap(torch.zeros(0, 2, dtype=torch.float64))
    with pytest.raises(VerificationError, match="not finite"):
        Bootstrap(rows(torch.tensor([1.0, torch.nan], dtype=torch.float64))).estimate(mean)
