import copy
import dataclasses
import json
import math
import re

import pytest
import torch
from published import PUBLISHED, llama, ministral3, new_form, qwen3
from tiny import ARCHITECTURES, LLAMA3, tiny_config, tiny_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvhub.errors import (
    IncompatiblePairError,
    VerificationError,
)
from kvhub.spec import ModelSpec, RopeSpec


@pytest.fixture(params=PUBLISHED)
def published(request):
    return copy.deepcopy(PUBLISHED[request.param])


def test_published_configs(published):
    raw, expected = published
    spec = ModelSpec.from_config(raw, "org/name", "0" * 40)
    found = (
        spec.model_type,
        spec.num_layers,
        spec.attention_heads,
        spec.kv_heads,
        spec.head_dim,
        spec.hidden_size,
        spec.max_positions,
        spec.qk_norm,
        spec.rope.rope_type,
        spec.rope.rope_theta,
        spec.rope.rotary_dim,
        spec.rope.interleaved,
    )
    assert found == expected
    assert spec.unsupported == ()
    assert spec.sliding_window is None
    assert spec.layer_types == ("full_attention",) * spec.num_layers
    assert spec.dtype == "bfloat16"
    assert spec.kv_dim == spec.kv_heads * spec.head_dim
    assert (spec.model_id, spec.revision, spec.tokenizer_digest) == ("org/name", "0" * 40, None)


def test_old_and_new_form_give_one_spec(published):
    raw, _ = published
    spec = ModelSpec.from_config(raw)
    assert ModelSpec.from_config(new_form(raw)) == spec
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(raw))
    assert ModelSpec.from_config(config) == spec
    # What save_pretrained would write.
    assert ModelSpec.from_config(json.loads(config.to_json_string(use_diff=True))) == spec
    assert ModelSpec.from_config(json.loads(config.to_json_string(use_diff=False))) == spec


def test_reading_changes_no_config(published):
    raw, _ = published
    before = copy.deepcopy(raw)
    ModelSpec.from_config(raw)
    assert raw == before
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(raw))
    text = config.get_text_config()
    as_read = copy.deepcopy(text.rope_parameters)
    ModelSpec.from_config(config)
    assert text.rope_parameters == as_read


def test_json_round_trip_is_exact(published):
    raw, _ = published
    spec = ModelSpec.from_config(raw, "org/name", "0" * 40, "1" * 64)
    read = ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert read == spec
    assert hash(read) == hash(spec)
    assert json.dumps(read.to_dict()) == json.dumps(spec.to_dict())


def test_numbers_have_one_form():
    ints = {**LLAMA3, "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    first = ModelSpec.from_config(tiny_config("llama"))
    second = ModelSpec.from_config(tiny_config("llama", rope_scaling=ints, rope_theta=500000))
    assert json.dumps(first.to_dict()) == json.dumps(second.to_dict())


def test_frequencies_against_the_formulas():
    default = ModelSpec.from_config(qwen3(28, 1024, 16)).rope.inv_freq
    expected = [1e6 ** (-2 * i / 128) for i in range(64)]
    assert default == pytest.approx(expected, rel=1e-6)

    plain = [5e5 ** (-2 * i / 128) for i in range(64)]
    scaled = ModelSpec.from_config(llama(32, 4096, 32, 8.0)).rope.inv_freq
    for frequency, unscaled in zip(scaled, plain, strict=True):
        wavelength = 2 * math.pi / unscaled
        if wavelength < 8192 / 4:
            assert frequency == pytest.approx(unscaled, rel=1e-6)
        elif wavelength > 8192:
            assert frequency == pytest.approx(unscaled / 8, rel=1e-6)
        else:
            assert unscaled / 8 < frequency < unscaled

    yarn = ModelSpec.from_config(ministral3(26, 3072, 1e6)).rope
    assert yarn.inv_freq[0] == pytest.approx(1.0)
    assert yarn.inv_freq[-1] == pytest.approx(1e6 ** (-126 / 128) / 16, rel=1e-6)
    assert yarn.attention_scaling == 1.0

    linear = tiny_config("llama", rope_scaling={"type": "linear", "factor": 4.0})
    assert ModelSpec.from_config(linear).rope.inv_freq[0] == 0.25


def test_frequencies_are_exact_float32():
    inv_freq = ModelSpec.from_config(llama(32, 4096, 32, 8.0)).rope.inv_freq
    assert torch.tensor(inv_freq, dtype=torch.float32).tolist() == list(inv_freq)


def test_the_two_llama_factors_give_two_specs():
    # 3.1 and 3.2 agree in KV heads and head_dim; only the factor tells them apart.
    first = ModelSpec.from_config(llama(32, 4096, 32, 8.0)).rope
    second = ModelSpec.from_config(llama(28, 3072, 24, 32.0)).rope
    assert first.inv_freq != second.inv_freq
    assert first.inv_freq[:20] == second.inv_freq[:20]


def test_class_defaults_fill_in_what_the_file_leaves_out():
    raw = qwen3(28, 1024, 16)
    del raw["head_dim"]
    assert ModelSpec.from_config(raw).head_dim == 128  # not 1024 / 16
    raw = llama(32, 4096, 32, 8.0)
    del raw["torch_dtype"]
    assert ModelSpec.from_config(raw).dtype == "float32"


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "mistral3"])
def test_live_models(architecture):
    model = tiny_model(architecture, dtype=torch.bfloat16)
    spec = ModelSpec.from_model(model)
    assert spec.dtype == "bfloat16"
    described = ModelSpec.from_config(tiny_config(architecture))
    assert dataclasses.replace(described, dtype="bfloat16") == spec


