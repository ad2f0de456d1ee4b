"""Fit a mapper again, to what the target reads from its cache instead of to the cache itself.

The plain fit (`kvhub.ridge`) wants every cached number alike. What matters is the attention output,
so further passes over text fit, at the same size,

1. the keys, so that all their errors together move the attention output least (`kvhub.key_fit`);
2. the values, so that what the target reads with the new keys in place is what it would have read
   (`kvhub.value_fit`).

The first tokens, the sink, are exact in a hand-off and mapped in engines, so both fits count them
on their own and the others as if they were exact. Whatever is not better on held-out sequences
keeps the weights that it started from.
"""

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvhub.alignment_rows import Layer, Rows, key_rows, map_layer, value_rows
from kvhub.alignment_state import AlignmentState
from kvhub.attention import observe_attention
from kvhub.calibration import HELD_OUT_EVERY, content_states, reduce_moments, sum_over_ranks
from kvhub.compatibility import require_same
from kvhub.data import TokenBatch
from kvhub.errors import UsageError
from kvhub.exact import EXACT_PREFIX
from kvhub.key_fit import STEPS, Descent
from kvhub.mapper import KVMapper
from kvhub.mapper_config import MapperConfig, tensor_shapes
from kvhub.moments import Block, Moments
from kvhub.spec import ModelSpec
from kvhub.value_fit import LAMBDAS, fit_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["MEMORY_BYTES", "align"]

# Of the sums that are kept at once, and as much of the models' states. More target layers than fit
# take passes of their own, and more text is run through the models in each pass.
MEMORY_BYTES = 4 * 2**30
STAGES = ("keys", "values")

Visit = Callable[[int, Layer, dict[str, Tensor], Tensor], None]


