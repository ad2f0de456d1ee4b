import dataclasses

import pytest
import torch
from tiny import ARCHITECTURES, LLAMA3, MINISTRAL3_ROPE, YARN, tiny_model

import kvhub.architectures
from kvhub.cache import cache_of, read_cache
from kvhub.errors import UsageError
from kvhub.rope import apply_rope, strip_rope
from kvhub.spec import ModelSpec, RopeSpec

# Every architecture in the form of its published config, then the kinds of RoPE it could also have.
MODELS = {
    **{architecture: (architecture, {}) for architecture in ARCHITECTURES},
    "mistral3": ("mistral3", {}),
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "yarn-scaled": ("qwen3", {"rope_scaling": YARN}),
    "yarn-factor": ("qwen2", {"rope_scaling": {**YARN, "attention_factor": 0.8}}),
    "partial-yarn": ("glm4", {"rope_scaling": YARN}),
    "partial-llama3": ("stablelm", {"rope_scaling": LLAMA3}),
}
POSITIONS = torch.tensor([0, 1, 2, 511, 8191, 8192, 32767])


@pytest.fixture(params=MODELS)
def model_id(request):
    return request.param


def build(model_id, dtype=torch.float32):
    architecture, overrides = MODELS[model_id]
    return tiny_model(architecture, dtype=dtype, **overrides)


def text_layers(model):
    """The decoder layers, wherever the wrapper keeps them."""
    for name, module in model.named_modules():
        if name.endswith("layers") and "vision" not in name:
            return module
    raise AssertionError("no layers")


def keys_before_rotation(model, spec, run):
    """The keys of every layer hooked where the modeling code has them last before it rotates."""
    found = []

    def keep(module, arguments, output):
        if output.shape[-1] != spec.head_dim:
            if getattr(module, "is_qkv", False):
                start = spec.attention_heads * spec.head_dim
                output = output[..., start : start + spec.kv_dim]
            output = output.unflatten(-1, (spec.kv_heads, spec.head_dim))
        # Some models normalise before they move the heads to the front, some after.
        heads_first = output.shape[1] == spec.kv_heads
        found.append((output if heads_first else output.transpose(1, 2)).clone())

    handles = []
    for layer in text_layers(model):
        attention = layer.self_attn
        for name in ("k_norm", "k_layernorm", "k_proj", "qkv_proj"):
            if hasattr(attention, name):
                module = getattr(attention, name)
                module.is_qkv = name == "qkv_proj"
                handles.append(module.register_forward_hook(keep))
                break
    output = run()
    for handle in handles:
        handle.remove()
    return found, read_cache(cache_of(output), spec)[0]


@torch.no_grad()
def hooked(model, spec, positions):
    tokens = torch.arange(positions.shape[-1])[None] * 5 % 60 + 4
    positions = positions if positions.dim() == 2 else positions[None]
    tokens = tokens.expand(len(positions), -1)

    def run():
        return model(input_ids=tokens, position_ids=positions, use_cache=True)

    content, rotated = keys_before_rotation(model, spec, run)
    assert len(content) == len(rotated) == spec.num_layers
    return content, rotated


def relative_pair_errors(found, expected, rope):
    """Length of the error in each pair of dims, relative to the length of the pair."""

    def pairs(keys):
        rotating = keys[..., : rope.rotary_dim]
        shape = (-1, 2) if rope.interleaved else (2, -1)
        pair_dim = -1 if rope.interleaved else -2
        return rotating.unflatten(-1, shape).norm(dim=pair_dim)

    return pairs(found - expected) / pairs(expected)


def test_every_supported_model_type_is_tested_here():
    assert set(kvhub.architectures.ARCHITECTURES) == set(ARCHITECTURES)