SLIDING = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 4096,
    "factor": 16.0,
}
REFUSED = {
    "sliding": (tiny_config("qwen3", 3, **SLIDING), "2 of its 3 layers are sliding_attention"),
    "all sliding": (
        tiny_config("mistral", sliding_window=4096),
        "2 of its 2 layers are sliding_attention",
    ),
    "hybrid": (
        {"model_type": "qwen3_next", "num_hidden_layers": 4},
        "3 of its 4 layers are linear_attention",
    ),
    "chunked": (
        {"model_type": "llama4_text", "num_hidden_layers": 4},
        "3 of its 4 layers are chunked_attention",
    ),
    "MLA": ({"model_type": "deepseek_v3"}, r"latent of rank 512 .*\(MLA\)"),
    "sinks": ({"model_type": "gpt_oss"}, "its attention has learned sinks"),
    "dynamic": (
        tiny_config("llama", rope_scaling={"type": "dynamic", "factor": 2.0}),
        r"depends on the sequence length \(type dynamic\)",
    ),
    "longrope": (
        tiny_config("phi3", rope_scaling=LONGROPE),
        r"depends on the sequence length \(type longrope\)",
    ),
    "proportional": (
        tiny_config("llama", rope_scaling={"rope_type": "proportional"}),
        "its RoPE has type proportional, supported are",
    ),
    "no RoPE in some layers": (
        tiny_config("smollm3", 4, no_rope_layer_interval=4),
        "1 of its 4 layers have no RoPE",
    ),
    "no RoPE": ({"model_type": "gpt2"}, "it has no RoPE"),
    "RoPE by layer type": ({"model_type": "gemma3_text"}, "for each layer type"),
    "pairing not verified": ({"model_type": "olmo2"}, "pairs the dims .* not been verified"),
    "partial but ignored": (
        tiny_config("qwen3", partial_rotary_factor=0.5),
        "partial_rotary_factor is 0.5, which qwen3 code ignores",
    ),
    "KV sharing": (
        tiny_config("qwen3", num_kv_shared_layers=1),
        r"read the cache of other layers \(KV sharing\)",
    ),
    "other value size": (
        tiny_config("qwen3", v_head_dim=8),
        "its values have 8 dims per head, unlike its keys",
    ),
    "heterogeneous": (
        tiny_config("llama", per_layer_config={"1": {"num_key_value_heads": 4}}),
        "heterogeneous layers",
    ),
    "heterogeneous head_dim": ({"model_type": "gemma4_text"}, "heterogeneous layers"),
    "encoder-decoder": ({"model_type": "t5gemma"}, "encoder-decoder"),
}


@pytest.mark.parametrize("raw_and_reason", REFUSED.values(), ids=REFUSED)
def test_unsupported_models_say_why(raw_and_reason):
    raw, reason = raw_and_reason
    spec = ModelSpec.from_config(raw)
    assert any(re.search(reason, found) for found in spec.unsupported), spec.unsupported
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_every_reason_is_given():
    rope_scaling = {"type": "dynamic", "factor": 2.0}
    spec = ModelSpec.from_config(tiny_config("qwen3", 3, **SLIDING, rope_scaling=rope_scaling))
    assert len(spec.unsupported) == 2
    assert spec.sliding_window == 64


