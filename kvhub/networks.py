"""Small networks that are added to the linear maps of some target layers.

Where a linear map misses, the paper (its MLP mapper) trains per target layer and kind

    Linear(features, hidden) - ReLU - Linear(hidden, hidden) - ReLU - Linear(hidden, outputs)

Here the network learns what the linear map leaves over and is added to it; the heads of a group
share it, where the paper has one per head, which makes a mapper as large as its target.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvhub.products import multiply

__all__ = ["add_network", "network_of"]

# Weights and biases in the order of their use. The inputs' normalisation is folded into the first.
PARTS = ("in", "in_bias", "mid", "mid_bias", "out", "out_bias")


def network_of(
    tensors: Mapping[str, Tensor], kind: str, layers: Sequence[int], layer: int
) -> list[Tensor] | None:
    """The network of a target layer, its parts as in `PARTS`; None if it has none.

    Parameters
    ----------
    tensors
        At least those of the networks, `[repaired layers, groups, ...]`.
    kind
        `key` or `value`.
    layers
        The target layers that have networks of this kind, in the order of the tensors.
    layer
        A target layer.
    """
    if layer not in layers:
        return None
    return [tensors[f"{kind}_repair_{part}"][layers.index(layer)] for part in PARTS]


def add_network(
    result: Tensor, sources: list[Tensor], network: Sequence[Tensor], *, gather: bool
) -> None:
    """Add relu(relu(X W1 + b1) W2 + b2) W3 + b3 to a product, in its own arithmetic.

    Parameters
    ----------
    result
        `[groups, rows, outputs]`, the linear map's; changed in place.
    sources, gather
        As for `kvhub.products.multiply`.
    network
        From `network_of`, in any dtype.
    """
    dtype = result.dtype
    weights, biases = network[::2], [bias[:, None] for bias in network[1::2]]
    # Each is converted when it is needed, so that one of them is in memory at a time.
    hidden = multiply(sources, weights[0].to(dtype), biases[0].to(dtype), gather=gather).relu_()
    hidden = torch.baddbmm(biases[1].to(dtype), hidden, weights[1].to(dtype)).relu_()
    result.baddbmm_(hidden, weights[2].to(dtype)).add_(biases[2].to(dtype))
