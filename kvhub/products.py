"""The product of a map, and what bounds the memory that it takes."""

import torch
from torch import Tensor

__all__ = ["CPU_ROWS", "WORKSPACE_BYTES", "multiply"]

# Bound on what mapping allocates besides its result.
WORKSPACE_BYTES = 256 * 2**20
# Tokens at once on a CPU: few enough for its caches, enough per pass over the weights.
CPU_ROWS = 2048


def multiply(
    sources: list[Tensor],
    weight: Tensor,
    bias: Tensor,
    *,
    gather: bool,
    out: Tensor | None = None,
) -> Tensor:
    """X W + b, where X is `sources` side by side.

    Parameters
    ----------
    sources
        Per chosen source layer `[groups, rows, features of the layer]`.
    weight, bias
        `[groups, features, outputs]` and `[groups, 1, outputs]`.
    gather
        One wide product of gathered features: few launches, and half precision is rounded once.
        Otherwise a sum of products: gathering costs a CPU a fifth of the product.
    out
        Where to put the result; None: new memory.

    Returns
    -------
    Tensor
        `[groups, rows, outputs]`.
    """
    if gather:
        return torch.baddbmm(bias, torch.cat(sources, dim=-1), weight, out=out)
    parts = weight.view(len(weight), len(sources), -1, weight.shape[-1]).unbind(1)
    result = torch.baddbmm(bias, sources[0], parts[0], out=out)
    for source, part in zip(sources[1:], parts[1:], strict=True):
        result.baddbmm_(source, part)
    return result
