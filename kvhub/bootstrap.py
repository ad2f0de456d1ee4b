"""How sure a figure is: percentile bootstrap over sequences."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvhub.errors import UsageError, VerificationError
from kvhub.report import Estimate

__all__ = ["RESAMPLES", "SEED", "Bootstrap", "positive_ratio"]

RESAMPLES = 1000
SEED = 0


def positive_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide where the denominator is positive; elsewhere a ratio has no meaning and is NaN."""
    return torch.where(denominator > 0, numerator / denominator, torch.nan)


class Bootstrap:
    """Percentile bootstrap over sequences, for statistics of sums.

    Each resample draws as many sequences as there are, with replacement, and adds up their
    columns. A statistic of those totals, such as the ratio of two, weighs every token alike, and
    all statistics see the same resamples, so ratios of two settings are paired.

    Parameters
    ----------
    sums
        `[sequences, columns]` float64.
    resamples, seed
        How many resamples, and the seed that draws them.
    """

    def __init__(self, sums: Tensor, resamples: int = RESAMPLES, seed: int = SEED) -> None:
        sequences = len(sums)
        if sequences == 0:
            raise UsageError("There is no sequence to resample.", "Give at least one sequence.")
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(sequences, (resamples, sequences), generator=generator)
        counts = torch.zeros(resamples, sequences, dtype=sums.dtype)
        counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=sums.dtype))
        self._totals = sums.sum(0)
        self._resampled = counts @ sums

    def estimate(self, statistic: Callable[[Tensor], Tensor]) -> Estimate:
        """Return the statistic with its 95 % interval.

        Parameters
        ----------
        statistic
            Takes totals `[..., columns]` to figures `[...]`; NaN in a resample leaves it out.

        Raises
        ------
        VerificationError
            The statistic of all sequences is not finite.
        """
        value = float(statistic(self._totals))
        samples = statistic(self._resampled)
        low, high = torch.nanquantile(samples, samples.new_tensor([0.025, 0.975])).tolist()
        result = Estimate(value, low, high)
        if not all(abs(number) < float("inf") for number in (value, low, high)):
            raise VerificationError(
                f"A figure of the evaluation is not finite: {result}.",
                "Check the models' dtype (bfloat16 or float32) and the mapper's calibration.",
            )
        return result
