"""Tokens that the target computes itself: what they get, which are chosen, and for what budget."""

import pytest
import torch
from mapping import random_mapper
from tiny import tiny_model
from transformers import AttentionInterface

from kvhub.attention import attention_weights, observe_attention
from kvhub.cache import build_cache, cache_of, concatenate_caches, crop_cache, prefill, read_cache
from kvhub.errors import UsageError
from kvhub.exact import (
    LAST_QUERIES,
    choose_exact,
    most_within,
    predicted_damage,
    tokens_within,
)
from kvhub.generation import prefill_mapped
from kvhub.recompute import recompute

TOKENS = 14


def prompt(batch=1, tokens=TOKENS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (batch, tokens), generator=generator)


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", 3, dtype=torch.float64)


@pytest.fixture(scope="module")
def other():
    return tiny_model("qwen3", 2, seed=7, dtype=torch.float64)


def junk_like(cache, seed=1):
    """A cache of the same shape with nothing of the model in it."""
    generator = torch.Generator().manual_seed(seed)
    layers = [layer.keys for layer in cache.layers]
    keys, values = (
        [torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in layers]
        for _ in range(2)
    )
    return build_cache(keys, values)


def states(cache):
    """All keys and values, `[2, layers, batch, kv_heads, tokens, head_dim]`."""
    keys, values = read_cache(cache)
    return torch.stack([torch.stack(keys), torch.stack(values)])


def cells_of(*rows):
    return torch.tensor(rows)


@pytest.mark.parametrize(
    "architecture", ["qwen3", "llama", "ministral3", "mistral3", "glm4", "cohere", "gemma", "phi"]
)
def test_with_all_tokens_exact_the_cache_is_the_targets_own(architecture):
    model = tiny_model(architecture, 3, dtype=torch.float64)
    ids = prompt(2)
    own = cache_of(prefill(model, ids))
    found = recompute(model, ids, junk_like(own), torch.arange(TOKENS).expand(2, -1))
    torch.testing.assert_close(states(found), states(own), rtol=1e-9, atol=1e-9)


def test_a_start_of_exact_tokens_is_the_targets_own_and_the_rest_stays(model):
    ids = prompt(2)
    own = cache_of(prefill(model, ids))
    junk = junk_like(own)
    before = states(junk).clone()
    found = states(recompute(model, ids, junk, torch.arange(6).expand(2, -1)))
    torch.testing.assert_close(found[..., :6, :], states(own)[..., :6, :], rtol=1e-9, atol=1e-9)
    assert torch.equal(found[..., 6:, :], before[..., 6:, :])
    assert torch.equal(states(junk), before)
    nothing = recompute(model, ids, junk, torch.empty(2, 0, dtype=torch.long))
    assert torch.equal(states(nothing), before)


def test_scattered_tokens_equal_one_pass_per_token_in_their_order(model):
    """The reference needs no mask: the cache cropped before a token, the token run, the rest put
    back behind it."""
    ids = prompt(2)
    junk = junk_like(cache_of(prefill(model, ids)))
    rows = cells_of([0, 3, 4, 11], [2, 5, 12, 13])
    expected = []
    for row, cells in enumerate(rows.tolist()):
        cache = build_cache(
            *([part[row : row + 1] for part in whole] for whole in read_cache(junk))
        )
        for cell in cells:
            earlier = crop_cache(cache, 0, cell) if cell > 0 else None
            new = cache_of(prefill(model, ids[row : row + 1, cell : cell + 1], cache=earlier))
            later = crop_cache(cache, cell + 1, TOKENS)
            cache = new if cell == TOKENS - 1 else concatenate_caches(new, later)
        expected.append(states(cache))
    found = states(recompute(model, ids, junk, rows))
    torch.testing.assert_close(found, torch.cat(expected, dim=2), rtol=1e-9, atol=1e-9)
    chosen = torch.zeros(2, TOKENS, dtype=torch.bool).scatter_(1, rows, True)
    for row in range(2):
        kept = ~chosen[row]
        assert torch.equal(found[:, :, row][..., kept, :], states(junk)[:, :, row][..., kept, :])


def test_left_padded_rows_are_computed_like_single_ones(model):
    ids = prompt(2)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    own = cache_of(prefill(model, ids, attention_mask=mask))
    rows = cells_of([3, 6, 7, 12], [0, 6, 7, 12])  # the first row's first cell is padding
    found = states(recompute(model, ids, own, rows, attention_mask=mask))
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[:, :, 1], states(own)[:, :, 1], rtol=1e-9, atol=1e-9)
    real = found[:, :, 0, :, 5:], states(own)[:, :, 0, :, 5:]
    torch.testing.assert_close(*real, rtol=1e-9, atol=1e-9)


def test_a_model_with_another_attention_keeps_it_and_is_computed_right(model):
    """Like flash attention, this one would ignore a mask per query."""

    def without_masks(*args, **kwargs):
        raise RuntimeError("not with a mask")

    ids = prompt()
    own = cache_of(prefill(model, ids))
    AttentionInterface.register("without_masks", without_masks)
    try:
        model.set_attn_implementation("without_masks")
        found = recompute(model, ids, junk_like(own), torch.arange(TOKENS)[None])
        assert model.config._attn_implementation == "without_masks"
    finally:
        model.set_attn_implementation("sdpa")
    torch.testing.assert_close(states(found), states(own), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "cells", [[[3, 3]], [[4, 2]], [[-1, 2]], [[2, TOKENS]], [2, 3], [[1], [2]]]
)
def test_cells_that_are_not_ascending_in_the_cache_are_refused(model, cells):
    ids = prompt()
    cache = cache_of(prefill(model, ids))
    with pytest.raises(UsageError, match="each row ascending"):
        recompute(model, ids, cache, torch.tensor(cells))
    with pytest.raises(UsageError, match="The cache has 14 tokens"):
        recompute(model, ids[:, :-1], cache, cells_of([1]))


