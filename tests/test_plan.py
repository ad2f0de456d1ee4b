"""The export plan says of a mapper what the mapper says, and shares nothing with it."""

from dataclasses import replace

import pytest
import torch
from kvhub.exporters.plan import make_plan
from mapping import config_for, random_mapper
from tiny import tiny_config

from kvhub import KVMapper, ModelSpec
from kvhub.errors import IncompatiblePairError, UsageError, VerificationError
from kvhub.mapper_config import tensor_shapes
from kvhub.rope import apply_rope

SOURCE = ModelSpec.from_config(tiny_config("qwen3", 3))
TARGET = ModelSpec.from_config(tiny_config("llama", 4, head_dim=8))


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_a_plan_holds_the_mappers_numbers(heads):
    mapper = random_mapper(SOURCE, TARGET, heads)
    plan = make_plan(mapper)
    for name, tensor in mapper.tensors().items():
        copied = getattr(plan, name)
        assert torch.equal(copied, tensor)
        assert copied.is_contiguous()
        assert copied.data_ptr() != tensor.data_ptr()
    assert plan.gather.dtype == torch.int32
    assert plan.gather.tolist() == [list(layers) for layers in mapper.config.selection]
    assert plan.key_weight.shape == (plan.target_layers, plan.groups, plan.features, plan.outputs)
    assert (plan.heads, plan.groups) == (heads, 1 if heads == "all" else 2)
    assert (plan.source_layers, plan.source_kv_heads, plan.source_head_dim) == (3, 2, 16)
    assert (plan.target_layers, plan.target_kv_heads, plan.target_head_dim) == (4, 2, 8)


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_a_plan_counts_what_its_mapper_does(heads):
    mapper = random_mapper(SOURCE, TARGET, heads)
    plan = make_plan(mapper)
    assert (plan.parameters, plan.size_bytes) == (mapper.num_parameters, mapper.size_bytes)
    half = make_plan(mapper, dtype=torch.bfloat16)
    assert (half.dtype, 2 * half.size_bytes) == (torch.bfloat16, mapper.size_bytes)
    # Every weight is multiplied and added once per token.
    assert plan.flops_per_token == 2 * (mapper.key_weight.numel() + mapper.value_weight.numel())
    # Keys and values: 3 layers of 2 heads of 16 dims read, 4 of 2 of 8 written.
    assert plan.bytes_per_token(torch.bfloat16, torch.float32) == 2 * (96 * 2 + 64 * 4)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "arcee", "glm4", "stablelm", "cohere"])
def test_a_rope_table_is_enough_to_rotate(architecture):
    spec = ModelSpec.from_config(tiny_config(architecture, 2))
    table = make_plan(random_mapper(spec, spec)).target_rope
    keys, positions = torch.randn(2, 5, spec.head_dim), torch.arange(3, 8)
    angles = positions[:, None].float() * table.inv_freq
    cos, sin = (table.attention_scaling * turn for turn in (angles.cos(), angles.sin()))
    dims = torch.arange(table.rotary_dim)
    pairs = dims.view(-1, 2).T if table.interleaved else dims.view(2, -1)
    first, second = keys[..., pairs[0]], keys[..., pairs[1]]
    rotated = keys.clone()
    rotated[..., pairs[0]] = first * cos - second * sin
    rotated[..., pairs[1]] = second * cos + first * sin
    torch.testing.assert_close(rotated, apply_rope(keys, positions, spec.require_rope()))


def test_tensors_that_are_not_contiguous_become_so():
    mapper = random_mapper(SOURCE, TARGET)
    turned = {
        name: tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        for name, tensor in mapper.tensors().items()
    }
    plan = make_plan(KVMapper(mapper.config, turned))
    assert plan.key_weight.is_contiguous()
    assert torch.equal(plan.key_weight, mapper.key_weight)


def test_numbers_that_a_dtype_cannot_hold_are_refused():
    mapper = random_mapper(SOURCE, TARGET)
    mapper.value_bias[1, 0, 2] = -1e5  # below float16's lowest number
    with pytest.raises(VerificationError, match=r"value_bias .* 1e\+05: too large for torch.float"):
        make_plan(mapper, dtype=torch.float16)
    assert make_plan(mapper, dtype=torch.bfloat16).value_bias[1, 0, 2] < -9e4
    mapper.key_weight[3, 0, 0, 0] = float("nan")
    with pytest.raises(VerificationError, match="key_weight is not finite"):
        make_plan(mapper)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_dtypes_without_arithmetic_are_refused(dtype):
    with pytest.raises(UsageError, match="cannot be exported as"):
        make_plan(random_mapper(SOURCE, TARGET), dtype=dtype)


def zero_mapper(source, target):
    config = config_for(source, target)
    return KVMapper(config, {n: torch.zeros(shape) for n, shape in tensor_shapes(config).items()})


def test_models_that_cannot_rotate_are_refused():
    without = replace(SOURCE, rope=None, unsupported=("It has no RoPE",))
    with pytest.raises(IncompatiblePairError, match="RoPE"):
        make_plan(zero_mapper(without, TARGET))
    wide = replace(TARGET, rope=SOURCE.rope)
    with pytest.raises(VerificationError, match="rotates 16 dims"):
        make_plan(zero_mapper(SOURCE, wide))
