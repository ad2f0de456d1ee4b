import dataclasses

import pytest
import torch
from tiny import LLAMA3, YARN, tiny_model

from kvhub.errors import IncompatiblePairError
from kvhub.probe import verify_rope
from kvhub.spec import ModelSpec

ARCHITECTURES = ("qwen3", "qwen2", "llama", "mistral", "ministral3", "mistral3", "glm", "glm4")


def with_rope(spec, **changes):
    return dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, **changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_rotate_as_their_spec_says(architecture, dtype):
    model = tiny_model(architecture, dtype=dtype)
    verify_rope(model, ModelSpec.from_model(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changed",
    [
        {"rope_theta": 4e5},
        {"rope_scaling": {**LLAMA3, "factor": 32.0}},
        {"rope_scaling": None},
    ],
    ids=["theta", "factor", "unscaled"],
)
def test_other_frequencies_are_found(changed, dtype):
    model = tiny_model("llama", dtype=dtype)
    other = ModelSpec.from_model(tiny_model("llama", **changed))
    with pytest.raises(IncompatiblePairError, match=r"agree within 0\.02 .* found a relative"):
        verify_rope(model, other)


def test_one_wrong_frequency_is_found():
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    spec = ModelSpec.from_model(model)
    slow = (*spec.rope.inv_freq[:-1], spec.rope.inv_freq[-1] * 1.1)
    with pytest.raises(IncompatiblePairError, match="found a relative difference"):
        verify_rope(model, with_rope(spec, inv_freq=slow))


def test_other_pairing_is_found():
    model = tiny_model("glm4")
    spec = ModelSpec.from_model(model)
    with pytest.raises(IncompatiblePairError, match="found a relative difference"):
        verify_rope(model, with_rope(spec, interleaved=False))


@pytest.mark.parametrize(("actual", "claimed"), [(0.5, 0.25), (0.25, 0.5)])
def test_other_rotary_dims_are_found(actual, claimed):
    model = tiny_model("glm4", partial_rotary_factor=actual)
    spec = ModelSpec.from_model(tiny_model("glm4", partial_rotary_factor=claimed))
    with pytest.raises(IncompatiblePairError, match="found a relative difference"):
        verify_rope(model, spec)


def test_other_attention_scaling_is_found():
    # Both probes carry the same scaling, so their difference cannot show it.
    model = tiny_model("qwen3", rope_scaling=YARN)
    spec = ModelSpec.from_model(model)
    with pytest.raises(IncompatiblePairError, match=r"cos and sin by 1\.0, found \[1\.277"):
        verify_rope(model, with_rope(spec, attention_scaling=1.0))


def test_frequencies_rounded_by_a_cast_are_found():
    model = tiny_model("llama").to(torch.bfloat16)
    with pytest.raises(IncompatiblePairError) as caught:
        verify_rope(model, ModelSpec.from_model(model))
    assert "from_pretrained(..., dtype=...)" in caught.value.hint


def test_keys_without_rotation_are_found():
    model = tiny_model("qwen2")
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data.zero_()
        layer.self_attn.k_proj.bias.data.zero_()
    with pytest.raises(IncompatiblePairError, match="found the same keys"):
        verify_rope(model, ModelSpec.from_model(model))


def test_nan_keys_do_not_pass():
    model = tiny_model("qwen2")
    model.model.layers[0].self_attn.k_proj.weight.data.fill_(float("nan"))
    with pytest.raises(IncompatiblePairError, match="found a relative difference of nan"):
        verify_rope(model, ModelSpec.from_model(model))


def test_other_geometry_is_found():
    model = tiny_model("qwen3")
    spec = ModelSpec.from_model(tiny_model("qwen3", num_key_value_heads=4))
    with pytest.raises(IncompatiblePairError, match=r"expected .*4.* found .*2"):
        verify_rope(model, spec)


def test_the_model_stays_as_it_was():
    model = tiny_model("qwen3").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verify_rope(model, ModelSpec.from_model(model))
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_short_contexts_are_probed_within_their_length():
    model = tiny_model("qwen3", max_position_embeddings=8)
    verify_rope(model, ModelSpec.from_model(model))
