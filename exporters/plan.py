"""A mapper as every exporter reads it, made and checked once."""

from dataclasses import dataclass

import torch
from kvhub.exporters.map_plan import MapPlan, RopeTable
from torch import Tensor

from kvhub.errors import UsageError, VerificationError
from kvhub.mapper import KVMapper
from kvhub.mapper_config import MapperConfig
from kvhub.spec import ModelSpec

__all__ = ["ExportPlan", "make_plan"]

KINDS = ("key", "value")
LINEAR = ("key_weight", "value_weight", "key_bias", "value_bias")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class ExportPlan(MapPlan):
    """A mapper without its module, with its config for names."""

    config: MapperConfig


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
    linear = {name: tensors.pop(name) for name in LINEAR}
    repair = config.repair
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
        repaired={} if repair is None else {kind: repair.layers(kind) for kind in KINDS},
        repair=tensors,
        **linear,
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
