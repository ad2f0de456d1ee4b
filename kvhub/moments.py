"""Sufficient statistics of a calibration: all that selection and ridge ever need.

A `Moments` holds weighted first moments and centred second moments of source features x and
target features y, in float64. Two of them merge exactly (Chan, Golub and LeVeque 1983):

    G = G_a + G_b + (w_a w_b / (w_a + w_b)) d d^T      with d = mean_b - mean_a

so memory does not grow with tokens, large constant offsets do no harm, and parts from several
ranks or runs add up to what one run would have given.

Features come in groups. `heads="all"` has one group, whose features are every head of every
source layer; `heads="matched"` has one group per KV head. Within a group the order is
(layer, head, dim), so a source layer is one contiguous block of features.
"""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvhub.atomic import new_file
from kvhub.compatibility import Heads
from kvhub.errors import IncompatiblePairError, NotFoundError, UsageError, VerificationError
from kvhub.spec import ModelSpec

__all__ = ["Block", "Heads", "Moments", "Statistics", "group_features"]

KINDS = ("keys", "values")
FORMAT = "kvhub-statistics-1"


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
        self, source_layers: list[int], target_layer: int, num_source: int, num_target: int
    ) -> Block:
        """The regression problem of one target layer on some source layers.

        `num_source` and `num_target` are the models' layer counts, which fix the width of a
        layer's block of features.
        """
        groups, features, outputs = self.cross.shape
        width, out = features // num_source, outputs // num_target
        index = torch.tensor(source_layers, device=self.gram.device)
        gram = self.gram.view(groups, num_source, width, num_source, width)
        rows = gram[:, index[:, None], :, index].permute(2, 0, 3, 1, 4)
        chosen = len(source_layers) * width
        to = slice(target_layer * out, (target_layer + 1) * out)
        cross = self.cross[..., to].reshape(groups, num_source, width, out).index_select(1, index)
        mean = self.source_mean.view(groups, num_source, width).index_select(1, index)
        return Block(
            gram=rows.reshape(groups, chosen, chosen),
            cross=cross.reshape(groups, chosen, out),
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
            by_head = per_head(tensor[0], columns)  # [heads, layers * heads * dim, columns]
            both = per_head(by_head.mT, num_source).mT  # [heads, heads, layers * dim, columns]
            return both.diagonal(dim1=0, dim2=1).movedim(-1, 0).contiguous()

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


@dataclass
class Statistics:
    """What a calibration leaves behind: from here on no model is needed.

    Attributes
    ----------
    source, target
        The specs of the two models.
    heads
        Whether a target head sees all source heads (`all`, from which `matched` can be derived)
        or only its namesake (`matched`, 1 / kv_heads of the size).
    weighting
        `uniform`, or `attention` when rows were weighted by the attention they receive.
    fitted, held_out
        `{"keys": Moments, "values": Moments}` of the sequences for fitting and of those kept
        apart for scoring; keys in content space.
    provenance
        Where the tokens came from; written into the mapper's config.
    """

    source: ModelSpec
    target: ModelSpec
    heads: Heads
    weighting: Literal["uniform", "attention"]
    fitted: dict[str, Moments]
    held_out: dict[str, Moments]
    provenance: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def empty(
        cls,
        source: ModelSpec,
        target: ModelSpec,
        heads: Heads = "all",
        weighting: Literal["uniform", "attention"] = "uniform",
        provenance: dict[str, Any] | None = None,
        device: Any = "cpu",
    ) -> "Statistics":
        groups = 1 if heads == "all" else target.kv_heads
        features = source.num_layers * source.kv_dim // groups
        outputs = target.num_layers * target.kv_dim // groups

        def zeros() -> dict[str, Moments]:
            return {kind: Moments.zeros(groups, features, outputs, device) for kind in KINDS}

        return cls(source, target, heads, weighting, zeros(), zeros(), dict(provenance or {}))

    @property
    def tokens(self) -> int:
        """Rows for fitting, held-out ones not counted."""
        return self.fitted["keys"].tokens

    def block(self, part: str, kind: str, source_layers: list[int], target_layer: int) -> Block:
        """The regression problem of a target layer; `part` is `fitted` or `held_out`."""
        moments: Moments = getattr(self, part)[kind]
        return moments.block(
            source_layers, target_layer, self.source.num_layers, self.target.num_layers
        )

    def matched(self) -> "Statistics":
        """The statistics of `matched` heads; itself if it has them."""
        if self.heads == "matched":
            return self
        if self.source.kv_heads != self.target.kv_heads:
            raise IncompatiblePairError(
                f"Matched heads need equal KV heads: {self.source.model_id} has "
                f"{self.source.kv_heads}, {self.target.model_id} has {self.target.kv_heads}.",
                "Use heads='all'.",
            )
        layers = (self.target.kv_heads, self.source.num_layers, self.target.num_layers)
        return replace(
            self,
            heads="matched",
            fitted={kind: self.fitted[kind].matched(*layers) for kind in KINDS},
            held_out={kind: self.held_out[kind].matched(*layers) for kind in KINDS},
        )

    def __add__(self, other: "Statistics") -> "Statistics":
        for name in ("source", "target", "heads", "weighting"):
            if getattr(self, name) != getattr(other, name):
                raise IncompatiblePairError(
                    f"These statistics do not belong together: {name} is "
                    f"{_brief(getattr(self, name))} and {_brief(getattr(other, name))}.",
                    "Add only statistics of the same pair with the same settings.",
                )
        total = Statistics.empty(
            self.source,
            self.target,
            self.heads,
            self.weighting,
            _merge_provenance(self.provenance, other.provenance),
        )
        for part in ("fitted", "held_out"):
            for kind in KINDS:
                moments = getattr(total, part)[kind]
                moments.merge(getattr(self, part)[kind])
                moments.merge(getattr(other, part)[kind])
        return total

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically: a reader sees the old file or the new one."""
        tensors = {}
        tokens = {}
        for part in ("fitted", "held_out"):
            for kind in KINDS:
                moments = getattr(self, part)[kind]
                tokens[f"{part}.{kind}"] = moments.tokens
                for name in TENSORS:
                    tensors[f"{part}.{kind}.{name}"] = getattr(moments, name).cpu().contiguous()
        header = {
            "format": FORMAT,
            "source": self.source.to_dict(),
            "target": self.target.to_dict(),
            "heads": self.heads,
            "weighting": self.weighting,
            "tokens": tokens,
            "provenance": self.provenance,
        }
        with new_file(Path(path)) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt", "kvhub": json.dumps(header)})

    @classmethod
    def load(cls, path: str | Path) -> "Statistics":
        """Read a file that `save` wrote.

        Raises
        ------
        NotFoundError
            There is no such file.
        VerificationError
            The file is truncated, is not a statistics file, or its tensors do not fit its specs.
        """
        path = Path(path)
        if not path.is_file():
            raise NotFoundError(
                f"No statistics file {path}.", "Write one with `kvhub fit NAME --statistics FILE`."
            )
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("kvhub", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, json.JSONDecodeError) as error:
            raise VerificationError(
                f"{path} is not a whole safetensors file: {error}.", "Calibrate again."
            ) from error
        if header.get("format") != FORMAT:
            raise VerificationError(
                f"{path} is not a statistics file: expected format {FORMAT!r}, found "
                f"{header.get('format')!r}.",
                "Calibrate again with this version of kvhub.",
            )
        result = cls.empty(
            ModelSpec.from_dict(header["source"]),
            ModelSpec.from_dict(header["target"]),
            header["heads"],
            header["weighting"],
            header["provenance"],
            device="meta",
        )
        for part in ("fitted", "held_out"):
            for kind in KINDS:
                moments = getattr(result, part)[kind]
                moments.tokens = header["tokens"][f"{part}.{kind}"]
                for name in TENSORS:
                    found = tensors.pop(f"{part}.{kind}.{name}", None)
                    expected = getattr(moments, name).shape
                    if found is None or found.shape != expected:
                        raise VerificationError(
                            f"{path}: {part}.{kind}.{name} should have shape {tuple(expected)}, "
                            f"found {None if found is None else tuple(found.shape)}.",
                            "Calibrate again.",
                        )
                    setattr(moments, name, found)
        return result


def _brief(value: ModelSpec | str) -> str:
    return value.model_id if isinstance(value, ModelSpec) else repr(value)


def _merge_provenance(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Counts add up; what differs otherwise is listed in parts."""
    merged: dict[str, Any] = {}
    for name in {**first, **second}:
        a, b = first.get(name), second.get(name)
        if name in ("sequences", "held_out_sequences"):
            merged[name] = (a or 0) + (b or 0)
        elif a == b:
            merged[name] = a
        else:
            merged[name] = [
                *(a if isinstance(a, list) else [a]),
                *(b if isinstance(b, list) else [b]),
            ]
    return merged
