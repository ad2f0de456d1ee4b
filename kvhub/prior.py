"""Fit a mapper again on other text, with what it knows as the prior: two closed forms, no model.

`strength` is N0, the number of tokens that the prior counts as, beside the n tokens of the new
text with Gram G, cross-Gram C and means m, mean(y). Where the mapper's own statistics are at hand
they are the prior: scaled to N0 tokens and added, with the mapper's ridge on the sum. Without
them its weights W0 and bias b0 are: N0 tokens about m, spread alike in every direction with the
features' mean variance s^2, and mapped by (W0, b0) exactly. The expected error on those makes it

    W, b = argmin  sum |x W + b - y|^2 + penalty |W|^2
                   + N0 (s^2 |W - W0|^2 + |m (W - W0) + b - b0|^2)

    W = (G + (penalty + N0 s^2) I)^-1 (C + N0 s^2 W0)
    b = (n mean(y) + N0 (m W0 + b0)) / (n + N0) - m W

Strength 0 is the mapper's ridge on the new text alone, an infinite one the mapper as it is.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvhub.compatibility import require_same
from kvhub.errors import UsageError, VerificationError
from kvhub.mapper import KVMapper
from kvhub.mapper_config import MapperConfig
from kvhub.moments import KINDS, Block
from kvhub.ridge import LambdaScale, penalty, regress, require_rows, solve_ridge
from kvhub.stats import Statistics

__all__ = ["refit", "require_linear", "require_original"]


def refit(
    mapper: KVMapper,
    statistics: Statistics,
    *,
    strength: float,
    original: Statistics | None = None,
) -> KVMapper:
    """Fit a mapper again on other text, with its own selection, heads and penalty.

    Parameters
    ----------
    mapper
        Whose weights, or whose statistics, are the prior. It is not changed.
    statistics
        Of the other text, from `calibrate` with the same models; with `all` heads, or the
        mapper's.
    strength
        How many tokens the prior counts as: 0 for none of it, `inf` for nothing else.
    original
        The statistics that the mapper was fitted on; None takes its weights as the prior.

    Returns
    -------
    mapper
        On the CPU, in the mapper's dtype; solved in float64. Its `config.calibration` is the
        mapper's own and, as `refit`, that of `statistics` with the method, the strength and the
        R2 on the held-out tokens of `statistics` before and after.

    Raises
    ------
    UsageError
        A strength below 0; one of 0 with no more tokens than features; a mapper with networks
        beside its linear map, which no closed form fits; or, with `original`, other statistics
        than the mapper's own, or a mapper that is not the plain ridge of its statistics.
    IncompatiblePairError
        The statistics are those of other models.
    """
    config = mapper.config
    require_linear(config)
    if not strength >= 0:
        raise UsageError(f"strength must not be negative; found {strength}.")
    statistics = _for_heads(statistics, config, "statistics")
    if original is not None:
        require_original(original, config)
        original = _for_heads(original, config, "original statistics")
        if original.weighting != statistics.weighting:
            raise UsageError(
                f"The statistics do not add up: weighting {original.weighting} and "
                f"{statistics.weighting}.",
                f"Calibrate with weighting {original.weighting!r}.",
            )
    if strength == 0:
        rows = min(statistics.fitted[kind].effective_tokens for kind in KINDS)
        require_rows(rows, mapper.key_weight.shape[2], config.top_k)

    ridge_lambda, scale = config.ridge["lambda"], config.ridge["scale"]
    found: dict[str, list[Tensor]] = {}
    before: dict[str, list[float]] = {kind: [] for kind in KINDS}
    after: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for layer, chosen in enumerate(config.selection):
        for kind in KINDS:
            names = f"{kind[:-1]}_weight", f"{kind[:-1]}_bias"
            weights, bias = (
                getattr(mapper, name)[layer].to("cpu", torch.float64) for name in names
            )
            block = statistics.block("fitted", kind, list(chosen), layer)
            if strength == math.inf:
                fitted = weights, bias
            elif original is None or strength == 0:
                fitted = regress_towards(block, weights, bias, strength, ridge_lambda, scale)
            else:
                prior = original.block("fitted", kind, list(chosen), layer)
                factor = strength / float(prior.weight.mean())
                fitted = regress(merge_blocks(prior, block, factor), ridge_lambda, scale)
            if not bool(torch.isfinite(fitted[0]).all()):
                raise VerificationError(
                    f"The refit of target layer {layer}, {kind}, is not finite.",
                    "Check the text, and raise the strength.",
                )
            held_out = statistics.block("held_out", kind, list(chosen), layer)
            before[kind].append(_r2(held_out, weights, bias))
            after[kind].append(_r2(held_out, *fitted))
            for name, tensor in zip(names, fitted, strict=True):
                found.setdefault(name, []).append(tensor.to(mapper.key_weight.dtype))

    record = {
        **statistics.provenance,
        "tokens": statistics.tokens,
        "method": "weights" if original is None else "statistics",
        "strength": None if strength == math.inf else strength,
        "held_out_r2": {"before": _means(before), "after": _means(after)},
    }
    if "refit" in config.calibration:
        record["refit"] = config.calibration["refit"]  # this is the second: nest the first in it
    quality = {
        **config.quality,
        "held_out_r2": _means(after),
        "held_out_r2_per_layer": after,
        "held_out_tokens": statistics.held_out["keys"].tokens,
    }
    quality.pop("alignment", None)  # errors of weights that these are no longer
    calibration = {**config.calibration, "refit": record}
    tensors = {name: torch.stack(parts) for name, parts in found.items()}
    return KVMapper(replace(config, calibration=calibration, quality=quality), tensors)


def regress_towards(
    block: Block,
    prior_weights: Tensor,
    prior_bias: Tensor,
    strength: float,
    ridge_lambda: float,
    scale: LambdaScale,
) -> tuple[Tensor, Tensor]:
    """The module's equation: weights `[groups, features, outputs]`, bias `[groups, outputs]`.

    The prior's have the same shapes; `strength` is finite.
    """
    variance = block.gram.diagonal(dim1=-2, dim2=-1).mean(-1) / block.weight
    pull = strength * variance
    weights = solve_ridge(
        block.gram,
        block.cross + pull[:, None, None] * prior_weights,
        penalty(block, ridge_lambda, scale) + pull,
    )
    share = (strength / (strength + block.weight))[:, None]
    prior_mean = torch.einsum("gf,gfo->go", block.source_mean, prior_weights) + prior_bias
    at_mean = block.target_mean + share * (prior_mean - block.target_mean)
    return weights, at_mean - torch.einsum("gf,gfo->go", block.source_mean, weights)


def merge_blocks(prior: Block, block: Block, factor: float) -> Block:
    """The block of both texts together, every token of `prior` counted `factor` > 0 times.

    That is the merge of `kvhub.moments` with the weight w_a of the prior scaled, on the features
    of one regression instead of all of them.
    """
    total = factor * prior.weight + block.weight
    root = (factor * prior.weight * block.weight / total).sqrt()[:, None]
    x_shift = root * (block.source_mean - prior.source_mean)
    y_shift = root * (block.target_mean - prior.target_mean)
    share = (block.weight / total)[:, None]
    return Block(
        gram=factor * prior.gram + block.gram + x_shift[:, :, None] * x_shift[:, None],
        cross=factor * prior.cross + block.cross + x_shift[:, :, None] * y_shift[:, None],
        target_square=factor * prior.target_square + block.target_square + y_shift**2,
        source_mean=prior.source_mean + share * (block.source_mean - prior.source_mean),
        target_mean=prior.target_mean + share * (block.target_mean - prior.target_mean),
        weight=total,
    )


def require_linear(config: MapperConfig) -> None:
    """Raise UsageError for a mapper with networks beside its linear map."""
    if config.repair is not None:
        raise UsageError(
            "This mapper has networks beside its linear map, which were trained on top of it; "
            "expected a linear map alone, which a closed form can fit again.",
            "Refit the mapper without networks, then train new ones on the result.",
        )


def require_original(original: Statistics, config: MapperConfig) -> None:
    """Raise UsageError unless a mapper is the plain ridge of these statistics."""
    if config.ridge.get("alignment") is not None:
        raise UsageError(
            "This mapper is aligned to the target's attention; expected one that is the plain "
            "ridge of its statistics, as adding statistics would take the alignment away.",
            "Leave --statistics out: then the mapper's weights are the prior.",
        )
    if original.provenance != config.calibration:
        raise UsageError(
            f"These are not the statistics that the mapper was fitted on: expected those of "
            f"{config.calibration}, found {original.provenance}.",
            "Leave --statistics out: then the mapper's weights are the prior.",
        )


def _for_heads(statistics: Statistics, config: MapperConfig, what: str) -> Statistics:
    """The statistics with the mapper's heads, if they are of its models."""
    require_same(config.source, statistics.source, "source")
    require_same(config.target, statistics.target, "target")
    if config.heads == "all" and statistics.heads == "matched":
        raise UsageError(
            f"The {what} hold matched heads only; this mapper needs all.",
            "Calibrate with heads='all'.",
        )
    return statistics.matched() if config.heads == "matched" else statistics


def _r2(held_out: Block, weights: Tensor, bias: Tensor) -> float:
    residual = held_out.residual_square(weights, bias).sum()
    return float(1 - residual / held_out.target_square.sum().clamp(min=1e-300))


def _means(values: dict[str, list[float]]) -> dict[str, Any]:
    return {kind: sum(layers) / len(layers) for kind, layers in values.items()}
