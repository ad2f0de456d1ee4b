"""Reading, building and extending transformers caches, on both ends of the supported range."""

import pytest
import torch
from tiny import tiny_config, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvhub import ModelSpec
from kvhub.cache import (
    build_cache,
    cache_argument,
    cache_of,
    concatenate_caches,
    crop_cache,
    positions_from_mask,
    prefill,
    read_cache,
)
from kvhub.errors import IncompatiblePairError, UsageError, VerificationError


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", 2)


def prompt(tokens=7):
    return torch.arange(3, 3 + tokens)[None]


def test_a_cache_read_and_built_again_continues_the_same(model):
    whole = model(prompt(7)).logits[:, -1]
    cache = cache_of(prefill(model, prompt(6)))
    again = build_cache(*read_cache(cache, ModelSpec.from_model(model)))
    output = prefill(model, prompt(7)[:, 6:], cache=again)
    torch.testing.assert_close(output.logits[:, -1], whole, rtol=1e-5, atol=1e-5)


def test_cut_and_joined_caches_are_the_whole(model):
    cache = cache_of(prefill(model, prompt(7)))
    joined = concatenate_caches(crop_cache(cache, 0, 3), crop_cache(cache, 3, 7))
    assert joined.get_seq_length() == 7
    for a, b in zip(joined.layers, cache.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)


def test_cropping_leaves_the_original_alone(model):
    cache = cache_of(prefill(model, prompt(7)))
    cropped = crop_cache(cache, 0, 3)
    cropped.layers[0].keys.zero_()
    prefill(model, prompt(7)[:, 3:], cache=cropped)
    assert cache.get_seq_length() == 7
    assert float(cache.layers[0].keys[:, :, :3].abs().min()) > 0


def test_left_padding_does_not_shift_positions(model):
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert positions_from_mask(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    padded = torch.cat([torch.full((1, 2), 9), prompt(3)], dim=1)
    with_padding = cache_of(prefill(model, padded, attention_mask=mask[:1]))
    plain = cache_of(prefill(model, prompt(3)))
    torch.testing.assert_close(
        with_padding.layers[1].keys[:, :, 2:], plain.layers[1].keys, rtol=1e-4, atol=1e-5
    )


def test_a_padded_prefill_may_come_in_two_parts(model):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    ids = torch.cat([torch.full((1, 2), 9), prompt(4)], dim=1)
    whole = prefill(model, ids, attention_mask=mask)
    first = cache_of(prefill(model, ids[:, :4], attention_mask=mask[:, :4]))
    second = prefill(model, ids[:, 4:], attention_mask=mask, cache=first)
    torch.testing.assert_close(second.logits, whole.logits[:, 4:], rtol=1e-4, atol=1e-5)


def test_the_argument_name_is_the_models_own(model):
    import inspect

    assert cache_argument(model) in inspect.signature(model.forward).parameters

    class Strange(torch.nn.Module):
        def forward(self, tokens):
            return tokens

    with pytest.raises(UsageError, match="neither"):
        cache_argument(Strange())
    with pytest.raises(UsageError, match="no cache"):
        cache_of(model(prompt(), use_cache=False))


def test_sliding_windows_are_refused():
    """Such a layer reports 20 tokens and stores 7: mapped, it would be a wrong cache."""
    raw = tiny_config("mistral", 2, sliding_window=8)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mistral"].from_dict(raw)).eval()
    cache = cache_of(prefill(model, prompt(20)))
    with pytest.raises(IncompatiblePairError, match="SlidingWindow"):
        read_cache(cache)


def test_other_kinds_of_cache_are_refused(model):
    static = StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(IncompatiblePairError, match="StaticLayer"):
        read_cache(cache_of(prefill(model, prompt(5), cache=static)))
    with pytest.raises(VerificationError, match="no layers"):
        read_cache(DynamicCache())


def test_uneven_and_foreign_caches_are_refused(model):
    spec = ModelSpec.from_model(model)
    cache = cache_of(prefill(model, prompt(5)))
    cache.layers[1].keys = cache.layers[1].keys[:, :, :4]
    with pytest.raises(VerificationError, match="differ in shape"):
        read_cache(cache, spec)
    other = cache_of(prefill(tiny_model("qwen3", 3), prompt(5)))
    with pytest.raises(IncompatiblePairError, match=r"expected .*\(2, 2, 16\), found \(3, 2, 16\)"):
        read_cache(other, spec)


def test_a_mask_of_the_wrong_length_is_refused(model):
    with pytest.raises(UsageError, match="cached and new"):
        prefill(model, prompt(5), attention_mask=torch.ones(1, 4))
