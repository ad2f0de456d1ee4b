"""Mappers with networks, without a training, for the tests of everything that uses one."""

from dataclasses import replace

import torch
from mapping import random_mapper

from kvhub import KVMapper
from kvhub.mapper_config import Repair, tensor_shapes


def with_networks(mapper, keys=(1, 2), values=(2,), hidden=12, seed=1, scale=0.3):
    """The mapper with random networks on these target layers."""
    config = replace(mapper.config, repair=Repair(hidden, keys, values))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(
            mapper.key_weight.dtype
        )
        for name, shape in tensor_shapes(config).items()
    }
    return KVMapper(config, {**tensors, **mapper.tensors()})


def repaired_mapper(source, target, heads="all", dtype=torch.float32, **options):
    """A random mapper of a pair of specs or models, with random networks."""
    return with_networks(random_mapper(source, target, heads, dtype=dtype), **options)


def network_outputs(mapper, kind, layer, features):
    """What the networks of a layer add, per group, in float64; `features` are per group."""
    repair = mapper.config.repair
    layers = repair.keys if kind == "key" else repair.values
    if layer not in layers:
        return [0.0 for _ in features]
    place = layers.index(layer)
    found = []
    for group, states in enumerate(features):

        def part(name, group=group):
            return getattr(mapper, f"{kind}_repair_{name}")[place, group].double()

        hidden = (states @ part("in") + part("in_bias")).clamp(min=0)
        hidden = (hidden @ part("mid") + part("mid_bias")).clamp(min=0)
        found.append(hidden @ part("out") + part("out_bias"))
    return found
