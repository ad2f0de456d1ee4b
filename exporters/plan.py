"""A mapper as every exporter reads it: plain tensors and numbers, made and checked once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvhub.errors import UsageError, VerificationError
from kvhub.mapper import KVMapper
from kvhub.mapper_config import MapperConfig
from kvhub.spec import ModelSpec

__all__ = ["ExportPlan", "RopeTable", "make_plan"]

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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
class ExportPlan:
    """A mapper without its module. All tensors are contiguous, finite and on one device.

    Attributes
    ----------
    config
        The mapper's, for names.
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
    """

    config: MapperConfig
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
        """Numbers in weights and biases."""
        return 2 * self.target_layers * self.groups * (self.features + 1) * self.outputs

    @property
    def size_bytes(self) -> int:
        """Bytes of weights and biases."""
        return self.parameters * self.dtype.itemsize

    @property
    def flops_per_token(self) -> int:
        """Of the matrix products, a multiplication and an addition counting as two."""
        return 4 * self.target_layers * self.groups * self.features * self.outputs

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


def make_plan(mapper: KVMapper, *, dtype: torch.dtype | None = None) -> ExportPlan:
    """Copy out of a mapper what exporters need.

    Parameters
    ----------
    mapper
        Left as it is; the plan is on its device and shares no memory with it.
    dtype
        Of the weights and biases; None for the mapper's.

    Raises
    ------
    UsageError
        A dtype that weights cannot have.
    VerificationError
        A weight or bias is not finite, or not any more as that dtype; or a model rotates more
        dims than its heads have.
    IncompatiblePairError
        A model without RoPE.
    """
    config = mapper.config
    source, target = config.source, config.target
    dtype = dtype or mapper.key_weight.dtype
    if dtype not in DTYPES:
        raise UsageError(
            f"Weights cannot be exported as {dtype}; expected one of {[*map(str, DTYPES)]}."
        )
    tensors = {}
    for name, tensor in mapper.tensors().items():
        copied = tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        _require_finite(name, tensor, copied)
        tensors[name] = copied
    device = mapper.key_weight.device
    return ExportPlan(
        config=config,
        heads=config.heads,
        groups=mapper.key_weight.shape[1],
        top_k=config.top_k,
        source_layers=source.num_layers,
        target_layers=target.num_layers,
        source_kv_heads=source.kv_heads,
        source_head_dim=source.head_dim,
        target_kv_heads=target.kv_heads,
        target_head_dim=target.head_dim,
        gather=torch.tensor(config.selection, dtype=torch.int32, device=device),
        source_rope=_rope_table(source, device),
        target_rope=_rope_table(target, device),
        **tensors,
    )


def _require_finite(name: str, tensor: Tensor, copied: Tensor) -> None:
    # Layer by layer, so that the check costs a layer's memory and not the mapper's.
    if all(bool(torch.isfinite(layer).all()) for layer in copied):
        return
    if not bool(torch.isfinite(tensor).all()):
        raise VerificationError(f"{name} is not finite.", "Download or fit the mapper again.")
    raise VerificationError(
        f"{name} has numbers up to {float(tensor.abs().max()):.3g}: too large for {copied.dtype}.",
        "Export it as bfloat16 or float32.",
    )


def _rope_table(spec: ModelSpec, device: torch.device) -> RopeTable:
    rope = spec.require_rope()
    if not 0 < rope.rotary_dim <= spec.head_dim or 2 * len(rope.inv_freq) != rope.rotary_dim:
        raise VerificationError(
            f"The rope of {spec.model_id or spec.model_type} rotates {rope.rotary_dim} dims with "
            f"{len(rope.inv_freq)} inverse frequencies; expected at most head_dim = "
            f"{spec.head_dim} dims, two per frequency.",
            "Download or fit the mapper again.",
        )
    return RopeTable(
        inv_freq=torch.tensor(rope.inv_freq, dtype=torch.float32, device=device),
        attention_scaling=rope.attention_scaling,
        rotary_dim=rope.rotary_dim,
        interleaved=rope.interleaved,
    )
