"""Hand-off: with the target's own cache it writes, token for token, what `generate` writes."""

import pytest
import torch
from mapping import identity_mapper, random_mapper
from tiny import tiny_model

from kvhub import handoff
from kvhub.cache import cache_of, prefill
from kvhub.errors import IncompatiblePairError, UsageError, VerificationError
from kvhub.exact import choose_exact, predicted_damage
from kvhub.generation import generate_from, prefill_mapped

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", 3)


@pytest.fixture(scope="module")
def other():
    return tiny_model("qwen3", 2, seed=7)


def prompt(batch=1, tokens=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (batch, tokens), generator=generator)


def native(model, ids, mask=None):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, **GREEDY)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "ministral3", "glm4"])
@pytest.mark.parametrize(("exact_prefix", "exact_suffix"), [(0, 1), (4, 1), (4, 5), (0, 3)])
def test_the_own_cache_gives_native_generation(architecture, exact_prefix, exact_suffix):
    model = tiny_model(architecture, 3)
    ids = prompt(2)
    found = handoff(
        identity_mapper(model),
        model,
        model,
        ids,
        max_new_tokens=12,
        exact_prefix=exact_prefix,
        exact_suffix=exact_suffix,
        **GREEDY,
    )
    assert torch.equal(found, native(model, ids))


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 6])
def test_short_prompts_work(model, tokens):
    ids = prompt(1, tokens)
    found = handoff(identity_mapper(model), model, model, ids, max_new_tokens=12, **GREEDY)
    assert torch.equal(found, native(model, ids))


@pytest.mark.parametrize("exact_prefix", [0, 4])
def test_left_padded_rows_continue_like_single_ones(model, exact_prefix):
    ids = prompt(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    ids[0, :5] = 0
    found = handoff(
        identity_mapper(model),
        model,
        model,
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        exact_prefix=exact_prefix,
        **GREEDY,
    )
    assert torch.equal(found[0, 5:], native(model, ids[:1, 5:])[0])
    assert torch.equal(found[1], native(model, ids[1:])[0])


@pytest.mark.parametrize("cached", [3, 11, 12])
def test_a_source_cache_at_hand_is_used_and_not_changed(model, cached):
    """Shorter than the prompt, without its last token, and all of it."""
    ids = prompt()
    cache = cache_of(prefill(model, ids[:, :cached]))
    before = [layer.keys.clone() for layer in cache.layers]
    found = handoff(
        identity_mapper(model), model, model, ids, max_new_tokens=12, source_cache=cache, **GREEDY
    )
    assert torch.equal(found, native(model, ids))
    assert cache.get_seq_length() == cached
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


def test_exact_regions_are_the_targets_own(model, other):
    """Whatever the map does, the first tokens are exact and the rest is the map's."""
    ids = prompt(2)
    mapper = random_mapper(other, model)
    found = prefill_mapped(mapper, other, model, ids, exact_prefix=4, exact_suffix=3)
    assert found.get_seq_length() == 9
    own = cache_of(prefill(model, ids))
    mapped = mapper(cache_of(prefill(other, ids[:, :9])))
    for a, b, c in zip(found.layers, own.layers, mapped.layers, strict=True):
        torch.testing.assert_close(a.keys[:, :, :4], b.keys[:, :, :4], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a.values[:, :, :4], b.values[:, :, :4], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a.keys[:, :, 4:], c.keys[:, :, 4:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a.values[:, :, 4:], c.values[:, :, 4:], rtol=1e-4, atol=1e-5)


def test_the_suffix_runs_on_top_of_the_mapped_prefix(model, other):
    ids = prompt()
    mapper = random_mapper(other, model)
    cache = prefill_mapped(mapper, other, model, ids, exact_suffix=3)
    expected = prefill(model, ids[:, 9:], cache=cache).logits[:, -1].argmax(-1)
    found = handoff(mapper, other, model, ids, max_new_tokens=1, exact_suffix=3, **GREEDY)
    assert int(found[0, -1]) == int(expected)


def test_the_target_cache_has_the_targets_dtype(model, other):
    wide = tiny_model("qwen3", 3, dtype=torch.float64)
    found = prefill_mapped(random_mapper(other, model), other, wide, prompt(), exact_prefix=0)
    assert found.layers[0].keys.dtype == torch.float64


@pytest.mark.parametrize("padded", [False, True])
def test_a_budget_for_the_whole_prompt_gives_native_generation(model, other, padded):
    """With the worst of maps; a budget of nothing shows that it is one."""
    ids = prompt(2)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, **GREEDY}
    mapper = random_mapper(other, model)
    # The exact prefix of 4 reaches behind the padding of the shortest row, the rest is chosen.
    found = handoff(mapper, other, model, ids, exact_budget=11, exact_suffix=2, **options)
    assert torch.equal(found, native(model, ids, mask))
    found = handoff(mapper, other, model, ids, exact_budget=0, exact_suffix=2, **options)
    assert not torch.equal(found, native(model, ids, mask))


def test_a_budget_chooses_the_tokens_itself(model, other):
    ids = prompt()
    mapper = random_mapper(other, model)
    given = cache_of(prefill(other, ids[:, :4]))
    with pytest.raises(UsageError, match="neither with a policy nor with a source cache"):
        handoff(mapper, other, model, ids, exact_budget=6, source_cache=given)
    damage, source_cache = predicted_damage(other, ids[:, :-1])
    regions = choose_exact(damage, 7)
    cache = prefill_mapped(
        mapper, other, model, ids, exact_positions=regions.positions, source_cache=source_cache
    )
    expected = generate_from(model, ids, cache, max_new_tokens=8, **GREEDY)
    found = handoff(mapper, other, model, ids, exact_budget=7, max_new_tokens=8, **GREEDY)
    assert torch.equal(found, expected)
    short = handoff(mapper, other, model, ids[:, :1], exact_budget=7, max_new_tokens=8, **GREEDY)
    assert torch.equal(short, native(model, ids[:, :1])[:, :9])


def test_a_cache_as_long_as_the_prompt_is_refused(model):
    """transformers 5.24 takes it without a word and writes wrong text."""
    ids = prompt()
    cache = cache_of(prefill(model, ids))
    with pytest.raises(UsageError, match="The cache has 12 tokens, the prompt 12"):
        generate_from(model, ids, cache, max_new_tokens=4)
    with pytest.raises(UsageError, match="exact_suffix must be at least 1"):
        handoff(identity_mapper(model), model, model, ids, exact_suffix=0)
    longer = cache_of(prefill(model, prompt(1, 13)))
    with pytest.raises(UsageError, match="source cache has 13 tokens, the prompt only 12"):
        handoff(identity_mapper(model), model, model, ids, source_cache=longer)


def test_other_models_are_refused(model, other):
    mapper = random_mapper(other, model)
    with pytest.raises(IncompatiblePairError, match="source model"):
        handoff(mapper, model, model, prompt())
    with pytest.raises(IncompatiblePairError, match="target model"):
        handoff(mapper, other, other, prompt())


def test_right_padding_and_broken_caches_are_refused(model, other):
    ids = prompt(2)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    with pytest.raises(UsageError, match="left"):
        handoff(identity_mapper(model), model, model, ids, attention_mask=mask)
    cache = cache_of(prefill(other, prompt()))
    cache.layers[0].keys[0, 0, 6, 0] = float("nan")
    with pytest.raises(VerificationError, match="not finite"):
        handoff(random_mapper(other, model), other, model, prompt(), source_cache=cache)