def align(
    mapper: KVMapper,
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    token_batches: Iterable[TokenBatch],
    *,
    exact_prefix: int = EXACT_PREFIX,
    key_steps: int = STEPS,
    held_out_every: int = HELD_OUT_EVERY,
    memory_bytes: int = MEMORY_BYTES,
    checkpoint: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> KVMapper:
    """A mapper of the same shape, fitted to the target's attention output.

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
    exact_prefix
        Tokens at the start that hand-offs compute themselves.
    key_steps
        Of the keys' descent, each a pass over the text; with 0 the keys stay as they are.
    held_out_every
        Every n-th sequence is kept apart, as in `calibrate`.
    memory_bytes
        Bound on the sums kept at once, but at least one target layer's; and on the states that are
        kept from one pass to the next.
    checkpoint
        A file that is written whenever the keys or the values of some layers are done. If it
        exists, its part is not done again.
    progress
        Called with (batches done in all passes, batches in all or 0 where unknown).

    Returns
    -------
    mapper
        In the dtype of the old one, on the CPU. `config.ridge["alignment"]` says how it was made
        and `config.quality["alignment"]` has the relative held-out error of each layer's attention
        output before and after: of the keys, to first order, and of the values.

    Raises
    ------
    IncompatiblePairError
        The mapper is one of other models.
    UsageError
        The mapper has networks, the batches can be read only once, no sequence is left to fit or
        held out, or `key_steps` is negative.
    VerificationError
        A cache is not finite.
    ConflictError
        The checkpoint belongs to another mapper or other settings. The caller deletes it once the
        result is safe.
    """
    config = mapper.config
    require_same(config.source, ModelSpec.from_model(source_model), "source")
    require_same(config.target, ModelSpec.from_model(target_model), "target")
    if config.repair is not None:
        raise UsageError(
            "This mapper has networks beside its linear map; aligning would leave them wrong.",
            "Align first, then repair.",
        )
    if iter(token_batches) is token_batches:
        raise UsageError(
            "Aligning reads the text more than once; found an iterator, which can be read once.",
            "Pass a list: list(token_batches).",
        )
    if key_steps < 0:
        raise UsageError(f"key_steps must not be negative; found {key_steps}.")
    how = {
        "exact_prefix": exact_prefix,
        "held_out_every": held_out_every,
        "key_steps": key_steps,
        "lambdas": list(LAMBDAS),
    }
    state = AlignmentState.start(mapper, how)
    if checkpoint is not None and checkpoint.is_file():
        state = AlignmentState.resume(checkpoint, mapper, how)
    left = [
        (stage, layers)
        for stage, layers in _parts(config, memory_bytes)
        if layers.start >= len(state.errors[stage])
    ]
    batches = len(token_batches) if isinstance(token_batches, Sized) else 0
    # Of the keys for their weights, the gradient and each step.
    passes = {"keys": 2 + key_steps, "values": 1}
    total = batches * sum(passes[stage] for stage, _ in left)
    reading = _Reading(
        config,
        source_model,
        target_model,
        token_batches,
        held_out_every,
        memory_bytes,
        total,
        progress,
    )
    for stage, layers in left:
        if stage == "keys":
            errors = _align_keys(reading, state, layers, exact_prefix, key_steps)
        else:
            errors = _align_values(reading, state, layers, exact_prefix)
        state.errors[stage] += errors
        if checkpoint is not None:
            state.save(checkpoint)
    return KVMapper(
        replace(
            config,
            ridge={**config.ridge, "alignment": how},
            quality={**config.quality, "alignment": state.errors},
        ),
        state.tensors,
    )


def _parts(config: MapperConfig, memory_bytes: int) -> list[tuple[str, range]]:
    """What is fitted at once: keys or values, of which target layers."""
    parts = []
    for stage in STAGES:
        groups, features, outputs = _shape(config, stage)
        # Moments of two halves of the text; of the keys a factor and the vectors of the descent.
        numbers = 2 * groups * features * (features + (4 if stage == "keys" else 1) * outputs)
        step = max(1, memory_bytes // (numbers * torch.float64.itemsize))
        for start in range(0, config.target.num_layers, step):
            parts.append((stage, range(start, min(start + step, config.target.num_layers))))
    return parts


def _shape(config: MapperConfig, stage: str) -> tuple[int, int, int]:
    """Groups, features and outputs of a layer's regression."""
    target = config.target
    _, groups, features, outputs = tensor_shapes(config)["key_weight"]
    if stage == "keys":
        return groups, features, outputs
    # What a query reads depends on its head even where the features do not; and the mass.
    return target.kv_heads, features + 1, target.head_dim


@dataclass(frozen=True)
class _Seen:
    """A batch as both models have it.

    Attributes
    ----------
    source
        `[source layers, kv_heads, batch * tokens, head_dim]` content keys and values.
    target
        By target layer.
    held_out
        `[batch]`: which sequences are held out.
    """

    source: dict[str, Tensor]
    target: dict[int, Layer]
    held_out: Tensor

    @property
    def size_bytes(self) -> int:
        tensors = list(self.source.values())
        for layer in self.target.values():
            tensors += [layer.queries, layer.keys, layer.values]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Reading:
    """The text, read by both models as often as it is asked for.

    As many batches as fit into `memory_bytes` are kept from one pass to the next over the same
    layers, so that a short text is run through the models once.
    """

    def __init__(
        self,
        config: MapperConfig,
        source_model: "PreTrainedModel",
        target_model: "PreTrainedModel",
        batches: Iterable[TokenBatch],
        held_out_every: int,
        memory_bytes: int,
        total: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.config, self.batches = config, batches
        self.source_model, self.target_model = source_model, target_model
        self.held_out_every, self.memory_bytes = held_out_every, memory_bytes
        self.total, self.progress, self.done = total, progress, 0
        self.layers = range(0)
        self.kept: dict[int, _Seen] = {}
        self.kept_bytes = 0

    def once(self, layers: range, visit: Visit) -> None:
        """Call `visit(target layer, what it sees, source states, [batch] held out)` for each."""
        if layers != self.layers:
            self.layers, self.kept, self.kept_bytes = layers, {}, 0
        for index, batch in enumerate(self.batches):
            seen = self.kept.get(index) or self._read(batch)
            size = seen.size_bytes
            if index not in self.kept and self.kept_bytes + size <= self.memory_bytes:
                self.kept[index] = seen
                self.kept_bytes += size
            for number, layer in seen.target.items():
                device = seen.source["keys"].device
                chosen = torch.tensor(self.config.selection[number], device=device)
                states = {
                    kind: seen.source[kind].index_select(0, chosen).to(layer.keys.device)
                    for kind in seen.source
                }
                visit(number, layer, states, seen.held_out)
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.total)

    def _read(self, batch: TokenBatch) -> _Seen:
        device = self.target_model.device
        mask = batch.attention_mask.to(device)
        ids = torch.tensor(batch.sequence_ids, device=device)
        target: dict[int, Layer] = {}

        def observe(
            index: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
        ) -> None:
            if index in self.layers:
                target[index] = Layer(queries, keys, values, scaling, mask)

        with observe_attention(self.target_model, observe):
            content_states(self.target_model, batch, self.config.target)
        source = content_states(self.source_model, batch, self.config.source)
        return _Seen(source, target, ids % self.held_out_every == self.held_out_every - 1)

    def require_both(self, fitted: float, held_out: float, exact_prefix: int) -> None:
        """Raise unless there is text to fit and text held out."""
        if fitted == 0 or held_out == 0:
            raise UsageError(
                f"Nothing to fit or nothing held out: expected both, found {fitted:.0f} and "
                f"{held_out:.0f} rows.",
                f"Give at least {self.held_out_every} sequences of more than {exact_prefix} "
                "tokens.",
            )


def _align_keys(
    reading: _Reading, state: AlignmentState, layers: range, exact_prefix: int, key_steps: int
) -> list[list[float]]:
    """Put the layers' new keys into the state; of each the held-out error before and after."""
    config, device = reading.config, reading.target_model.device
    heads, rope, head_dim = config.heads, config.target.require_rope(), config.target.head_dim
    groups, features, _ = _shape(config, "keys")
    moments = {index: Moments.zeros(groups, features, 0, device) for index in layers}
    held_out_rows = torch.zeros(len(layers))

    def weigh(index: int, layer: Layer, states: dict[str, Tensor], held_out: Tensor) -> None:
        rows = key_rows(layer, states["keys"], heads)
        _update(moments[index], rows, ~held_out)
        held_out_rows[index - layers.start] += held_out[rows.sequences].sum().cpu()

    reading.once(layers, weigh)
    sum_over_ranks(held_out_rows)
    for each in moments.values():
        reduce_moments(each)
    reading.require_both(moments[layers.start].tokens, float(held_out_rows[0]), exact_prefix)

    descents: dict[int, Descent] = {}
    for index in layers:
        weight, bias = (
            state.tensors[f"key_{part}"][index].to(device, torch.float64)
            for part in ("weight", "bias")
        )
        descents[index] = Descent(weight, bias, moments.pop(index), head_dim)

    def gather(index: int, layer: Layer, states: dict[str, Tensor], held_out: Tensor) -> None:
        descents[index].add(layer, states["keys"], held_out, heads, rope, exact_prefix)

    for _ in range(1 + key_steps):
        reading.once(layers, gather)
        for index in layers:
            descents[index].step()

    errors = []
    for index in layers:
        weight, bias, error = descents[index].result()
        state.tensors["key_weight"][index].copy_(weight)
        state.tensors["key_bias"][index].copy_(bias)
        errors.append(error)
    return errors


def _align_values(
    reading: _Reading, state: AlignmentState, layers: range, exact_prefix: int
) -> list[list[float]]:
    """Put the layers' new values into the state; of each the held-out error before and after."""
    config, device = reading.config, reading.target_model.device
    rope = config.target.require_rope()
    shape = _shape(config, "values")
    moments = {
        index: (Moments.zeros(*shape, device), Moments.zeros(*shape, device)) for index in layers
    }

    def gather(index: int, layer: Layer, states: dict[str, Tensor], held_out: Tensor) -> None:
        weight, bias = (
            state.tensors[f"key_{part}"][index].to(device) for part in ("weight", "bias")
        )
        size = (len(layer.keys), config.target.head_dim)
        mapped = map_layer(states["keys"], weight, bias, config.heads, *size, rope)
        for rows in value_rows(layer, mapped, states["values"], config.heads, exact_prefix):
            for each, which in zip(moments[index], (~held_out, held_out), strict=True):
                _update(each, rows, which)

    reading.once(layers, gather)
    errors = []
    for index in layers:
        fitted, held_out = moments.pop(index)
        reduce_moments(fitted)
        reduce_moments(held_out)
        reading.require_both(fitted.tokens, held_out.tokens, exact_prefix)
        weight, bias = (state.tensors[f"value_{part}"][index] for part in ("weight", "bias"))
        old = (part.to(device, torch.float64) for part in (weight, bias))
        new_weight, new_bias, error = fit_values(_block(fitted), _block(held_out), *old)
        weight.copy_(new_weight)
        bias.copy_(new_bias)
        errors.append(error)
    return errors


def _update(moments: Moments, rows: Rows, which: Tensor) -> None:
    """Add the rows of some sequences."""
    chosen = which[rows.sequences]
    weights = None if rows.weights is None else rows.weights[chosen]
    moments.update(rows.features[chosen], rows.outputs[chosen], weights)


def _block(moments: Moments) -> Block:
    """All of the moments as one regression per group."""
    return Block(**{item.name: getattr(moments, item.name) for item in fields(Block)})
