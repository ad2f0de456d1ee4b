"""Train networks on what a linear map leaves over, from states that both models stream.

Everything is in content space and float32. A network of a target layer and kind sees the same
features as the layer's linear map, normalised to mean 0 and deviation 1, and learns the residual
Y - (X W + b), each output divided by its deviation (the paper: Adam, 1e-3, 20 epochs, squared
error). Its last layer starts at zero, so that training starts at the linear map itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvhub.calibration import content_states
from kvhub.data import TokenBatch
from kvhub.generation import EXACT_PREFIX
from kvhub.mapper import KVMapper

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ROWS_PER_BATCH", "Task", "batches_of", "train"]

ROWS_PER_BATCH = 1024  # tokens that the models take at once
LEARNING_RATE = 1e-3
# The paper takes 4,096 of 128,000 tokens at a time; these are for some tens of thousands.
STEP_ROWS = 512
PATIENCE = 3  # epochs without a better held-out error before a network stops
HELD_OUT_SHARE = 0.2  # of the buffer


class Task(NamedTuple):
    """A network to train: of which kind, `key` or `value`, and which target layer."""

    kind: str
    layer: int


@dataclass(frozen=True)
class Rows:
    """What networks learn from, on the mapper's device.

    Attributes
    ----------
    sources
        By kind and source layer: `[groups, rows, features of the layer]`, content space.
    residuals
        By task: `[groups, rows, outputs]`.
    """

    sources: dict[tuple[str, int], Tensor]
    residuals: dict[Task, Tensor]

    def features(self, task: Task, chosen: Sequence[int], index: Tensor) -> Tensor:
        """`[groups, rows of the index, features]`."""
        return torch.cat([self.sources[task.kind, layer][:, index] for layer in chosen], dim=-1)


def batches_of(sequences: Sequence[Tensor]) -> Iterator[Tensor]:
    """Sequences of equal length that follow each other, together: `[batch, tokens]` ids."""
    batch: list[Tensor] = []
    for ids in sequences:
        full = (len(batch) + 1) * len(ids) > ROWS_PER_BATCH
        if batch and (full or len(batch[0]) != len(ids)):
            yield torch.stack(batch)
            batch = []
        batch.append(ids)
    if batch:
        yield torch.stack(batch)


def collect(
    mapper: KVMapper,
    models: "tuple[PreTrainedModel, PreTrainedModel]",
    sequences: Sequence[Tensor],
    tasks: Sequence[Task],
    skip: int,
) -> Rows:
    """Run both models over sequences, of which the first `skip` tokens are left out."""
    config, device = mapper.config, mapper.key_weight.device
    groups = mapper.key_weight.shape[1]
    count = sum(max(0, len(ids) - skip) for ids in sequences)

    def empty(numbers: int) -> Tensor:
        return torch.empty(groups, count, numbers // groups, device=device)

    used = {(task.kind, layer) for task in tasks for layer in config.selection[task.layer]}
    rows = Rows(
        {key: empty(config.source.kv_dim) for key in sorted(used)},
        {task: empty(config.target.kv_dim) for task in tasks},
    )
    start = 0
    for ids in batches_of(sequences):
        batch = TokenBatch(ids, torch.ones_like(ids), tuple(range(len(ids))))
        kept = (torch.arange(ids.shape[1]) >= skip).repeat(len(ids)).nonzero()[:, 0].to(device)
        span = slice(start, start + len(kept))
        source, target = (
            content_states(model, batch, spec)
            for model, spec in zip(models, (config.source, config.target), strict=True)
        )
        for kind, apply in (("key", mapper.map_keys), ("value", mapper.map_values)):
            states = source[f"{kind}s"].to(device).index_select(2, kept)
            wanted = target[f"{kind}s"].to(device).index_select(2, kept)
            with torch.no_grad():
                mapped = apply(states[:, None])[:, 0].float()
            for key, place in rows.sources.items():
                if key[0] == kind:
                    place[:, span] = _grouped(states[key[1]], groups)
            for task, place in rows.residuals.items():
                if task.kind == kind:
                    place[:, span] = _grouped(wanted[task.layer] - mapped[task.layer], groups)
        start = span.stop
    return rows


def train(
    mapper: KVMapper,
    models: "tuple[PreTrainedModel, PreTrainedModel]",
    fitted: Sequence[Tensor],
    held_out: Sequence[Tensor],
    tasks: Sequence[Task],
    *,
    hidden: int,
    epochs: int,
    buffer_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> dict[Task, list[Tensor]]:
    """Train one network per task.

    Parameters
    ----------
    mapper
        The linear map.
    models
        Source and target.
    fitted, held_out
        Sequences of ids `[tokens]`, without padding.
    tasks
        Which networks.
    hidden
        Their width.
    epochs
        At most so many passes; a network stops before where the held-out error does.
    buffer_bytes
        Bound on the states that are held. Where those of all sequences fit, the models run over
        them once; else once per epoch, some sequences at a time, in an order that changes.
    progress
        Called with (epochs done, epochs in all).

    Returns
    -------
    networks
        Those that leave less of the held-out residual than no network: the six tensors of
        `kvhub.networks.network_of` in float32, to be used on features as they are.
    """
    per_row = _bytes_per_row(mapper, tasks)
    capacity = int((1 - HELD_OUT_SHARE) * buffer_bytes / per_row)
    few = _parts(held_out, int(HELD_OUT_SHARE * buffer_bytes / per_row))[0]
    # The hand-off computes the first positions exactly, and they are unlike all others: learning
    # from them keeps a map sane that is used without, but what counts is the rest.
    held_rows = collect(mapper, models, few, tasks, EXACT_PREFIX)
    generator = torch.Generator().manual_seed(0)
    students: dict[Task, _Student] = {}
    rows: Rows | None = None
    for epoch in range(epochs):
        order = torch.randperm(len(fitted), generator=generator).tolist()
        parts = _parts([fitted[index] for index in order], capacity)
        for part in parts:
            if rows is None or len(parts) > 1:
                rows = None  # before the next ones are made
                rows = collect(mapper, models, part, tasks, 0)
            for task in tasks:
                if task not in students:
                    chosen = mapper.config.selection[task.layer]
                    students[task] = _Student(task, chosen, rows, held_rows, hidden, generator)
                if students[task].learning:
                    students[task].learn(rows, generator)
        for student in students.values():
            if student.learning:
                student.check(held_rows)
        if progress is not None:
            progress(epoch + 1, epochs)
        if not any(student.learning for student in students.values()):
            break
    return {task: student.folded() for task, student in students.items() if student.helps}


class _Student:
    """A network in training, and the best of what it was."""

    def __init__(
        self,
        task: Task,
        chosen: Sequence[int],
        rows: Rows,
        held_out: Rows,
        hidden: int,
        generator: torch.Generator,
    ) -> None:
        self.task, self.chosen = task, chosen
        sources = [rows.sources[task.kind, layer] for layer in chosen]
        self.mean = torch.cat([part.mean(1, keepdim=True) for part in sources], dim=-1)
        deviation = torch.cat([part.std(1, keepdim=True) for part in sources], dim=-1)
        # A feature that never varies says nothing.
        self.inverse = torch.where(deviation > 0, 1 / deviation, 0.0)
        residual = rows.residuals[task]
        self.scale = residual.std(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        groups, features, outputs = len(residual), self.mean.shape[-1], residual.shape[-1]
        sizes = [(features, hidden), (hidden, hidden), (hidden, outputs)]
        self.parts: list[Tensor] = []
        for number, (inputs, width) in enumerate(sizes):
            weight = torch.randn(groups, inputs, width, generator=generator) * (2 / inputs) ** 0.5
            if number == 2:
                weight.zero_()
            self.parts += [weight.to(residual.device), residual.new_zeros(groups, 1, width)]
        for part in self.parts:
            part.requires_grad_()
        self.optimizer = torch.optim.Adam(self.parts, lr=LEARNING_RATE)
        self.best = [part.detach().clone() for part in self.parts]
        self.nothing = self.least = self._error(held_out)
        self.waited = 0

    @property
    def learning(self) -> bool:
        """Whether the held-out error fell not long ago."""
        return self.waited < PATIENCE

    @property
    def helps(self) -> bool:
        """Whether it leaves less than no network does."""
        return self.least < self.nothing

    def learn(self, rows: Rows, generator: torch.Generator) -> None:
        """One pass over rows in a new order."""
        residual = rows.residuals[self.task]
        order = torch.randperm(residual.shape[1], generator=generator).to(residual.device)
        with torch.enable_grad():
            for index in torch.split(order, STEP_ROWS):
                self.optimizer.zero_grad()
                loss = self._left(rows, index).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()

    def check(self, held_out: Rows) -> None:
        """Keep what the network is now if the held-out error is the least so far."""
        error = self._error(held_out)
        self.waited += 1
        if error < self.least:
            self.least, self.waited = error, 0
            self.best = [part.detach().clone() for part in self.parts]

    def folded(self) -> list[Tensor]:
        """The best network on features as they are, with outputs as they are."""
        first, first_bias, middle, middle_bias, last, last_bias = self.best
        return [
            self.inverse.mT * first,
            (first_bias - (self.mean * self.inverse) @ first)[:, 0],
            middle,
            middle_bias[:, 0],
            last * self.scale,
            (last_bias * self.scale)[:, 0],
        ]

    def _left(self, rows: Rows, index: Tensor) -> Tensor:
        """What the network leaves of the scaled residual of some rows."""
        states = (rows.features(self.task, self.chosen, index) - self.mean) * self.inverse
        first, first_bias, middle, middle_bias, last, last_bias = self.parts
        states = torch.baddbmm(first_bias, states, first).relu()
        states = torch.baddbmm(middle_bias, states, middle).relu()
        return rows.residuals[self.task][:, index] / self.scale - torch.baddbmm(
            last_bias, states, last
        )

    @torch.no_grad()
    def _error(self, rows: Rows) -> float:
        residual = rows.residuals[self.task]
        every = torch.arange(residual.shape[1], device=residual.device)
        total = 0.0
        for index in torch.split(every, 8 * STEP_ROWS):
            total += float(self._left(rows, index).double().square().sum())
        return total / max(1, residual.numel())


def _grouped(states: Tensor, groups: int) -> Tensor:
    """`[kv_heads, rows, head_dim]` to `[groups, rows, heads of a group * head_dim]`."""
    kv_heads, rows, head_dim = states.shape
    grouped = states.reshape(groups, kv_heads // groups, rows, head_dim)
    return grouped.transpose(1, 2).reshape(groups, rows, -1)


def _bytes_per_row(mapper: KVMapper, tasks: Sequence[Task]) -> int:
    config = mapper.config
    used = {(task.kind, layer) for task in tasks for layer in config.selection[task.layer]}
    numbers = len(used) * config.source.kv_dim + len(tasks) * config.target.kv_dim
    return numbers * torch.float32.itemsize


def _parts(sequences: Sequence[Tensor], rows: int) -> list[list[Tensor]]:
    """The sequences in parts of at most so many tokens, and at least one sequence."""
    parts: list[list[Tensor]] = [[]]
    held = 0
    for ids in sequences:
        if parts[-1] and held + len(ids) > rows:
            parts.append([])
            held = 0
        parts[-1].append(ids)
        held += len(ids)
    return parts
