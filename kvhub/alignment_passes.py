"""The passes over text that `kvhub.alignment` makes: of the keys' fit, and of the values' fit.

The first tokens, the sink, are exact in a hand-off and mapped in engines, so both fits count them
on their own and the others as if they were exact. Whatever is not better on held-out sequences
keeps the weights that it started from.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.alignment_reading import Reading
from kvhub.alignment_rows import Layer, Rows, key_rows, map_layer, value_rows
from kvhub.alignment_state import AlignmentState
from kvhub.calibration import HELD_OUT_EVERY, reduce_moments, sum_over_ranks
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

__all__ = ["MEMORY_BYTES", "align_keys", "align_values"]

# Of the sums that are kept at once, and as much of the models' states. More target layers than fit
# take passes of their own, and more text is run through the models in each pass.
MEMORY_BYTES = 4 * 2**30

KEYS = ("key_weight", "key_bias")


def align_keys(
    mapper: KVMapper,
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    token_batches: Iterable[TokenBatch],
    *,
    exact_prefix: int = EXACT_PREFIX,
    steps: int = STEPS,
    held_out_every: int = HELD_OUT_EVERY,
    memory_bytes: int = MEMORY_BYTES,
    checkpoint: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[KVMapper]:
    """The mapper after each step of the keys' descent (`kvhub.key_fit`), in `steps` + 2 passes.

    Parameters
    ----------
    mapper
        From `fit`, for these two models.
    source_model, target_model
        Two causal language models of transformers with one tokenizer.
    token_batches
        Read once per pass, so a list and not a generator; padded on the right. Under `torchrun`,
        each rank's own share.
    exact_prefix
        Tokens at the start that hand-offs compute themselves.
    steps
        Of the descent, at least one.
    held_out_every
        Every n-th sequence is kept apart, as in `calibrate`.
    memory_bytes
        Bound on the sums kept at once, but at least one target layer's; and on the states that are
        kept from one pass to the next.
    checkpoint
        A file that is written whenever some layers are done. If it exists, its part is not done
        again. The caller deletes it once the result is safe.
    progress
        Called with (batches done in all passes, batches in all or 0 where unknown).

    Returns
    -------
    mappers
        In the dtype of the old one, on the CPU; values are as they were.
        `config.ridge["alignment"]` says how each was made and `config.quality["alignment"]` has, of
        each layer, the relative held-out error of the attention output before and after, to first
        order.

    Raises
    ------
    IncompatiblePairError
        The mapper is one of other models.
    UsageError
        The mapper has networks, the batches can be read only once, no sequence is left to fit or
        held out, or `steps` is not positive.
    VerificationError
        A cache is not finite, or the checkpoint is not whole.
    ConflictError
        The checkpoint belongs to another mapper or other settings.
    """
    if steps < 1:
        raise UsageError(f"The keys' descent takes at least one step; found {steps}.")
    _require(mapper, source_model, target_model, token_batches)
    how = {"exact_prefix": exact_prefix, "held_out_every": held_out_every}
    before = _on_cpu(mapper)
    after = {
        f"{name}.{step}": before[name].clone() for name in KEYS for step in range(1, steps + 1)
    }
    state = AlignmentState.start(mapper, {**how, "steps": steps}, after, checkpoint)
    parts = _parts(mapper.config, "keys", memory_bytes, len(state.errors))
    # For the weights of the tokens, for the gradient, and for each step.
    reading = Reading(
        mapper.config,
        source_model,
        target_model,
        token_batches,
        memory_bytes,
        held_out_every,
        (2 + steps) * len(parts),
        progress,
    )
    for layers in parts:
        state.errors += _align_keys(reading, before, state.tensors, layers, exact_prefix, steps)
        if checkpoint is not None:
            state.save(checkpoint)
    found = []
    for step in range(1, steps + 1):
        tensors = {**before, **{name: state.tensors[f"{name}.{step}"] for name in KEYS}}
        errors = [[error[0], error[step]] for error in state.errors]
        made = {**how, "key_steps": step, "value_share": 0.0}
        found.append(_aligned(mapper, tensors, made, {"keys": errors}))
    return found


def align_values(
    mapper: KVMapper,
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    token_batches: Iterable[TokenBatch],
    *,
    exact_prefix: int = EXACT_PREFIX,
    held_out_every: int = HELD_OUT_EVERY,
    memory_bytes: int = MEMORY_BYTES,
    checkpoint: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> KVMapper:
    """The mapper with values that are fitted to its keys (`kvhub.value_fit`), in one pass.

    Parameters and errors are those of `align_keys`. The mapper is in the dtype of the old one, on
    the CPU; its keys are as they were, and `config.quality["alignment"]` has, of each layer, the
    relative held-out error of what the target reads, before and after.
    """
    _require(mapper, source_model, target_model, token_batches)
    how = {
        "exact_prefix": exact_prefix,
        "held_out_every": held_out_every,
        "lambdas": list(LAMBDAS),
    }
    state = AlignmentState.start(mapper, how, _on_cpu(mapper), checkpoint)
    parts = _parts(mapper.config, "values", memory_bytes, len(state.errors))
    reading = Reading(
        mapper.config,
        source_model,
        target_model,
        token_batches,
        memory_bytes,
        held_out_every,
        len(parts),
        progress,
    )
    for layers in parts:
        state.errors += _align_values(reading, state.tensors, layers, exact_prefix)
        if checkpoint is not None:
            state.save(checkpoint)
    return _aligned(mapper, state.tensors, {**how, "value_share": 1.0}, {"values": state.errors})


def _require(
    mapper: KVMapper,
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    token_batches: Iterable[TokenBatch],
) -> None:
    """Raise unless the mapper is one of these models, is linear, and the text can be read again."""
    require_same(mapper.config.source, ModelSpec.from_model(source_model), "source")
    require_same(mapper.config.target, ModelSpec.from_model(target_model), "target")
    if mapper.config.repair is not None:
        raise UsageError(
            "This mapper has networks beside its linear map; aligning would leave them wrong.",
            "Align first, then repair.",
        )
    if iter(token_batches) is token_batches:
        raise UsageError(
            "Aligning reads the text more than once; found an iterator, which can be read once.",
            "Pass a list: list(token_batches).",
        )


def _on_cpu(mapper: KVMapper) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in mapper.tensors().items()}


def _aligned(
    mapper: KVMapper, tensors: dict[str, Tensor], how: dict[str, Any], errors: dict[str, Any]
) -> KVMapper:
    """The mapper with other tensors, and with what is known about them."""
    ridge, quality = mapper.config.ridge, mapper.config.quality
    how = {**ridge.get("alignment", {}), **how}
    errors = {**quality.get("alignment", {}), **errors}
    ridge, quality = {**ridge, "alignment": how}, {**quality, "alignment": errors}
    return KVMapper(replace(mapper.config, ridge=ridge, quality=quality), tensors)


def _parts(config: MapperConfig, kind: str, memory_bytes: int, done: int) -> list[range]:
    """Which target layers are fitted at once, of those that are not done."""
    groups, features, outputs = _shape(config, kind)
    # Moments of two halves of the text; of the keys a factor and the vectors of the descent.
    numbers = 2 * groups * features * (features + (4 if kind == "keys" else 1) * outputs)
    step = max(1, memory_bytes // (numbers * torch.float64.itemsize))
    layers = config.target.num_layers
    return [range(start, min(start + step, layers)) for start in range(done, layers, step)]


def _shape(config: MapperConfig, kind: str) -> tuple[int, int, int]:
    """Groups, features and outputs of a layer's regression."""
    target = config.target
    _, groups, features, outputs = tensor_shapes(config)["key_weight"]
    if kind == "keys":
        return groups, features, outputs
    # What a query reads depends on its head even where the features do not; and the mass.
    return target.kv_heads, features + 1, target.head_dim


