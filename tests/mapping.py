"""Mappers without a fit, for the tests of everything that uses one."""

import torch

from kvhub import KVMapper, MapperConfig, ModelSpec
from kvhub.mapper_config import tensor_shapes


def config_for(source, target, heads="all", top_k=1, selection=None):
    """A config of a pair of specs or models; by default target layer l reads layer l first."""
    source, target = (
        spec if isinstance(spec, ModelSpec) else ModelSpec.from_model(spec)
        for spec in (source, target)
    )
    if selection is None:
        selection = [
            [(layer + step) % source.num_layers for step in range(top_k)]
            for layer in range(target.num_layers)
        ]
    return MapperConfig(
        source=source,
        target=target,
        heads=heads,
        top_k=top_k,
        selection=tuple(map(tuple, selection)),
        selection_method="probe",
        ridge={"lambda": 0.0, "scale": "relative", "tokens": 1, "effective_tokens": 1.0}
        | {"features": top_k * source.kv_dim},
        weighting="uniform",
        calibration={"data": "none"},
        quality={
            "held_out_r2": {"keys": 1.0, "values": 1.0},
            "held_out_r2_per_layer": {"keys": [], "values": []},
            "held_out_tokens": 0,
            "comfortable_rows": True,
            "selection_scores": [],
            "selection_scored_on": "held_out",
        },
    )


def identity_mapper(model, heads="all", dtype=torch.float32):
    """The mapper of a model onto itself that changes nothing."""
    config = config_for(model, model, heads)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        tensors[name] = torch.zeros(shape, dtype=dtype)
        if name.endswith("weight"):
            tensors[name] += torch.eye(shape[-1], dtype=dtype)
    return KVMapper(config, tensors)


def random_mapper(source, target, heads="all", top_k=2, seed=0, dtype=torch.float32):
    """A mapper with random weights."""
    config = config_for(source, target, heads, top_k)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        for name, shape in tensor_shapes(config).items()
    }
    return KVMapper(config, tensors)
