"""How far to align: what hand-offs of held-out text say about the steps in between.

The fits of `kvhub.alignment` look at one layer at a time, with the text before it as the target has
it. Whether the target as a whole is nearer to itself is measured: the mapper as it was fitted, and
its aligned keys with values that go none, half or all of the way to the aligned ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvhub.calibration import sum_over_ranks
from kvhub.data import TokenBatch
from kvhub.evaluation import evaluate
from kvhub.exact import EXACT_PREFIX
from kvhub.mapper import KVMapper

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["VALUE_SHARES", "Candidate", "choose_alignment", "part_way"]

VALUE_SHARES = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Candidate:
    """A mapper and what its hand-offs gave.

    Attributes
    ----------
    mapper
        The mapper.
    value_share
        How far its values are aligned; None: neither keys nor values are.
    kl
        KL to the target alone in nats, with nothing exact and with an exact sink.
    """

    mapper: KVMapper
    value_share: float | None
    kl: tuple[float, float]


def choose_alignment(
    plain: KVMapper,
    aligned: KVMapper,
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    held_out: Sequence[TokenBatch],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Candidate, list[Candidate]]:
    """The best mapper on the way from `plain` to `aligned`, and all that were tried.

    Under `torchrun`, of the text of all ranks, and the same on each.

    Parameters
    ----------
    plain, aligned
        What `align` was given, and what it returned.
    source_model, target_model
        The pair.
    held_out
        Text that neither was fitted to; a rank may have none.
    progress
        Called with (batches done, batches in all).

    Returns
    -------
    best
        The least KL, summed over the two settings, of those that are worse than `plain` in neither.
    tried
        All candidates, `plain` first.
    """
    mappers = [(plain, None), *((part_way(plain, aligned, one), one) for one in VALUE_SHARES)]
    tried = []
    for index, (mapper, share) in enumerate(mappers):

        def batch_done(done: int, total: int, before: int = index) -> None:
            if progress is not None:
                progress(before * total + done, len(mappers) * total)

        # KL summed over sequences for each setting, and their number.
        sums = torch.zeros(3, dtype=torch.float64)
        if held_out:
            report = evaluate(
                mapper,
                source_model,
                target_model,
                held_out,
                exact_prefix=EXACT_PREFIX,
                exact_budgets=(0,),
                progress=batch_done,
            )
            count = report.provenance["sequences"]
            kl = (report.exact[0].kl.value, report.settings["mapped"].kl.value)
            sums += torch.tensor([*(count * each for each in kl), count], dtype=sums.dtype)
        none, sink, count = sum_over_ranks(sums).tolist()
        tried.append(Candidate(mapper, share, (none / count, sink / count)))
    start = tried[0]
    no_worse = [one for one in tried if all(a <= b for a, b in zip(one.kl, start.kl, strict=True))]
    return min(no_worse, key=lambda one: sum(one.kl)), tried


def part_way(plain: KVMapper, aligned: KVMapper, share: float) -> KVMapper:
    """The aligned keys, with values `share` of the way from the plain to the aligned ones."""
    tensors = aligned.tensors()
    for name in ("value_weight", "value_bias"):
        tensors[name] = plain.tensors()[name].lerp(tensors[name], share)
    config = aligned.config
    how = {**config.ridge["alignment"], "value_share": share}
    quality = config.quality
    if share < 1:
        # The error of values on the way was not measured.
        errors = {**quality["alignment"]}
        del errors["values"]
        quality = {**quality, "alignment": errors}
    ridge = {**config.ridge, "alignment": how}
    return KVMapper(replace(config, ridge=ridge, quality=quality), tensors)
