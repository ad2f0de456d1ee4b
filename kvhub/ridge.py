"""The closed form: one ridge regression per target layer, head and kind (paper, equation 4).

    W = (X^T X + penalty I)^-1 X^T Y,    b = mean(Y) - mean(X) W

on centred X and Y, so that the bias is not penalised. With `heads="all"` every head of a target
layer has the same X, so one factorisation serves all of them; that is the paper's per-head
solution, not an approximation of it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kvhub.compatibility import require_pair
from kvhub.errors import UsageError, VerificationError
from kvhub.mapper import KVMapper
from kvhub.mapper_config import MapperConfig
from kvhub.moments import KINDS, Block, Heads
from kvhub.stats import Statistics

if TYPE_CHECKING:
    from kvhub.selection import Selection

__all__ = [
    "LambdaScale",
    "fit",
    "penalty",
    "regress",
    "require_rows",
    "solve_ridge",
    "with_held_out_r2",
]

LambdaScale = Literal["relative", "per_token", "absolute"]
COMFORTABLE_ROWS = 10  # rows per feature below which a fit is worth a warning


def penalty(block: Block, ridge_lambda: float, scale: LambdaScale) -> Tensor:
    """What is added to the diagonal of X^T X, `[groups]`.

    `relative` multiplies by the mean of the diagonal of the centred X^T X, `per_token` by the sum
    of the tokens' weights (the penalty of a mean Gram), `absolute` by nothing. The paper states
    lambda = 0.01 without a scale; only `relative` means the same for every pair, kind and size of
    calibration set.
    """
    if scale == "relative":
        return ridge_lambda * block.gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    if scale == "per_token":
        return ridge_lambda * block.weight
    if scale == "absolute":
        return torch.full_like(block.weight, ridge_lambda)
    raise UsageError(
        f"Unknown lambda scale {scale!r}.", "Use one of relative, per_token and absolute."
    )


def solve_ridge(gram: Tensor, cross: Tensor, penalty: Tensor) -> Tensor:
    """(gram + penalty I)^-1 cross, and the least-norm solution where that is singular.

    Parameters
    ----------
    gram
        `[..., features, features]` float64, symmetric, not negative.
    cross
        `[..., features, outputs]` float64.
    penalty
        `[...]` float64, not negative.

    Returns
    -------
    weights
        `[..., features, outputs]`. The system is scaled to a unit diagonal first, so features of
        very different size do no harm and a feature that never varies gets weight 0.
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1) + penalty[..., None]
    scale = torch.where(diagonal > 0, diagonal, torch.inf).rsqrt()
    system = gram * scale[..., None]
    system *= scale[..., None, :]
    system.diagonal(dim1=-2, dim2=-1).fill_(1)
    right = scale[..., None] * cross
    factor, failed = torch.linalg.cholesky_ex(system)
    # A squared pivot is the share of a feature's variance that the ones before it leave over.
    smallest = factor.diagonal(dim1=-2, dim2=-1).amin(-1) ** 2
    floor = 10 * gram.shape[-1] * torch.finfo(gram.dtype).eps
    singular = (failed != 0) | ~(smallest > floor)
    weights = torch.cholesky_solve(right, factor)
    if bool(singular.any()):
        weights[singular] = _least_norm(system[singular], right[singular])
    return scale[..., None] * weights


def _least_norm(system: Tensor, right: Tensor) -> Tensor:
    """The pseudo-inverse's solution of a symmetric, not negative system."""
    values, vectors = torch.linalg.eigh(system)
    cutoff = system.shape[-1] * torch.finfo(system.dtype).eps * values[..., -1:]
    inverse = torch.where(values > cutoff, 1 / values, 0)
    solution: Tensor = vectors @ (inverse[..., None] * (vectors.mT @ right))
    return solution


def regress(block: Block, ridge_lambda: float, scale: LambdaScale) -> tuple[Tensor, Tensor]:
    """Weights `[groups, features, outputs]` and bias `[groups, outputs]` of one regression."""
    weights = solve_ridge(block.gram, block.cross, penalty(block, ridge_lambda, scale))
    return weights, block.target_mean - torch.einsum("gf,gfo->go", block.source_mean, weights)


def require_rows(rows: float, features: int, top_k: int) -> bool:
    """Refuse a fit that has no more rows than features; True if the rows are comfortable.

    Raises
    ------
    UsageError
        With so few rows the fit is perfect on them and useless elsewhere.
    """
    if rows <= features:
        raise UsageError(
            f"Too few calibration tokens: {rows:.0f} for {features} features per regression "
            f"(top_k = {top_k}); expected more tokens than features, better "
            f"{COMFORTABLE_ROWS} times as many ({COMFORTABLE_ROWS * features}).",
            "Raise --sequences or --length, lower --top-k, or use --heads matched.",
        )
    return rows >= COMFORTABLE_ROWS * features


