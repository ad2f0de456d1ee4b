"""The values' fit: what the target reads with the mapped keys in place, by ridge regression."""

import torch
from torch import Tensor

from kvhub.moments import Block
from kvhub.ridge import solve_ridge

__all__ = ["LAMBDAS", "fit_values"]

# Penalties that are tried, relative to the mean diagonal of the regression's matrix.
LAMBDAS = (1e-4, 1e-3, 1e-2, 1e-1)


def fit_values(
    fitted: Block, held_out: Block, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, list[float]]:
    """Of each head the best of its old values map and one ridge regression per penalty.

    No penalty on the bias: with g the last row of the matrix X^T X, which is not centred, and c
    that of X^T Y, the weights are those of X^T X - g g^T / g_mass and X^T Y - g c^T / g_mass, and
    b = (c - g^T W) / g_mass.

    Parameters
    ----------
    fitted, held_out
        Of the rows of `value_rows`: groups are KV heads, and the last feature is the mass.
    weight, bias
        The old ones, `[groups, features, outputs]` and `[groups, outputs]` of a mapper.

    Returns
    -------
    weight, bias
        Of the shapes of the old ones.
    errors
        Relative held-out error of the old ones, and of these.
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
    errors = torch.stack([held_out.residual_square(fit, zero).sum(1) for fit in fits])
    best = torch.stack(fits)[errors.argmin(0), torch.arange(heads, device=errors.device)]
    total = (held_out.target_square + held_out.weight[:, None] * held_out.target_mean**2).sum()
    new_weight = best[:, :features].reshape(len(weight), heads // len(weight), features, -1)
    new_weight = new_weight.movedim(1, 2).flatten(2)
    relative = [float(errors[0].sum() / total), float(errors.amin(0).sum() / total)]
    return new_weight, best[:, features].reshape(bias.shape), relative