def test_length_dependent_rope_is_still_described():
    raw = tiny_config("llama", rope_scaling={"type": "dynamic", "factor": 2.0})
    rope = ModelSpec.from_config(raw).rope
    assert (rope.rope_type, rope.rotary_dim, dict(rope.parameters)) == (
        "dynamic",
        16,
        {"factor": 2},
    )


def test_a_window_that_is_switched_off_does_not_count():
    spec = ModelSpec.from_config(tiny_config("qwen2", sliding_window=32, use_sliding_window=False))
    assert spec.sliding_window is None
    assert spec.unsupported == ()


def test_a_model_without_rope_has_none_to_give():
    spec = ModelSpec.from_config({"model_type": "gpt2"}, "openai/gpt2")
    assert spec.rope is None
    with pytest.raises(IncompatiblePairError, match=r"none in openai/gpt2: .*has no RoPE"):
        spec.require_rope()
    supported = ModelSpec.from_config(tiny_config("qwen3"))
    assert supported.require_rope() is supported.rope


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        ({}, VerificationError, "Expected a model_type in config.json, found None"),
        ({"model_type": 3}, VerificationError, "Expected a model_type in config.json, found 3"),
        ({"model_type": "qwen99"}, IncompatiblePairError, "'qwen99' is unknown"),
        ({"model_type": "mamba"}, IncompatiblePairError, "num_attention_heads .* found None"),
        (tiny_config("qwen3", hidden_size="wide"), VerificationError, "qwen3 model cannot be read"),
        (
            tiny_config("llama", rope_scaling={"rope_type": "llama3"}),
            VerificationError,
            "llama model cannot be read: .*factor",
        ),
        (
            tiny_config("llama", rope_scaling={**LLAMA3, "rope_theta": "big"}),
            VerificationError,
            "Expected numbers in the RoPE parameters of a llama config, found .*big",
        ),
    ],
)
def test_configs_that_cannot_be_read(raw, error, message):
    with pytest.raises(error, match=message):
        ModelSpec.from_config(raw)


def changed(spec, **values):
    data = json.loads(json.dumps(spec.to_dict()))
    for path, value in values.items():
        *parents, name = path.split("__")
        place = data
        for parent in parents:
            place = place[parent]
        place[name] = value
    return data


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"extra": 1}, "Expected a model spec with the keys .* found .*extra"),
        ({"rope__extra": 1}, "Expected a rope spec with the keys .* found .*extra"),
        ({"num_layers": "2"}, "Expected num_layers of a model spec to be int, found '2'"),
        ({"num_layers": True}, "Expected num_layers of a model spec to be int, found True"),
        ({"kv_heads": 0}, "Expected kv_heads of a model spec to be int, found 0"),
        ({"num_layers": 3}, "names 2 layer types, expected one for each of its 3 layers"),
        ({"revision": 1}, "Expected revision of a model spec"),
        ({"layer_types": "full_attention"}, "Expected layer_types of a model spec"),
        ({"layer_types": [1, 2]}, "Expected layer_types of a model spec"),
        ({"rope__inv_freq": [1.0]}, "has 1 inverse frequencies, expected 8"),
        ({"rope__inv_freq": ["a"] * 8}, "Expected inv_freq of a rope spec"),
        ({"rope__interleaved": 0}, "Expected interleaved of a rope spec to be bool, found 0"),
        ({"rope": []}, "Expected rope of a model spec"),
    ],
)
def test_from_dict_refuses_what_to_dict_never_wrote(values, message):
    spec = ModelSpec.from_config(tiny_config("qwen3"))
    with pytest.raises(VerificationError, match=message):
        ModelSpec.from_dict(changed(spec, **values))


def test_from_dict_refuses_missing_keys_and_other_types():
    data = ModelSpec.from_config(tiny_config("qwen3")).to_dict()
    del data["head_dim"]
    with pytest.raises(VerificationError, match="head_dim"):
        ModelSpec.from_dict(data)
    with pytest.raises(VerificationError, match="found list"):
        ModelSpec.from_dict([])
    with pytest.raises(VerificationError, match="found NoneType"):
        RopeSpec.from_dict(None)


def test_an_incomplete_live_config_stays_as_it_is():
    config = CONFIG_MAPPING["llama"].from_dict(tiny_config("llama"))
    config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    before = copy.deepcopy(config.rope_parameters)
    assert ModelSpec.from_config(config).rope.rope_type == "yarn"
    assert config.rope_parameters == before
