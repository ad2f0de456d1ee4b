"""How near a mapped cache is to the target's own cache, streamed over sequences.

For keys K (content space) or values V of a target layer, with the mapped ones marked ^:

    R2 = 1 - sum |K^ - K|^2 / sum |K - mean K|^2

and, following the paper's analysis of where errors sit (section on error placement), with the
query matrix Q = U S W^T of a KV head and the attention a that its queries pay to token t:

    key placement   = [sum_i s_i^2 |(K^ - K) w_i|^2 / sum_i s_i^2] / mean_i |(K^ - K) w_i|^2
    value placement = [sum_t (sum a^2)_t |V^_t - V_t|^2 / sum_t (sum a^2)_t] / mean_t |V^_t - V_t|^2

The numerator of the first is tr(Q^T Q E^T E) / tr(Q^T Q) for an error matrix E, so no singular
vectors are needed. Both are in rotated space, as the scores are, with Q the queries of a sequence
after its prefix, and their numerators and denominators are summed over sequences.
"""

import torch
from torch import Tensor

from kvhub.attention import attention_weights
from kvhub.errors import VerificationError
from kvhub.report import Fidelity, PositionBin
from kvhub.rope import strip_rope
from kvhub.spec import ModelSpec

__all__ = ["FidelityMeter"]

KINDS = ("keys", "values")
POSITION_BINS = 32  # positions 0, 1, 2-3, 4-7, ...


class FidelityMeter:
    """Sums of errors per target layer; memory does not grow with sequences.

    Parameters
    ----------
    target
        The spec of the target model.
    """

    def __init__(self, target: ModelSpec) -> None:
        layers, kv_heads = target.num_layers, target.kv_heads
        self._rope = target.require_rope()
        self._variance = {kind: _Variance(layers, kv_heads, target.head_dim) for kind in KINDS}
        self._error = {kind: _zeros(layers, kv_heads) for kind in KINDS}
        # Numerator and denominator, summed over sequences.
        self._placement = {kind: _zeros(2, layers, kv_heads) for kind in KINDS}
        # Squared error and squared norm.
        self._by_position = {kind: _zeros(2, layers, POSITION_BINS) for kind in KINDS}
        self._cosine = _zeros(layers, target.attention_heads)
        self._queries = _zeros(layers)
        self._longest = 0

    def update(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mapped_keys: Tensor,
        mapped_values: Tensor,
        scaling: float,
    ) -> Tensor:
        """Add one target layer of a batch of sequences without padding, positions from 0.

        Parameters
        ----------
        layer
            Target layer.
        queries
            `[batch, attention_heads, tokens, head_dim]`, rotated space, the target's own.
        keys, values
            `[batch, kv_heads, tokens, head_dim]`, the target's own; keys in rotated space.
        mapped_keys, mapped_values
            `[batch, kv_heads, prefix, head_dim]` with `prefix` < `tokens`; keys in rotated space.
        scaling
            Factor on the attention scores.

        Returns
        -------
        cosine
            `[batch]` float64: attention-output cosine, mean over heads and tokens after the prefix.
        """
        prefix = mapped_keys.shape[2]
        self._longest = max(self._longest, prefix)
        positions = torch.arange(prefix, device=keys.device)
        true = {"keys": keys[:, :, :prefix], "values": values[:, :, :prefix]}
        mapped = {"keys": mapped_keys, "values": mapped_values}
        for kind in KINDS:
            pair = [_wide(states[kind]) for states in (true, mapped)]
            if kind == "keys":
                pair = [
                    strip_rope(states, positions.to(states.device), self._rope) for states in pair
                ]
            self._add_error(kind, layer, *pair)

        later = queries[:, :, prefix:]
        cosine, reading = _compare_outputs(later, keys, values, mapped_keys, mapped_values, scaling)
        self._cosine[layer] += cosine.sum((0, 2)).cpu()
        self._queries[layer] += len(later) * later.shape[2]

        # Means over tokens, so that every sequence counts alike.
        error = (_wide(mapped_keys) - _wide(true["keys"])) / prefix**0.5
        grouped = _wide(later).reshape(*error.shape[:2], -1, error.shape[-1])
        looks, squares = grouped.mT @ grouped, error.mT @ error
        along = (looks * squares).sum((-1, -2)) / _trace(looks)
        self._add_placement("keys", layer, along, _trace(squares) / error.shape[-1])

        error = (_wide(mapped_values) - _wide(true["values"])).square().sum(-1)
        along = (reading * error).sum(-1) / reading.sum(-1)
        self._add_placement("values", layer, along, error.mean(-1))
        return cosine.mean((1, 2)).cpu()

    def _add_error(self, kind: str, layer: int, true: Tensor, mapped: Tensor) -> None:
        self._variance[kind].update(layer, true)
        error = (mapped - true).square().sum((0, 3)).cpu()  # [kv_heads, prefix]
        norm = true.square().sum((0, 3)).cpu()
        self._error[kind][layer] += error.sum(-1)
        bins = torch.tensor([position.bit_length() for position in range(error.shape[-1])])
        self._by_position[kind][0, layer].scatter_add_(0, bins, error.sum(0))
        self._by_position[kind][1, layer].scatter_add_(0, bins, norm.sum(0))

    def _add_placement(self, kind: str, layer: int, along: Tensor, mean: Tensor) -> None:
        self._placement[kind][0, layer] += along.sum(0).cpu()
        self._placement[kind][1, layer] += mean.sum(0).cpu()

    def result(self) -> Fidelity:
        """Return the figures of everything added so far.

        Raises
        ------
        VerificationError
            A sum is not finite, or a layer was never added.
        """
        sums = [self._cosine, *self._error.values(), *self._placement.values()]
        if not all(bool(torch.isfinite(part).all()) for part in sums):
            raise VerificationError(
                "The mapped cache or the target's own is not finite.",
                "Load the models in bfloat16 or float32.",
            )
        if bool((self._queries == 0).any()):
            missing = (self._queries == 0).nonzero()[:, 0].tolist()
            raise VerificationError(
                f"The target's layers {missing} never called an attention that can be observed.",
                "Use an architecture whose attention is part of transformers.",
            )
        total = {kind: self._variance[kind].square for kind in KINDS}
        cosine = self._cosine / self._queries[:, None]
        return Fidelity(
            key_r2=_floats(_r2(self._error["keys"].sum(-1), total["keys"].sum(-1))),
            value_r2=_floats(_r2(self._error["values"].sum(-1), total["values"].sum(-1))),
            key_r2_by_head=_rows(_r2(self._error["keys"], total["keys"])),
            value_r2_by_head=_rows(_r2(self._error["values"], total["values"])),
            attention_output_cosine=_floats(cosine.mean(-1)),
            attention_output_cosine_by_head=_rows(cosine),
            key_error_placement=_ratios(self._placement["keys"]),
            value_error_placement=_ratios(self._placement["values"]),
            positions=self._position_bins(),
            key_error_placement_by_head=_ratios_by_head(self._placement["keys"]),
            value_error_placement_by_head=_ratios_by_head(self._placement["values"]),
        )

    def _position_bins(self) -> tuple[PositionBin, ...]:
        errors = {}
        for kind in KINDS:
            error, norm = self._by_position[kind]
            relative = torch.where(norm > 0, error / norm, torch.nan).sqrt()
            errors[kind] = relative.nanmean(0).tolist()
        bins = []
        for index in range((self._longest - 1).bit_length() + 1):
            start = 0 if index == 0 else 2 ** (index - 1)
            bins.append(
                PositionBin(
                    start=start,
                    stop=min(2**index, self._longest),
                    key_error=errors["keys"][index],
                    value_error=errors["values"][index],
                )
            )
        return tuple(bins)


