"""Sums that regressions need, and nothing else of the data.

A `Moments` holds weighted first moments and centred second moments of source features x and
target features y, in float64. Two of them merge exactly (Chan, Golub and LeVeque 1983):

    G = G_a + G_b + (w_a w_b / (w_a + w_b)) d d^T      with d = mean_b - mean_a

so memory does not grow with tokens, large constant offsets do no harm, and parts from several
ranks or runs add up to what one run would have given.

Features come in groups. `heads="all"` has one group, whose features are every head of every
source layer; `heads="matched"` has one group per KV head. Within a group the order is
(layer, head, dim), so a source layer is one contiguous block of features.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kvhub.compatibility import Heads
from kvhub.errors import UsageError

__all__ = ["KINDS", "TENSORS", "Block", "Heads", "Moments", "group_features"]

KINDS = ("keys", "values")


def group_features(states: Tensor, heads: Heads) -> Tensor:
    """Lay out per-head states as grouped features.

    Parameters
    ----------
    states
        `[layers, kv_heads, tokens, head_dim]`, keys in content space or values.
    heads
        `all` puts every head into one group, `matched` makes a group of each head.

    Returns
    -------
    features
        `[tokens, groups, layers * heads_per_group * head_dim]` in the dtype of `states`.
    """
    layers, kv_heads, tokens, head_dim = states.shape
    groups = 1 if heads == "all" else kv_heads
    grouped = states.reshape(layers, groups, kv_heads // groups, tokens, head_dim)
    return grouped.permute(3, 1, 0, 2, 4).reshape(tokens, groups, -1)


@dataclass(frozen=True)
class Block:
    """The moments of one target layer on some source layers: one regression problem per group.

    Attributes
    ----------
    gram
        `[groups, features, features]`: sum of w (x - mean)(x - mean)^T.
    cross
        `[groups, features, outputs]`: sum of w (x - mean)(y - mean)^T.
    target_square
        `[groups, outputs]`: sum of w (y - mean)^2.
    source_mean, target_mean
        `[groups, features]` and `[groups, outputs]`.
    weight
        `[groups]`: sum of w.
    """

    gram: Tensor
    cross: Tensor
    target_square: Tensor
    source_mean: Tensor
    target_mean: Tensor
    weight: Tensor

    def residual_square(self, weights: Tensor, bias: Tensor) -> Tensor:
        """Sum of w (y - x W - b)^2 per output, `[groups, outputs]`.

        `weights` is `[groups, features, outputs]` and `bias` `[groups, outputs]`. They may come
        from other moments than these, which is how a fit is scored on held-out tokens.
        """
        offset = self.target_mean - torch.einsum("gf,gfo->go", self.source_mean, weights) - bias
        explained = ((self.gram @ weights - 2 * self.cross) * weights).sum(1)
        return self.target_square + explained + self.weight[:, None] * offset**2


@dataclass
class Moments:
    """Weighted centred second moments of grouped source and target features, in float64.

    Attributes
    ----------
    tokens
        How many rows were added.
    weight, weight_square
        `[groups]`: sums of the rows' weights and of their squares.
    source_mean, target_mean
        `[groups, features]` and `[groups, outputs]`.
    gram, cross, target_square
        As in `Block`, over all source and target layers.
    """

    tokens: int
    weight: Tensor
    weight_square: Tensor
    source_mean: Tensor
    target_mean: Tensor
    gram: Tensor
    cross: Tensor
    target_square: Tensor

    @classmethod
    def zeros(cls, groups: int, features: int, outputs: int, device: Any = "cpu") -> "Moments":
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        return cls(
            tokens=0,
            weight=zeros(groups),
            weight_square=zeros(groups),
            source_mean=zeros(groups, features),
            target_mean=zeros(groups, outputs),
            gram=zeros(groups, features, features),
            cross=zeros(groups, features, outputs),
            target_square=zeros(groups, outputs),
        )

    def to(self, device: Any) -> "Moments":
        """The same moments on a device."""
        moved = {name: getattr(self, name).to(device) for name in TENSORS}
        return replace(self, **moved)

    @property
    def effective_tokens(self) -> float:
        """Kish's effective sample size (sum w)^2 / sum w^2 of the worst group."""
        if self.tokens == 0:
            return 0.0
        return float((self.weight**2 / self.weight_square.clamp(min=1e-300)).min())

    def update(self, source: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Add rows in place.

        Parameters
        ----------
        source
            `[tokens, groups, features]`, any float dtype.
        target
            `[tokens, groups, outputs]`, any float dtype.
        weights
            `[tokens, groups]`, not negative; None weighs every row 1.
        """
        rows = source.shape[0]
        if rows == 0:
            return
        x = source.to(torch.float64).transpose(0, 1)
        y = target.to(torch.float64).transpose(0, 1)
        w = torch.ones_like(x[..., 0]) if weights is None else weights.to(x).T
        weight = w.sum(1)
        if not bool((weight > 0).all()):
            raise UsageError(
                "The weights of a block of tokens must not be negative and not all zero; "
                f"found sums {weight.tolist()}.",
                "Leave such tokens out.",
            )
        source_mean = torch.einsum("gt,gtf->gf", w, x) / weight[:, None]
        target_mean = torch.einsum("gt,gto->go", w, y) / weight[:, None]
        root = w.sqrt()[..., None]
        # The merge's rank-one term rides along as one more row of the same product.
        x_shift, y_shift, total = self._shift(weight, source_mean, target_mean)
        x = torch.cat([root * (x - source_mean[:, None]), x_shift[:, None]], dim=1)
        y = torch.cat([root * (y - target_mean[:, None]), y_shift[:, None]], dim=1)
        self.gram.baddbmm_(x.mT, x)
        self.cross.baddbmm_(x.mT, y)
        self.target_square += (y**2).sum(1)
        self._move(weight, (w**2).sum(1), source_mean, target_mean, total, rows)

    def merge(self, other: "Moments") -> None:
        """Add the rows of other moments in place."""
        if other.tokens == 0:
            return
        x_shift, y_shift, total = self._shift(other.weight, other.source_mean, other.target_mean)
        self.gram += other.gram
        self.gram.baddbmm_(x_shift[:, :, None], x_shift[:, None])
        self.cross += other.cross
        self.cross.baddbmm_(x_shift[:, :, None], y_shift[:, None])
        self.target_square += other.target_square + y_shift**2
        self._move(
            other.weight,
            other.weight_square,
            other.source_mean,
            other.target_mean,
            total,
            other.tokens,
        )

    def _shift(
        self, weight: Tensor, source_mean: Tensor, target_mean: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """sqrt(w_a w_b / (w_a + w_b)) (mean_b - mean_a) for both sides, and w_a + w_b."""
        total = self.weight + weight
        factor = (self.weight * weight / total).sqrt()[:, None]
        return (
            factor * (source_mean - self.source_mean),
            factor * (target_mean - self.target_mean),
            total,
        )

    def _move(
        self,
        weight: Tensor,
        weight_square: Tensor,
        source_mean: Tensor,
        target_mean: Tensor,
        total: Tensor,
        tokens: int,
    ) -> None:
        """Take in the first moments, after the second ones have been merged."""
        share = (weight / total)[:, None]
        self.source_mean += share * (source_mean - self.source_mean)
        self.target_mean += share * (target_mean - self.target_mean)
        self.weight = total
        self.weight_square = self.weight_square + weight_square
        self.tokens += tokens

    def block(
        self, source_layers: list[int], target_layer: int | None, num_source: int, num_target: int
    ) -> Block:
        """The regression problem of one target layer on some source layers.

        `num_source` and `num_target` are the models' layer counts, which fix the width of a
        layer's block of features. Without `target_layer` the outputs are those of all of them.
        """
        groups, features, outputs = self.cross.shape
        width = features // num_source
        index = torch.tensor(source_layers, device=self.gram.device)
        gram = self.gram.view(groups, num_source, width, num_source, width)
        rows = gram[:, index[:, None], :, index].permute(2, 0, 3, 1, 4)
        chosen = len(source_layers) * width
        to = slice(None)
        if target_layer is not None:
            out = outputs // num_target
            to = slice(target_layer * out, (target_layer + 1) * out)
        cross = self.cross.view(groups, num_source, width, outputs)[..., to]
        mean = self.source_mean.view(groups, num_source, width).index_select(1, index)
        return Block(
            gram=rows.reshape(groups, chosen, chosen),
            cross=cross.index_select(1, index).flatten(1, 2),
            target_square=self.target_square[:, to],
            source_mean=mean.reshape(groups, chosen),
            target_mean=self.target_mean[:, to],
            weight=self.weight,
        )

    def matched(self, kv_heads: int, num_source: int, num_target: int) -> "Moments":
        """The same moments of each head with its namesake alone, from one group of all heads."""

        def per_head(tensor: Tensor, layers: int) -> Tensor:
            """[..., layers * heads * dim] -> [heads, ..., layers * dim]."""
            by_head = tensor.reshape(*tensor.shape[:-1], layers, kv_heads, -1)
            return by_head.movedim(-2, 0).flatten(-2)

        def diagonal(tensor: Tensor, columns: int) -> Tensor:
            """[1, layers * heads * dim, layers * heads * dim] -> [heads, layers * dim, same]."""
            _, rows, outputs = tensor.shape
            by_head = tensor.view(
                num_source, kv_heads, -1, columns, kv_heads, outputs // columns // kv_heads
            )
            same_head = by_head.diagonal(dim1=1, dim2=4).movedim(-1, 0)
            return same_head.reshape(kv_heads, rows // kv_heads, outputs // kv_heads)

        return replace(
            self,
            weight=self.weight.expand(kv_heads).clone(),
            weight_square=self.weight_square.expand(kv_heads).clone(),
            source_mean=per_head(self.source_mean[0], num_source),
            target_mean=per_head(self.target_mean[0], num_target),
            gram=diagonal(self.gram, num_source),
            cross=diagonal(self.cross, num_target),
            target_square=per_head(self.target_square[0], num_target),
        )


TENSORS = tuple(item.name for item in fields(Moments) if item.name != "tokens")