def test_a_hand_off_keeps_prefix_and_positions_exact_and_maps_the_rest(model, other):
    ids = prompt(2)
    mapper = random_mapper(other, model, dtype=torch.float64)
    stop = TOKENS - 1
    positions = cells_of([5, 6, 12], [4, 8, 9])
    found = prefill_mapped(mapper, other, model, ids, exact_positions=positions)
    mapped = states(mapper(cache_of(prefill(other, ids[:, :stop]))))
    expected = recompute(
        model,
        ids[:, :stop],
        prefill_mapped(mapper, other, model, ids),
        positions,
    )
    torch.testing.assert_close(states(found), states(expected), rtol=1e-9, atol=1e-9)
    own = states(cache_of(prefill(model, ids[:, :stop])))
    torch.testing.assert_close(states(found)[..., :4, :], own[..., :4, :], rtol=1e-9, atol=1e-9)
    for row, cells in enumerate(positions.tolist()):
        kept = [cell for cell in range(4, stop) if cell not in cells]
        assert torch.equal(states(found)[:, :, row][..., kept, :], mapped[:, :, row][..., kept, :])
    everything = torch.arange(4, stop).expand(2, -1)
    found = prefill_mapped(mapper, other, model, ids, exact_positions=everything)
    torch.testing.assert_close(states(found), own, rtol=1e-9, atol=1e-9)


def test_exact_positions_of_left_padded_rows_are_the_targets_own(model, other):
    ids = prompt(2)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mapper = random_mapper(other, model, dtype=torch.float64)
    everything = torch.arange(7, TOKENS - 1).expand(2, -1)
    found = prefill_mapped(
        mapper, other, model, ids, attention_mask=mask, exact_prefix=2, exact_positions=everything
    )
    own = states(cache_of(prefill(model, ids[:, :-1], attention_mask=mask[:, :-1])))
    found = states(found)
    torch.testing.assert_close(found[:, :, 1], own[:, :, 1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[:, :, 0, :, 5:], own[:, :, 0, :, 5:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("positions", [[[3]], [[13]], [4], [[5], [6]]])
def test_exact_positions_outside_the_mapped_tokens_are_refused(model, other, positions):
    mapper = random_mapper(other, model, dtype=torch.float64)
    with pytest.raises(UsageError, match="from 4, behind the exact prefix, to 12"):
        prefill_mapped(mapper, other, model, prompt(), exact_positions=torch.tensor(positions))


def test_the_budget_goes_to_the_sink_and_then_to_the_largest_damage():
    damage = torch.tensor([[9.0, 9, 9, 9, 1, 5, 2, 4, 3], [9.0, 9, 9, 9, 5, 4, 3, 2, 1]])
    found = choose_exact(damage, 7)
    assert found.prefix == 4
    assert found.positions.tolist() == [[5, 7, 8], [4, 5, 6]]
    assert choose_exact(damage, 2).prefix == 2
    assert choose_exact(damage, 0).prefix == 0
    assert choose_exact(damage, 0).positions.shape == choose_exact(damage, 2).positions.shape
    whole = choose_exact(damage, 100)
    assert whole.positions.tolist() == [[4, 5, 6, 7, 8]] * 2
    padded = choose_exact(damage, 6, padding=3)
    assert padded.positions.tolist() == [[7, 8]] * 2
    with pytest.raises(UsageError, match="must not be negative"):
        choose_exact(damage, -1)


@pytest.mark.parametrize("tokens", [5, LAST_QUERIES, 40])
def test_the_predicted_damage_is_mean_attention_times_surprise(model, tokens, monkeypatch):
    monkeypatch.setattr("kvhub.exact.CHUNK", 7)
    ids = prompt(2, tokens)
    weights = []

    def look(layer, queries, keys, values, scaling):
        weights.append(
            torch.cat([part for _, part in attention_weights(queries, keys, scaling)], 3)
        )

    with observe_attention(model, look):
        output = prefill(model, ids)
    # [batch, queries, tokens], mean over layers and heads
    attention = torch.stack(weights).mean(0).mean((1, 2))[:, -LAST_QUERIES:]
    log_p = output.logits.log_softmax(-1)
    expected = torch.zeros(2, tokens, dtype=torch.float64)
    for t in range(1, tokens):
        queries = attention.shape[1] - max(0, t - (tokens - attention.shape[1]))
        seen = attention[:, -queries:, t].mean(1)
        expected[:, t] = -seen * log_p[:, t - 1].gather(-1, ids[:, t, None])[:, 0]
    found, cache = predicted_damage(model, ids)
    found, expected = (part / part.sum(1, keepdim=True) for part in (found.double(), expected))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states(cache), states(cache_of(output)), rtol=1e-9, atol=1e-9)


def test_padding_does_not_change_the_predicted_damage(model):
    ids = prompt(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    found, cache = predicted_damage(model, ids, attention_mask=mask)
    alone, _ = predicted_damage(model, ids[:1, 9:])
    torch.testing.assert_close(found[:1, 9:], alone)
    assert not found[0, :10].any()
    assert cache.get_seq_length() == 30


def test_a_budget_of_time_becomes_a_count_of_tokens():
    def cost(tokens):
        return 3.0 + 0.5 * tokens

    assert most_within(10.0, cost, 1000) == 14
    assert most_within(3.2, cost, 1000) == 0
    assert most_within(1e9, cost, 37) == 37
    assert most_within(5.0, cost, 0) == 0


def test_the_time_is_measured_on_the_model(model):
    assert tokens_within(0.0, model, 24) == 0
    assert tokens_within(1e9, model, 24) == 24