def fit(
    statistics: Statistics,
    selection: "Selection",
    *,
    heads: Heads | None = None,
    ridge_lambda: float = 1e-3,
    lambda_scale: LambdaScale = "relative",
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int, int], None] | None = None,
) -> KVMapper:
    """Fit a mapper from statistics alone; no model is needed.

    Parameters
    ----------
    statistics
        From `calibrate`, or read back with `Statistics.load`.
    selection
        The source layers of each target layer, from `select_layers`.
    heads
        `all`: a target head reads every head of the chosen source layers (the paper). `matched`:
        only its namesake (CacheBridge), 1 / kv_heads of the size. None takes the statistics' own.
    ridge_lambda, lambda_scale
        The penalty, see `penalty`.
    dtype
        Of the mapper's tensors; solving is in float64 whatever it is.
    progress
        Called with (regressions done, regressions in all).

    Returns
    -------
    mapper
        Its `config.quality` holds the held-out R2 per target layer and kind.

    Raises
    ------
    UsageError
        Fewer tokens than features, a negative penalty, `all` from statistics of `matched`, or a
        selection made for other layers.
    IncompatiblePairError
        The pair cannot be mapped with these heads.
    """
    heads = heads or statistics.heads
    require_pair(statistics.source, statistics.target, heads)
    if heads == "all" and statistics.heads == "matched":
        raise UsageError(
            "These statistics hold matched heads only; a mapper with heads='all' needs all.",
            "Calibrate with --heads all, or fit with --heads matched.",
        )
    if not ridge_lambda >= 0:
        raise UsageError(f"ridge_lambda must not be negative; found {ridge_lambda}.")
    if heads == "matched":
        statistics = statistics.matched()
    source, target = statistics.source, statistics.target
    selection.check(source.num_layers, target.num_layers)
    groups = 1 if heads == "all" else target.kv_heads
    features = selection.top_k * source.kv_dim // groups
    rows = min(statistics.fitted[kind].effective_tokens for kind in KINDS)
    comfortable = require_rows(rows, features, selection.top_k)

    tensors: dict[str, list[Tensor]] = {}
    r2: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for layer, source_layers in enumerate(selection.layers):
        for done, kind in enumerate(KINDS):
            block = statistics.block("fitted", kind, source_layers, layer)
            weights, bias = regress(block, ridge_lambda, lambda_scale)
            if not bool(torch.isfinite(weights).all()):
                raise VerificationError(
                    f"The fit of target layer {layer}, {kind}, is not finite.",
                    "Check the calibration statistics and raise ridge_lambda.",
                )
            held_out = statistics.block("held_out", kind, source_layers, layer)
            r2[kind].append(_r2(held_out, weights, bias))
            tensors.setdefault(f"{kind[:-1]}_weight", []).append(weights.to(dtype))
            tensors.setdefault(f"{kind[:-1]}_bias", []).append(bias.to(dtype))
            if progress is not None:
                progress(2 * layer + done + 1, 2 * target.num_layers)

    quality: dict[str, Any] = {
        **_r2_figures(r2),
        "held_out_tokens": statistics.held_out["keys"].tokens,
        "comfortable_rows": comfortable,
        "selection_scores": selection.scores,
        "selection_scored_on": selection.scored_on,
    }
    config = MapperConfig(
        source=source,
        target=target,
        heads=heads,
        top_k=selection.top_k,
        selection=tuple(map(tuple, selection.layers)),
        selection_method=selection.method,
        ridge={
            "lambda": ridge_lambda,
            "scale": lambda_scale,
            "tokens": statistics.tokens,
            "effective_tokens": rows,
            "features": features,
        },
        weighting=statistics.weighting,
        calibration=statistics.provenance,
        quality=quality,
    )
    return KVMapper(config, {name: torch.stack(parts) for name, parts in tensors.items()})


def with_held_out_r2(mapper: KVMapper, statistics: Statistics) -> KVMapper:
    """The mapper with the held-out R2 of its weights as they are, whatever they were fitted to.

    `statistics` are of the mapper's own heads.
    """
    r2: dict[str, list[float]] = {kind: [] for kind in KINDS}
    tensors = mapper.tensors()
    for layer, source_layers in enumerate(mapper.config.selection):
        for kind in KINDS:
            block = statistics.block("held_out", kind, list(source_layers), layer)
            weights, bias = (
                tensors[f"{kind[:-1]}_{part}"][layer].double() for part in ("weight", "bias")
            )
            r2[kind].append(_r2(block, weights, bias))
    quality = {**mapper.config.quality, **_r2_figures(r2)}
    return KVMapper(replace(mapper.config, quality=quality), tensors)


def _r2(held_out: Block, weights: Tensor, bias: Tensor) -> float:
    residual = held_out.residual_square(weights, bias).sum()
    return float(1 - residual / held_out.target_square.sum().clamp(min=1e-300))


def _r2_figures(r2: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "held_out_r2": {kind: sum(values) / len(values) for kind, values in r2.items()},
        "held_out_r2_per_layer": r2,
    }