def _align_keys(
    reading: Reading,
    start: dict[str, Tensor],
    found: dict[str, Tensor],
    layers: range,
    exact_prefix: int,
    steps: int,
) -> list[list[float]]:
    """Put the layers' keys of each step into `found`; the held-out error before and after each."""
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
        weight, bias = (start[name][index].to(device, torch.float64) for name in KEYS)
        descents[index] = Descent(weight, bias, moments.pop(index), head_dim)

    def gather(index: int, layer: Layer, states: dict[str, Tensor], held_out: Tensor) -> None:
        descents[index].add(layer, states["keys"], held_out, heads, rope, exact_prefix)

    errors: list[list[float]] = [[] for _ in layers]
    for step in range(1 + steps):
        reading.once(layers, gather)
        for index, error in zip(layers, errors, strict=True):
            descents[index].step()
            *weights, held_out = descents[index].result()
            error.append(held_out)
            if step > 0:
                for name, weight in zip(KEYS, weights, strict=True):
                    found[f"{name}.{step}"][index].copy_(weight)
    return errors


def _align_values(
    reading: Reading, tensors: dict[str, Tensor], layers: range, exact_prefix: int
) -> list[list[float]]:
    """Put the layers' new values in; of each the held-out error before and after."""
    config, device = reading.config, reading.target_model.device
    rope = config.target.require_rope()
    shape = _shape(config, "values")
    moments = {
        index: (Moments.zeros(*shape, device), Moments.zeros(*shape, device)) for index in layers
    }

    def gather(index: int, layer: Layer, states: dict[str, Tensor], held_out: Tensor) -> None:
        weight, bias = (tensors[name][index].to(device) for name in KEYS)
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
        weight, bias = (tensors[f"value_{part}"][index] for part in ("weight", "bias"))
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
