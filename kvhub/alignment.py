"""Fit a mapper again, to what the target reads from its cache instead of to the cache itself.

The plain fit (`kvhub.ridge`) wants every cached number alike. What matters is the attention output,
so a second and a third pass over text fit, still in closed form and at the same size,

1. the keys, each token weighted by how far an error in its key moves the attention output;
2. the values, so that what the target reads with the new keys in place is what it would have read.

The first tokens, the sink, are taken for exact there: a hand-off computes them itself. Where they
are mapped as well, as engines do, an aligned mapper is worse than a plain one, so it is not for
them. `kvhub.alignment_rows` has the equations. Every regression chooses its penalty on held-out
sequences, and keeps the weights that it started from where none is better there.
"""

from collections.abc import Callable, Iterable, Sized
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvhub.alignment_rows import KEY_EFFECTIVE_SHARE, Layer, Rows, key_rows, map_layer, value_rows
from kvhub.alignment_state import AlignmentState
from kvhub.attention import observe_attention
from kvhub.calibration import HELD_OUT_EVERY, content_states, reduce_moments
from kvhub.compatibility import require_same
from kvhub.data import TokenBatch
from kvhub.errors import UsageError
from kvhub.exact import EXACT_PREFIX
from kvhub.mapper import KVMapper
from kvhub.mapper_config import MapperConfig, tensor_shapes
from kvhub.moments import Block, Moments
from kvhub.ridge import regress, solve_ridge
from kvhub.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LAMBDAS", "MEMORY_BYTES", "align", "fit_keys", "fit_values"]

# Penalties that are tried, relative to the mean diagonal of the regression's matrix.
LAMBDAS = (1e-4, 1e-3, 1e-2, 1e-1)
# Of the sums that are kept at once; more target layers than fit take passes of their own.
MEMORY_BYTES = 4 * 2**30
STAGES = ("keys", "values")


