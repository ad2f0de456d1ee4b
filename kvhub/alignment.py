"""Fit a mapper again, to what the target reads from its cache instead of to the cache itself.

The plain fit (`kvhub.ridge`) wants every cached number alike. What matters is the attention output,
so further passes over text (`kvhub.alignment_passes`) fit, at the same size,

1. the keys, so that all their errors together move the attention output least (`kvhub.key_fit`);
2. the values, so that what the target reads with the new keys in place is what it would have read
   (`kvhub.value_fit`).

These look at one layer at a time, with the text before it as the target has it, and the keys' fit
to first order only. Whether the target as a whole is nearer to itself is measured: hand-offs of the
held-out sequences say after how many steps the keys are best, and whether the values go none, half
or all of the way to the new ones.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvhub.alignment_passes import align_keys, align_values
from kvhub.calibration import HELD_OUT_EVERY, sum_over_ranks
from kvhub.data import TokenBatch
from kvhub.evaluation import evaluate
from kvhub.exact import EXACT_PREFIX
from kvhub.mapper import KVMapper
from kvhub.pairs import Track

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "VALUE_SHARES",
    "Alignment",
    "Candidate",
    "align",
    "choose",
    "held_out_batches",
    "part_way",
]

VALUE_SHARES = (0.5, 1.0)  # tried beside the values as they were


@dataclass(frozen=True)
class Candidate:
    """A mapper and what its hand-offs gave.

    Attributes
    ----------
    mapper
        The mapper.
    key_steps
        After how many steps its keys are; 0: neither keys nor values are aligned.
    value_share
        How far its values are aligned.
    kl
        KL to the target alone in nats, with nothing exact and with an exact sink.
    """

    mapper: KVMapper
    key_steps: int
    value_share: float
    kl: tuple[float, float]


@dataclass(frozen=True)
class Alignment:
    """What `align` found.

    Attributes
    ----------
    best
        The least KL, summed over the two settings, of those that are worse than the given mapper in
        neither: that one itself, if there is no such.
    tried
        All candidates, the given mapper first.
    """

    best: Candidate
    tried: tuple[Candidate, ...]


@contextmanager
def _silent(_description: str) -> Iterator[Callable[[int, int], None]]:
    yield lambda _done, _total: None


def align(
    mapper: KVMapper,
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    token_batches: Iterable[TokenBatch],
    *,
    held_out_every: int = HELD_OUT_EVERY,
    checkpoint: Path | None = None,
    track: Track = _silent,
) -> Alignment:
    """Fit a mapper to the target's attention output, as far as held-out hand-offs like it.

    Memory does not grow with tokens. Under `torchrun`, give each rank its own share of the
    sequences and the same mapper; every rank returns the same result.

    Parameters
    ----------
    mapper
        From `fit`, for these two models.
    source_model, target_model
        Two causal language models of transformers with one tokenizer.
    token_batches
        Read once per pass, so a list and not a generator; padded on the right.
    held_out_every
        Every n-th sequence is kept apart, as in `calibrate`.
    checkpoint
        Two files, with `.keys` and `.values` behind this name, are written whenever some layers are
        done. What they have is not done again; the caller deletes them once the result is safe.
    track
        Called with a description of each part, for a context in which (done, total) is called.

    Raises
    ------
    IncompatiblePairError, UsageError, VerificationError, ConflictError
        As `kvhub.alignment_passes.align_keys`.
    """
    models = (source_model, target_model)

    def file(kind: str) -> Path | None:
        return checkpoint and checkpoint.with_name(f"{checkpoint.name}.{kind}")

    with track("Align keys") as progress:
        steps = align_keys(
            mapper,
            *models,
            token_batches,
            held_out_every=held_out_every,
            checkpoint=file("keys"),
            progress=progress,
        )
    held_out = held_out_batches(token_batches, held_out_every)
    with track("Compare keys on held-out text") as progress:
        plain, *keys = _measure([mapper, *steps], models, held_out, progress)
    start = Candidate(mapper, 0, 0.0, plain)
    stepped = [
        Candidate(step, count, 0.0, kl)
        for count, (step, kl) in enumerate(zip(steps, keys, strict=True), start=1)
    ]
    chosen = min(stepped, key=lambda one: sum(one.kl))
    with track("Align values") as progress:
        aligned = align_values(
            chosen.mapper,
            *models,
            token_batches,
            held_out_every=held_out_every,
            checkpoint=file("values"),
            progress=progress,
        )
    ways = [part_way(chosen.mapper, aligned, share) for share in VALUE_SHARES]
    with track("Compare values on held-out text") as progress:
        values = _measure(ways, models, held_out, progress)
    shared = [
        Candidate(way, chosen.key_steps, share, kl)
        for way, share, kl in zip(ways, VALUE_SHARES, values, strict=True)
    ]
    return choose(start, [*stepped, *shared])


def choose(start: Candidate, others: list[Candidate]) -> Alignment:
    """The best one that is worse than the start in neither setting."""
    tried = (start, *others)
    no_worse = [one for one in tried if all(a <= b for a, b in zip(one.kl, start.kl, strict=True))]
    return Alignment(min(no_worse, key=lambda one: sum(one.kl)), tried)


def _measure(
    mappers: list[KVMapper],
    models: "tuple[PreTrainedModel, PreTrainedModel]",
    held_out: list[TokenBatch],
    progress: Callable[[int, int], None],
) -> list[tuple[float, float]]:
    """KL with nothing exact and with an exact sink, of the text of all ranks; one may have none."""
    found = []
    for index, mapper in enumerate(mappers):

        def batch_done(done: int, total: int, before: int = index) -> None:
            progress(before * total + done, len(mappers) * total)

        # KL summed over sequences for each setting, and their number.
        sums = torch.zeros(3, dtype=torch.float64)
        if held_out:
            report = evaluate(
                mapper,
                *models,
                held_out,
                exact_prefix=EXACT_PREFIX,
                exact_budgets=(0,),
                progress=batch_done,
            )
            count = report.provenance["sequences"]
            kl = (report.exact[0].kl.value, report.settings["mapped"].kl.value)
            sums += torch.tensor([*(count * each for each in kl), count], dtype=sums.dtype)
        none, sink, count = sum_over_ranks(sums).tolist()
        found.append((none / count, sink / count))
    return found


def part_way(before: KVMapper, aligned: KVMapper, share: float) -> KVMapper:
    """Values `share` of the way from those before to the aligned ones; the keys are the same."""
    tensors = aligned.tensors()
    for name in ("value_weight", "value_bias"):
        tensors[name] = before.tensors()[name].lerp(tensors[name], share)
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


def held_out_batches(
    batches: Iterable[TokenBatch], every: int = HELD_OUT_EVERY
) -> list[TokenBatch]:
    """The sequences that calibration and alignment keep apart."""
    found = []
    for batch in batches:
        ids = torch.tensor(batch.sequence_ids)
        rows = (ids % every == every - 1).nonzero()[:, 0]
        if len(rows):
            tokens = (batch.input_ids[rows], batch.attention_mask[rows])
            found.append(TokenBatch(*tokens, tuple(ids[rows].tolist())))
    return found
