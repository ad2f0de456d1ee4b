"""What mapping needs of a mapper: plain tensors and numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvhub.errors import VerificationError
from kvhub.networks import network_of

__all__ = ["MapPlan", "RopeTable"]


@dataclass(frozen=True, eq=False)
class RopeTable:
    """How a model rotates its keys.

    Attributes
    ----------
    inv_freq
        `[rotary_dim / 2]` float32, radians per position of each pair. Angles are float32 products
        of these and the positions, as transformers computes them.
    attention_scaling
        The factor on cos and sin. Stripping divides by it: both by its square, as the transposed
        rotation multiplies by it once more.
    rotary_dim
        How many leading dims of a head rotate; the others pass.
    interleaved
        Pairs are (0, 1), (2, 3) and so on; otherwise dim i pairs with dim i + rotary_dim / 2.
    """

    inv_freq: Tensor
    attention_scaling: float
    rotary_dim: int
    interleaved: bool


@dataclass(frozen=True, eq=False)
class MapPlan:
    """A mapper as numbers. All tensors are contiguous, finite and on one device.

    Attributes
    ----------
    heads
        `all`: one group reads all source heads and writes all target heads. `matched`: group h
        reads source head h and writes target head h.
    groups, top_k, source_layers, target_layers
        Counts; `top_k` source layers per target layer.
    source_kv_heads, source_head_dim, target_kv_heads, target_head_dim
        The geometry of the two caches.
    gather
        `[target_layers, top_k]` int32: the source layer of each feature block, in the order of
        the weights' features.
    key_weight, value_weight
        `[target_layers, groups, features, outputs]`; features are (top_k, source heads of a
        group, source_head_dim), outputs (target heads of a group, target_head_dim). Keys in
        content space.
    key_bias, value_bias
        `[target_layers, groups, outputs]`.
    source_rope, target_rope
        To strip the source's rotation before the product, and to apply the target's after it.
    repaired
        By kind, `key` and `value`: the target layers that have a network; empty without any.
    repair
        The networks' tensors by name, `[repaired layers, groups, ...]`, in the weights' dtype: see
        `kvhub.networks`.
    """

    heads: str
    groups: int
    top_k: int
    source_layers: int
    target_layers: int
    source_kv_heads: int
    source_head_dim: int
    target_kv_heads: int
    target_head_dim: int
    gather: Tensor
    key_weight: Tensor
    value_weight: Tensor
    key_bias: Tensor
    value_bias: Tensor
    source_rope: RopeTable
    target_rope: RopeTable
    repaired: Mapping[str, tuple[int, ...]] = field(default_factory=dict, kw_only=True)
    repair: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        # Networks that nobody names would not be used, and the map be another one.
        found = {name.partition("_")[0]: len(tensor) for name, tensor in self.repair.items()}
        expected = {kind: len(layers) for kind, layers in self.repaired.items() if layers}
        if found != expected:
            raise VerificationError(
                f"Expected networks of layers {dict(self.repaired)}, found so many: {found}.",
                "Export the mapper again.",
            )

    def network(self, kind: str, layer: int) -> list[Tensor] | None:
        """What is added to a target layer's product, if anything is."""
        return network_of(self.repair, kind, self.repaired.get(kind, ()), layer)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and biases."""
        return self.key_weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.key_weight.device

    @property
    def features(self) -> int:
        """Rows of one group's weight."""
        return self.top_k * self.source_kv_heads // self.groups * self.source_head_dim

    @property
    def outputs(self) -> int:
        """Columns of one group's weight."""
        return self.target_kv_heads // self.groups * self.target_head_dim

    @property
    def parameters(self) -> int:
        """Numbers in weights and biases, those of the networks included."""
        linear = 2 * self.target_layers * self.groups * (self.features + 1) * self.outputs
        return linear + sum(tensor.numel() for tensor in self.repair.values())

    @property
    def hidden(self) -> int:
        """Width of the networks' hidden layers; 0 without any."""
        return max(
            (t.shape[-1] for name, t in self.repair.items() if name.endswith("_mid")), default=0
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of weights and biases."""
        return self.parameters * self.dtype.itemsize

    @property
    def flops_per_token(self) -> int:
        """Of the matrix products, a multiplication and an addition counting as two."""
        linear = 4 * self.target_layers * self.groups * self.features * self.outputs
        weights = (tensor for tensor in self.repair.values() if tensor.dim() == 4)
        return linear + sum(2 * weight.numel() for weight in weights)

    def bytes_per_token(self, source: torch.dtype, target: torch.dtype) -> int:
        """What mapping a token has to move at least: its source cells read, its target's written.

        Parameters
        ----------
        source, target
            The dtypes of the two caches.
        """
        read = self.source_layers * self.source_kv_heads * self.source_head_dim
        written = self.target_layers * self.target_kv_heads * self.target_head_dim
        return 2 * (read * source.itemsize + written * target.itemsize)