def align(
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
    held_out_every
        Every n-th sequence is kept apart, as in `calibrate`.
    memory_bytes
        Bound on the sums kept at once, but at least one target layer's.
    checkpoint
        A file that is written after each pass. If it exists, its passes are not made again.
    progress
        Called with (batches done in all passes, batches in all or 0 where unknown).

    Returns
    -------
    mapper
        In the dtype of the old one, on the CPU. `config.ridge["alignment"]` says how it was made
        and `config.quality["alignment"]` has the relative held-out error of each regression before
        and after.

    Raises
    ------
    IncompatiblePairError
        The mapper is one of other models.
    UsageError
        The mapper has networks, the batches can be read only once, or no sequence is left to fit
        or held out.
    VerificationError
        A cache is not finite.
    ConflictError
        The checkpoint belongs to another mapper. The caller deletes it once the result is safe.
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
    state = AlignmentState.start(mapper)
    if checkpoint is not None and checkpoint.is_file():
        state = AlignmentState.resume(checkpoint, mapper)
    passes = _passes(config, memory_bytes)
    done = 0
    for stage, layers in passes:
        if layers.start < len(state.errors[stage]):
            continue
        running = _Pass(config, state, stage, layers, exact_prefix, held_out_every)
        left = sum(start.start >= len(state.errors[kind]) for kind, start in passes)
        total = done + len(token_batches) * left if isinstance(token_batches, Sized) else 0
        for batch in token_batches:
            running.add(source_model, target_model, batch)
            done += 1
            if progress is not None:
                progress(done, total)
        for layer in layers:
            state.errors[stage].append(running.solve(layer))
        if checkpoint is not None:
            state.save(checkpoint, mapper)
    how = {
        "exact_prefix": exact_prefix,
        "held_out_every": held_out_every,
        "lambdas": list(LAMBDAS),
        "key_effective_share": KEY_EFFECTIVE_SHARE,
    }
    return KVMapper(
        replace(
            config,
            ridge={**config.ridge, "alignment": how},
            quality={**config.quality, "alignment": state.errors},
        ),
        state.tensors,
    )


def _passes(config: MapperConfig, memory_bytes: int) -> list[tuple[str, range]]:
    """What is summed in each pass over the text: keys or values, of which target layers."""
    passes = []
    for stage in STAGES:
        groups, features, outputs = _shape(config, stage)
        layer_bytes = 2 * groups * features * (features + outputs) * torch.float64.itemsize
        step = max(1, memory_bytes // layer_bytes)
        for start in range(0, config.target.num_layers, step):
            passes.append((stage, range(start, min(start + step, config.target.num_layers))))
    return passes


def _shape(config: MapperConfig, stage: str) -> tuple[int, int, int]:
    """Groups, features and outputs of a layer's regression."""
    target = config.target
    _, groups, features, outputs = tensor_shapes(config)["key_weight"]
    if stage == "keys":
        return groups, features, outputs
    # What a query reads depends on its head even where the features do not; and the mass.
    return target.kv_heads, features + 1, target.head_dim


class _Pass:
    """The sums of one pass over the text."""

    def __init__(
        self,
        config: MapperConfig,
        state: AlignmentState,
        stage: str,
        layers: range,
        exact_prefix: int,
        held_out_every: int,
    ) -> None:
        self.config, self.state, self.stage, self.layers = config, state, stage, layers
        self.exact_prefix, self.held_out_every = exact_prefix, held_out_every
        # By target layer: of the rows to fit, and of those held out.
        self.moments: dict[int, tuple[Moments, Moments]] = {}

    def add(
        self, source_model: "PreTrainedModel", target_model: "PreTrainedModel", batch: TokenBatch
    ) -> None:
        """Add one batch: both models read it, and each of the pass's layers adds its rows."""
        source = content_states(source_model, batch, self.config.source)
        device = target_model.device
        mask = batch.attention_mask.to(device)
        ids = torch.tensor(batch.sequence_ids, device=device)
        held_out = ids % self.held_out_every == self.held_out_every - 1

        def observe(
            index: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
        ) -> None:
            if index not in self.layers:
                return
            chosen = torch.tensor(self.config.selection[index], device=source["keys"].device)
            states = {kind: source[kind].index_select(0, chosen).to(device) for kind in source}
            layer = Layer(queries, keys, values, scaling, mask)
            for rows in self._rows(index, layer, states):
                self._update(index, rows, held_out)

        with observe_attention(target_model, observe):
            content_states(target_model, batch, self.config.target)

    def _rows(self, index: int, layer: Layer, states: dict[str, Tensor]) -> Iterable[Rows]:
        heads, rope = self.config.heads, self.config.target.require_rope()
        if self.stage == "keys":
            return [key_rows(layer, states["keys"], heads, rope)]
        weights = self.state.tensors["key_weight"][index].to(layer.keys.device)
        bias = self.state.tensors["key_bias"][index].to(layer.keys.device)
        shape = (len(layer.keys), self.config.target.head_dim)
        mapped = map_layer(states["keys"], weights, bias, heads, *shape, rope)
        return value_rows(layer, mapped, states["values"], heads, self.exact_prefix)

    def _update(self, index: int, rows: Rows, held_out: Tensor) -> None:
        if index not in self.moments:
            device = rows.features.device
            shape = _shape(self.config, self.stage)
            self.moments[index] = (Moments.zeros(*shape, device), Moments.zeros(*shape, device))
        for moments, which in zip(self.moments[index], (~held_out, held_out), strict=True):
            chosen = which[rows.sequences]
            weights = None if rows.weights is None else rows.weights[chosen]
            moments.update(rows.features[chosen], rows.outputs[chosen], weights)

    def solve(self, index: int) -> list[float]:
        """Put a layer's new weights into the state; its held-out error before and after."""
        fitted, held_out = self.moments.pop(index)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            reduce_moments(fitted)
            reduce_moments(held_out)
        if fitted.tokens == 0 or held_out.tokens == 0:
            raise UsageError(
                f"{fitted.tokens} rows to fit and {held_out.tokens} held out; both must be above "
                "0.",
                f"Give at least {self.held_out_every} sequences of more than {self.exact_prefix} "
                "tokens.",
            )
        name = self.stage[:-1]
        weight = self.state.tensors[f"{name}_weight"][index]
        bias = self.state.tensors[f"{name}_bias"][index]
        blocks = (_block(fitted), _block(held_out))
        old_weight, old_bias = (part.double().to(blocks[0].gram.device) for part in (weight, bias))
        if self.stage == "keys":
            new_weight, new_bias, errors = fit_keys(*blocks, old_weight, old_bias)
        else:
            new_weight, new_bias, errors = fit_values(*blocks, old_weight, old_bias)
        weight.copy_(new_weight)
        bias.copy_(new_bias)
        return errors


def fit_keys(
    fitted: Block, held_out: Block, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, list[float]]:
    """The best of the old weights and one ridge regression per penalty; errors before and after.

    `weight` is `[groups, features, outputs]` and `bias` `[groups, outputs]`, as the result's.
    """
    fits = [(weight, bias), *(regress(fitted, ridge, "relative") for ridge in LAMBDAS)]
    total = held_out.target_square.sum(1)
    (new_weight, new_bias), errors = _best(fits, held_out, total)
    return new_weight, new_bias, errors


def fit_values(
    fitted: Block, held_out: Block, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, list[float]]:
    """As `fit_keys`, for rows of `value_rows`, whose groups are KV heads and last feature the mass.

    No penalty on the bias: with g the last row of the matrix X^T X, which is not centred, and c
    that of X^T Y, the weights are those of X^T X - g g^T / g_mass and X^T Y - g c^T / g_mass, and
    b = (c - g^T W) / g_mass.
    """
    heads = len(fitted.gram)
    # `all` heads: [1, features, heads * outputs] to [heads, features, outputs]
    features = weight.shape[1]
    by_head = weight.view(len(weight), features, heads // len(weight), -1)
    by_head = by_head.movedim(2, 1).flatten(0, 1)
    old = torch.cat([by_head, bias.view(heads, 1, -1)], dim=1)

    mean, target = fitted.source_mean[..., None], fitted.target_mean[:, None]
    rows = fitted.weight[:, None, None]
    gram = fitted.gram + rows * mean @ mean.mT
    cross = fitted.cross + rows * mean @ target
    mass = gram[:, -1:, -1:]
    reduced = gram[:, :-1, :-1] - gram[:, :-1, -1:] @ gram[:, -1:, :-1] / mass
    right = cross[:, :-1] - gram[:, :-1, -1:] @ cross[:, -1:] / mass
    scale = reduced.diagonal(dim1=-2, dim2=-1).mean(-1)
    fits = [old]
    for ridge in LAMBDAS:
        found = solve_ridge(reduced, right, ridge * scale)
        found_bias = (cross[:, -1:] - gram[:, -1:, :-1] @ found) / mass
        fits.append(torch.cat([found, found_bias], dim=1))
    zero = torch.zeros_like(held_out.target_mean)
    total = (held_out.target_square + held_out.weight[:, None] * held_out.target_mean**2).sum(1)
    (best, _), errors = _best([(fit, zero) for fit in fits], held_out, total)
    new_weight = best[:, :features].reshape(len(weight), heads // len(weight), features, -1)
    new_weight = new_weight.movedim(1, 2).flatten(2)
    return new_weight, best[:, features].reshape(bias.shape), errors


def _best(
    fits: list[tuple[Tensor, Tensor]], held_out: Block, total: Tensor
) -> tuple[tuple[Tensor, Tensor], list[float]]:
    """Of each group the fit with the least held-out error; that of the first and of the best."""
    errors = torch.stack([held_out.residual_square(*fit).sum(1) for fit in fits])
    index = errors.argmin(0)
    groups = torch.arange(len(index), device=index.device)
    weight, bias = (torch.stack(parts)[index, groups] for parts in zip(*fits, strict=True))
    total = total.sum()
    return (weight, bias), [float(errors[0].sum() / total), float(errors.amin(0).sum() / total)]


def _block(moments: Moments) -> Block:
    """All of the moments as one regression per group."""
    return Block(**{item.name: getattr(moments, item.name) for item in fields(Block)})