def test_stripped_cache_is_the_keys_before_rotation(model_id):
    model = build(model_id)
    spec = ModelSpec.from_model(model)
    assert spec.unsupported == ()
    content, rotated = hooked(model, spec, POSITIONS)
    for before, after in zip(content, rotated, strict=True):
        assert (before - after).abs().max() > 0.1  # or the model did not rotate at all
        torch.testing.assert_close(
            strip_rope(after, POSITIONS, spec.rope), before, rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(
            apply_rope(before, POSITIONS, spec.rope), after, rtol=1e-5, atol=1e-5
        )


def test_stripped_bfloat16_cache_is_the_keys_before_rotation(model_id):
    model = build(model_id, torch.bfloat16)
    spec = ModelSpec.from_model(model)
    content, rotated = hooked(model, spec, POSITIONS)
    # The model rounds cos and sin, two products and their sum, each to within 2 ** -8. For a pair
    # of length 1 that makes at most (2 sqrt(2) + 1) roundings in each of two dims, so 5.4 of them.
    rounding = 2**-8
    for before, after in zip(content, rotated, strict=True):
        assert after.dtype == torch.bfloat16
        stripped = strip_rope(after, POSITIONS, spec.rope)
        assert stripped.dtype == torch.float32
        errors = relative_pair_errors(stripped, before.float(), spec.rope)
        assert errors.max() < 5.4 * rounding
        assert errors.square().mean().sqrt() < 1.5 * rounding


def test_frequencies_are_those_of_the_live_model(model_id):
    model = build(model_id)
    rope = ModelSpec.from_model(model).rope
    rotary = next(
        module
        for name, module in model.named_modules()
        if name.endswith("rotary_emb") and "vision" not in name
    )
    assert rope.inv_freq == tuple(rotary.inv_freq.tolist())
    assert rope.attention_scaling == rotary.attention_scaling


def test_attention_scaling_is_more_than_one_where_yarn_says_so():
    # 0.1 ln(factor) + 1; Ministral 3 cancels it with mscale_all_dim.
    assert ModelSpec.from_model(build("yarn-scaled")).rope.attention_scaling == pytest.approx(
        1.2772589
    )
    assert ModelSpec.from_model(build("yarn-factor")).rope.attention_scaling == 0.8
    assert MINISTRAL3_ROPE["mscale_all_dim"] == 1.0
    assert ModelSpec.from_model(build("ministral3")).rope.attention_scaling == 1.0


def test_rows_with_their_own_positions():
    model = build("glm4")
    spec = ModelSpec.from_model(model)
    positions = torch.stack([POSITIONS, POSITIONS.flip(0) + 3])
    content, rotated = hooked(model, spec, positions)
    stacked = torch.stack(rotated)  # [layers, batch, kv_heads, tokens, head_dim]
    torch.testing.assert_close(
        strip_rope(stacked, positions, spec.rope), torch.stack(content), rtol=1e-5, atol=1e-5
    )
    for row in range(2):
        alone = strip_rope(stacked[:, row], positions[row], spec.rope)
        assert torch.equal(strip_rope(stacked, positions, spec.rope)[:, row], alone)


def test_one_row_of_positions_serves_a_batch():
    rope = make_rope()
    keys = torch.randn(3, 2, 5, 8)
    positions = torch.arange(5)
    assert torch.equal(apply_rope(keys, positions[None], rope), apply_rope(keys, positions, rope))


def make_rope(**changes):
    inv_freq = tuple(torch.tensor([1.0, 0.1, 0.01]).tolist())
    rope = RopeSpec("yarn", 1e4, (), 6, False, 1.25, inv_freq)
    return dataclasses.replace(rope, **changes)


@pytest.mark.parametrize("interleaved", [False, True])
def test_dims_past_the_rotating_ones_are_untouched(interleaved):
    keys = torch.randn(2, 4, 8)
    rope = make_rope(interleaved=interleaved)
    for function in (strip_rope, apply_rope):
        turned = function(keys, torch.arange(4) + 9, rope)
        assert torch.equal(turned[..., 6:], keys[..., 6:])
        assert not torch.isclose(turned[..., :6], keys[..., :6]).any(dim=-1).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_turn_together(interleaved):
    # One unit vector, one position: its image has cos in its own dim, sin in its partner's.
    rope = make_rope(interleaved=interleaved, attention_scaling=1.0)
    keys = torch.zeros(1, 1, 6)
    keys[..., 0] = 1.0
    turned = apply_rope(keys, torch.tensor([1]), rope).flatten()
    partner = 1 if interleaved else 3
    assert turned[0] == pytest.approx(0.5403023)
    assert turned[partner] == pytest.approx(0.8414710)
    assert turned.count_nonzero() == 2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_apply_undoes_strip(dtype, tolerance):
    rope = make_rope()
    keys = torch.randn(2, 6, 8, dtype=dtype)
    positions = torch.arange(6) * 6000
    there = strip_rope(keys, positions, rope)
    assert there.dtype == dtype
    back = apply_rope(there, positions, rope)
    torch.testing.assert_close(back, keys, rtol=0, atol=tolerance)


def test_input_is_not_changed():
    keys = torch.randn(2, 6, 8)
    before = keys.clone()
    strip_rope(keys, torch.arange(6), make_rope())
    apply_rope(keys, torch.arange(6), make_rope())
    assert torch.equal(keys, before)


@pytest.mark.parametrize(
    ("shape", "positions", "message"),
    [
        ((2, 5, 8), torch.arange(4), r"positions \[5\]"),
        ((2, 5, 8), torch.arange(5)[None], r"positions \[5\]"),
        ((3, 2, 5, 8), torch.zeros(2, 5, dtype=torch.long), r"positions of shape \[2, 5\]"),
        ((2, 5, 8), torch.tensor(5), r"positions \[5\]"),
        ((2, 5, 8), torch.arange(5.0), "integers, found torch.float32"),
        ((2, 5, 8), torch.ones(5, dtype=torch.bool), "integers, found torch.bool"),
        ((2, 5, 4), torch.arange(5), r"at least 6.* found shape \[2, 5, 4\]"),
        ((5, 8), torch.arange(5), r"found shape \[5, 8\]"),
    ],
)
def test_shapes_that_do_not_fit(shape, positions, message):
    for function in (strip_rope, apply_rope):
        with pytest.raises(UsageError, match=message):
            function(torch.zeros(shape), positions, make_rope())


def test_integer_keys_are_refused():
    with pytest.raises(UsageError, match=r"floating point, found torch\.int64"):
        strip_rope(torch.zeros(2, 5, 8, dtype=torch.long), torch.arange(5), make_rope())