class _Variance:
    """Sum of squares about the mean per layer and head, by Chan's merge; offsets do no harm."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        self._rows = [0] * layers
        self._mean = _zeros(layers, kv_heads, head_dim)
        self.square = _zeros(layers, kv_heads)

    def update(self, layer: int, states: Tensor) -> None:
        """Add `[batch, kv_heads, tokens, head_dim]` float64."""
        rows = states.shape[0] * states.shape[2]
        mean = states.mean((0, 2))
        square = (states - mean[:, None]).square().sum((0, 2, 3)).cpu()
        total = self._rows[layer] + rows
        shift = mean.cpu() - self._mean[layer]
        self.square[layer] += square + shift.square().sum(-1) * (self._rows[layer] * rows / total)
        self._mean[layer] += shift * (rows / total)
        self._rows[layer] = total


def _compare_outputs(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mapped_keys: Tensor,
    mapped_values: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Attention over true and over mapped prefix, each followed by the true tokens after it.

    Returns
    -------
    cosine
        `[batch, attention_heads, query_tokens]` float64.
    reading
        `[batch, kv_heads, prefix]` float64: squared true attention that each prefix token gets.
    """
    prefix = mapped_keys.shape[2]
    mixed_keys = torch.cat([mapped_keys, keys[:, :, prefix:]], dim=2)
    mixed_values = torch.cat([mapped_values, values[:, :, prefix:]], dim=2)
    cosines = []
    reading = _wide(keys.new_zeros(mapped_keys.shape[:3]))
    for (_, true), (_, mapped) in zip(
        attention_weights(queries, keys, scaling),
        attention_weights(queries, mixed_keys, scaling),
        strict=True,
    ):
        outputs = true @ values[:, :, None].to(true.dtype)
        mixed = mapped @ mixed_values[:, :, None].to(mapped.dtype)
        cosines.append(_wide(torch.cosine_similarity(_wide(outputs), _wide(mixed), dim=-1)))
        reading += _wide(true[..., :prefix].square().sum((2, 3)))
    return torch.cat(cosines, dim=-1).flatten(1, 2), reading


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def _wide(states: Tensor) -> Tensor:
    """In float64; Apple GPUs have none."""
    return (states.cpu() if states.device.type == "mps" else states).to(torch.float64)


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def _r2(error: Tensor, total: Tensor) -> Tensor:
    return torch.where(total > 0, 1 - error / total, (error == 0).to(error.dtype))


def _ratios(placement: Tensor) -> tuple[float | None, ...]:
    """Mean over the heads that have an error, `[2, layers, kv_heads]` to `[layers]`."""
    along, mean = placement
    ratios = torch.where(mean > 0, along / mean, torch.nan).nanmean(-1)
    return _or_none(ratios.tolist())


def _ratios_by_head(placement: Tensor) -> tuple[tuple[float | None, ...], ...]:
    """`[2, layers, kv_heads]` to `[layers][kv_heads]`, None for a head without error."""
    along, mean = placement
    ratios = torch.where(mean > 0, along / mean, torch.nan)
    return tuple(_or_none(row) for row in ratios.tolist())


def _or_none(ratios: list[float]) -> tuple[float | None, ...]:
    return tuple(None if ratio != ratio else ratio for ratio in ratios)


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())


def _rows(values: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in values.tolist())
