"""KVMapper on real caches: against the equation per head, and invariant where it must be."""

import pytest
import torch
from mapping import config_for, identity_mapper, random_mapper
from tiny import tiny_model

import kvhub.mapper
from kvhub import KVMapper, MapperConfig
from kvhub.cache import build_cache, cache_of, prefill
from kvhub.errors import IncompatiblePairError, UsageError, VerificationError
from kvhub.rope import apply_rope, strip_rope

VOCABULARY = 64


def prompt(batch=2, tokens=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)


@pytest.fixture(scope="module")
def source():
    return tiny_model("qwen3", 3, seed=1)


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama", 4, seed=2, head_dim=8)


def assert_caches_close(found, expected, rtol=1e-5, atol=1e-5):
    for a, b in zip(found.layers, expected.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=rtol, atol=atol)
        torch.testing.assert_close(a.values, b.values, rtol=rtol, atol=atol)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "ministral3", "glm4", "qwen2"])
@pytest.mark.parametrize("heads", ["all", "matched"])
def test_the_identity_maps_a_cache_to_itself(architecture, heads):
    model = tiny_model(architecture, 3)
    cache = cache_of(prefill(model, prompt()))
    assert_caches_close(identity_mapper(model, heads)(cache), cache)


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_mapping_is_the_equation_per_head(source, target, heads):
    """K[l, h] = apply_rope(concat(strip_rope(K_s of chosen layers)) W[l, h] + b[l, h])."""
    mapper = random_mapper(source, target, heads)
    cache = cache_of(prefill(source, prompt()))
    found = mapper(cache)
    config = mapper.config
    positions = torch.arange(9)
    for layer, chosen in enumerate(config.selection):
        for head in range(2):
            group, column = (0, head) if heads == "all" else (head, 0)
            columns = slice(column * 8, column * 8 + 8)
            read = range(2) if heads == "all" else (head,)
            for kind, weight, bias in (
                ("keys", mapper.key_weight, mapper.key_bias),
                ("values", mapper.value_weight, mapper.value_bias),
            ):
                parts = []
                for source_layer in chosen:
                    states = getattr(cache.layers[source_layer], kind).double()
                    if kind == "keys":
                        states = strip_rope(states, positions, config.source.rope)
                    parts += [states[:, other] for other in read]
                x = torch.cat(parts, dim=-1)
                expected = x @ weight[layer, group, :, columns].double()
                expected += bias[layer, group, columns].double()
                if kind == "keys":
                    rotated = apply_rope(expected[:, None], positions, config.target.rope)
                    expected = rotated[:, 0]
                states = getattr(found.layers[layer], kind)[:, head].double()
                torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_chunks_and_batches_do_not_show(source, target, heads, monkeypatch):
    mapper = random_mapper(source, target, heads)
    cache = cache_of(prefill(source, prompt(3, 17)))
    whole = mapper(cache)
    monkeypatch.setattr(kvhub.mapper, "WORKSPACE_BYTES", 1)
    assert mapper._tokens_at_once(3) == 1
    assert_caches_close(mapper(cache), whole)
    for row in range(3):
        single = build_cache(
            [layer.keys[row : row + 1] for layer in cache.layers],
            [layer.values[row : row + 1] for layer in cache.layers],
        )
        expected = build_cache(
            [layer.keys[row : row + 1] for layer in whole.layers],
            [layer.values[row : row + 1] for layer in whole.layers],
        )
        assert_caches_close(mapper(single), expected)


def test_left_padding_does_not_show(source, target):
    mapper = random_mapper(source, target)
    ids = prompt(1, 6)
    padded = torch.cat([torch.full((1, 4), 5), ids], dim=1)
    mask = torch.tensor([[0] * 4 + [1] * 6])
    plain = mapper(cache_of(prefill(source, ids)))
    mapped = mapper(cache_of(prefill(source, padded, attention_mask=mask)), attention_mask=mask)
    for a, b in zip(mapped.layers, plain.layers, strict=True):
        torch.testing.assert_close(a.keys[:, :, 4:], b.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.values[:, :, 4:], b.values, rtol=1e-4, atol=1e-4)
        assert torch.isfinite(a.keys).all()


def test_positions_may_start_anywhere(source, target):
    """Content does not depend on where it stands: only the target's rotation moves."""
    mapper = random_mapper(source, target)
    cache = cache_of(prefill(source, prompt(1, 5)))
    near = mapper(cache)
    shift = torch.arange(1000, 1005)
    moved = build_cache(
        [
            apply_rope(
                strip_rope(layer.keys, torch.arange(5), mapper.config.source.rope),
                shift,
                mapper.config.source.rope,
            )
            for layer in cache.layers
        ],
        [layer.values for layer in cache.layers],
    )
    far = mapper(moved, positions=shift)
    for a, b in zip(near.layers, far.layers, strict=True):
        here = strip_rope(a.keys, torch.arange(5), mapper.config.target.rope)
        there = strip_rope(b.keys, shift, mapper.config.target.rope)
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.values, b.values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_cache_keeps_its_dtype_and_its_precision(source, target, dtype):
    """Against float64 arithmetic on the same rounded input; only the result is rounded again."""
    exact = random_mapper(source, target, dtype=torch.float64)
    mapper = random_mapper(source, target, dtype=torch.float32)
    reference = cache_of(prefill(source, prompt()))
    rounded = build_cache(
        [layer.keys.to(dtype) for layer in reference.layers],
        [layer.values.to(dtype) for layer in reference.layers],
    )
    doubled = build_cache(
        [layer.keys.double() for layer in rounded.layers],
        [layer.values.double() for layer in rounded.layers],
    )
    found, expected = mapper(rounded), exact(doubled)
    tolerance = max(torch.finfo(dtype).eps, 1e-5)
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert a.keys.dtype == a.values.dtype == dtype
        torch.testing.assert_close(a.keys.double(), b.keys, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(a.values.double(), b.values, rtol=tolerance, atol=tolerance)
    assert mapper(rounded, dtype=torch.float32).layers[0].keys.dtype == torch.float32


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_cache_that_is_not_finite_is_refused(source, target, bad):
    mapper = random_mapper(source, target)
    cache = cache_of(prefill(source, prompt()))
    cache.layers[2].values[1, 0, 4, 3] = bad
    with pytest.raises(VerificationError, match="layer 2, row 1, KV head 0, position 4"):
        mapper(cache)


def test_overflow_of_the_result_is_refused(source, target):
    mapper = random_mapper(source, target)
    mapper.value_bias += 1e5  # above float16's largest number
    cache = cache_of(prefill(source, prompt()))
    with pytest.raises(VerificationError, match="mapped cache is not finite"):
        mapper(cache, dtype=torch.float16)


def test_a_cache_of_another_model_is_refused(source, target):
    mapper = random_mapper(source, target)
    with pytest.raises(IncompatiblePairError, match=r"expected .*\(3, 2, 16\), found \(4, 2, 8\)"):
        mapper(cache_of(prefill(target, prompt())))


def test_wrong_masks_and_positions_are_refused(source, target):
    mapper = random_mapper(source, target)
    cache = cache_of(prefill(source, prompt()))
    with pytest.raises(UsageError, match="attention_mask"):
        mapper(cache, attention_mask=torch.ones(2, 8))
    with pytest.raises(UsageError, match="positions"):
        mapper(cache, positions=torch.arange(8))
    with pytest.raises(UsageError, match="not both"):
        mapper(cache, positions=torch.arange(9), attention_mask=torch.ones(2, 9))


def test_gathered_and_summed_products_are_the_same():
    """A GPU takes the first way and a CPU the second."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    sources, weight, bias = [normal(2, 5, 4) for _ in range(3)], normal(2, 12, 6), normal(2, 1, 6)
    expected = torch.einsum("grf,gfo->gro", torch.cat(sources, dim=-1), weight) + bias
    for gather in (True, False):
        found = kvhub.mapper.multiply(sources, weight, bias, gather=gather)
        torch.testing.assert_close(found, expected)


def test_a_config_survives_json_and_refuses_unknown_keys(source, target):
    config = config_for(source, target)
    data = config.to_dict()
    assert MapperConfig.from_dict(data) == config
    with pytest.raises(VerificationError, match=r"unknown keys \['flavour'\]"):
        MapperConfig.from_dict({**data, "flavour": "new"})
    with pytest.raises(VerificationError, match=r"missing keys \['ridge'\]"):
        MapperConfig.from_dict({key: data[key] for key in data if key != "ridge"})
    with pytest.raises(VerificationError, match="schema version 2"):
        MapperConfig.from_dict({**data, "schema_version": 2})
    for change in (
        {"top_k": 2},
        {"heads": "some"},
        {"selection": [[0]] * 3},
        {"selection": [[3], [0], [0], [0]]},
    ):
        with pytest.raises(VerificationError, match="contradicts itself"):
            MapperConfig.from_dict({**data, **change})


def test_tensors_must_fit_the_config(source, target):
    mapper = random_mapper(source, target)
    tensors = mapper.tensors()
    tensors["key_bias"] = tensors["key_bias"][..., :-1]
    with pytest.raises(VerificationError, match="do not fit the config"):
        KVMapper(mapper.config, tensors)
