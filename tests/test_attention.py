import pytest
import torch
from tiny import tiny_model
from transformers import AttentionInterface

from kvhub import attention
from kvhub.attention import (
    attention_received,
    attention_sensitivity,
    attention_weights,
    observe_attention,
)
from kvhub.cache import cache_of, prefill
from kvhub.errors import UsageError

ARCHITECTURES = ["qwen3", "llama", "ministral3", "glm4", "mistral3"]


def tokens(batch=2, length=9):
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(0))


def recorded(model, **inputs):
    calls = []
    with observe_attention(model, lambda *call: calls.append(call)), torch.no_grad():
        output = model(**inputs)
    return calls, output


def naive_weights(queries, keys, scaling, mask):
    """One softmax per row, in plain loops over dense float64 scores."""
    batch, heads, query_tokens, _ = queries.shape
    kv_heads, kv_tokens = keys.shape[1:3]
    offset = kv_tokens - query_tokens
    weights = torch.zeros(batch, heads, query_tokens, kv_tokens, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for q in range(query_tokens):
                seen = [t for t in range(offset + q + 1) if mask[b, t]]
                if mask[b, offset + q]:
                    key = keys[b, h // (heads // kv_heads), seen].double()
                    row = (key @ queries[b, h, q].double()) * scaling
                    weights[b, h, q, seen] = row.softmax(0)
    return weights


@pytest.fixture
def states():
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(3, 6, 5, 8, generator=generator)
    keys = torch.randn(3, 2, 9, 8, generator=generator)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, 7:] = 0
    mask[1, :5] = 0
    return queries, keys, mask


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_observed_tensors_reproduce_the_models_own_attention(architecture):
    model = tiny_model(architecture)
    text = model.get_decoder()
    text.set_attn_implementation("eager")
    inputs = {"input_ids": tokens(), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    inputs["attention_mask"][0, 6:] = 0
    with torch.no_grad():
        own = model(**inputs, output_attentions=True)
    calls, observed = recorded(model, **inputs)

    assert [call[0] for call in calls] == list(range(len(calls)))
    assert len(calls) == text.config.num_hidden_layers
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(observed.logits[real], own.logits[real], rtol=1e-4, atol=1e-4)
    for (_, queries, keys, values, scaling), expected in zip(calls, own.attentions, strict=True):
        assert keys.shape == values.shape == (2, 2, 9, 16)
        ((_, weights),) = attention_weights(queries, keys, scaling, inputs["attention_mask"])
        torch.testing.assert_close(
            weights.flatten(1, 2)[real[:, None].expand(-1, 4, -1)],
            expected[real[:, None].expand(-1, 4, -1)],
            rtol=1e-4,
            atol=1e-5,
        )


def test_keys_and_values_are_those_of_the_cache_and_include_the_cached_tokens():
    model = tiny_model("qwen3")
    cache = cache_of(prefill(model, tokens()[:, :6]))
    calls = []
    with observe_attention(model, lambda *call: calls.append(call)):
        prefill(model, tokens()[:, 6:], cache=cache)
    assert len(calls) == 2
    for layer, queries, keys, values, _ in calls:
        assert queries.shape[2] == 3
        assert torch.equal(keys, cache.layers[layer].keys)
        assert torch.equal(values, cache.layers[layer].values)
        assert keys.shape[2] == 9


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_models_implementation_comes_back_and_the_callback_is_gone(implementation):
    model = tiny_model("qwen3")
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        before = model(tokens()).logits
    calls, _ = recorded(model, input_ids=tokens())
    seen = len(calls)
    assert model.config._attn_implementation == implementation
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, before)
    assert len(calls) == seen
    assert attention._observers == []


def test_what_stays_registered_is_plain_sdpa():
    recorded(tiny_model("qwen3"), input_ids=tokens())
    assert attention.IMPLEMENTATION in AttentionInterface()
    model = tiny_model("qwen3")
    padded = torch.ones(2, 9, dtype=torch.long)
    padded[0, :4] = 0
    with torch.no_grad():
        expected = model(tokens(), attention_mask=padded).logits
        model.set_attn_implementation(attention.IMPLEMENTATION)
        assert torch.equal(model(tokens(), attention_mask=padded).logits, expected)


def test_errors_of_the_callback_reach_the_caller_and_the_model_is_restored():
    model = tiny_model("qwen3")

    def fail(*call):
        raise ArithmeticError("from the callback")

    with pytest.raises(ArithmeticError, match="from the callback"), observe_attention(model, fail):
        model(tokens())
    assert model.config._attn_implementation == "sdpa"
    assert attention._observers == []


def test_a_model_that_shares_the_config_is_not_observed():
    model = tiny_model("qwen3")
    other = type(model)(model.config).eval()
    layers = []
    with observe_attention(model, lambda layer, *_: layers.append(layer)), torch.no_grad():
        other(tokens())
        assert layers == []
        model(tokens())
    assert layers == [0, 1]


def test_two_observers_of_one_model_both_see_it_and_end_on_their_own():
    model = tiny_model("qwen3")
    outer, inner = [], []
    with torch.no_grad(), observe_attention(model, lambda layer, *_: outer.append(layer)):
        with observe_attention(model, lambda layer, *_: inner.append(layer)):
            model(tokens())
        model(tokens())
    assert outer == [0, 1, 0, 1]
    assert inner == [0, 1]
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("budget", [1, 700, 2**24])
def test_weights_and_mass_equal_a_dense_reference(states, monkeypatch, budget):
    """Causal with a key offset, grouped heads, left and right padding, whatever the chunks."""
    monkeypatch.setattr(attention, "MAX_WEIGHTS", budget)
    queries, keys, mask = states
    expected = naive_weights(queries, keys, 0.3, mask)
    chunks = list(attention_weights(queries, keys, 0.3, mask))
    assert (len(chunks) == 1) == (budget == 2**24)
    weights = torch.cat([chunk for _, chunk in chunks], dim=3).flatten(1, 2)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)

    received = attention_received(queries, keys, 0.3, mask)
    torch.testing.assert_close(
        received.double(), expected.reshape(3, 2, 3, 5, 9).sum((2, 3)), rtol=1e-5, atol=1e-5
    )


def test_mass_adds_up_to_the_real_queries_and_padding_gets_none(states):
    queries, keys, mask = states
    received = attention_received(queries, keys, 0.3, mask)
    assert (received[mask[:, None].expand_as(received) == 0] == 0).all()
    real_queries = mask[:, 4:].sum(1)
    torch.testing.assert_close(received.sum(-1), (3.0 * real_queries)[:, None].expand(-1, 2))


def test_padding_does_not_change_the_mass_of_the_tokens(states):
    queries, keys, _ = states
    alone = attention_received(queries, keys, 0.3)
    left = torch.cat([torch.full((3, 2, 4, 8), 9.0), keys], dim=2)
    mask = torch.ones(3, 13, dtype=torch.long)
    mask[:, :4] = 0
    torch.testing.assert_close(attention_received(queries, left, 0.3, mask)[..., 4:], alone)


def test_half_precision_is_summed_in_float32_and_float64_is_kept(states):
    queries, keys, mask = states
    half = attention_received(queries.bfloat16(), keys.bfloat16(), 0.3, mask)
    full = attention_received(queries.bfloat16().float(), keys.bfloat16().float(), 0.3, mask)
    assert torch.equal(half, full)
    assert attention_received(queries.double(), keys.double(), 0.3).dtype == torch.float64


@pytest.mark.parametrize(
    ("queries", "keys", "mask"),
    [
        ((1, 5, 4, 8), (1, 2, 4, 8), None),
        ((1, 4, 6, 8), (1, 2, 4, 8), None),
        ((1, 4, 4, 8), (1, 2, 4, 16), None),
        ((1, 4, 4, 8), (1, 2, 4, 8), (1, 3)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(queries, keys, mask):
    mask = None if mask is None else torch.ones(mask)
    with pytest.raises(UsageError, match="found"):
        attention_received(torch.zeros(queries), torch.zeros(keys), 1.0, mask)


def test_sensitivity_equals_a_dense_reference_whatever_the_chunks(states, monkeypatch):
    queries, keys, mask = states
    values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(2))
    weights = naive_weights(queries, keys, 0.3, mask)
    head = torch.arange(6) // 3
    outputs = weights @ values.double()[:, head]
    distances = (values.double()[:, head, None] - outputs[:, :, :, None]).square().sum(-1)
    query_norms = queries.double().square().sum(-1)[..., None]
    expected = [(weights**2 * distances * query_norms), weights**2]
    expected = [part.reshape(3, 2, 3, 5, 9).sum((2, 3)) for part in expected]
    for budget in (1, 2**24):
        monkeypatch.setattr(attention, "MAX_WEIGHTS", budget)
        found = attention_sensitivity(queries, keys, values, 0.3, mask)
        for part, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(part.double(), reference, rtol=1e-4, atol=1e-5)


def test_sensitivity_predicts_how_far_a_small_error_moves_the_output(states):
    queries, keys, mask = (part.double() for part in states)
    values = torch.randn(keys.shape, dtype=torch.float64)
    for_keys, for_values = attention_sensitivity(queries, keys, values, 0.3, mask)

    def outputs(new_keys, new_values):
        ((_, weights),) = attention_weights(queries, new_keys, 0.3, mask)
        return weights @ new_values[:, :, None]

    token, step = 6, 1e-5
    moved = values.clone()
    moved[:, :, token, 0] += step
    change = (outputs(keys, moved) - outputs(keys, values)) / step
    torch.testing.assert_close(change.square().sum((2, 3, 4)), for_values[..., token])
    # A key that moves every logit alike: equal queries make q . d the same for all of them.
    queries[:] = 1.0
    for_keys, _ = attention_sensitivity(queries, keys, values, 0.3, mask)
    moved = keys.clone()
    moved[:, :, token] += step / (0.3 * queries.shape[-1])
    change = (outputs(moved, values) - outputs(keys, values)) / step
    torch.testing.assert_close(
        change.square().sum((2, 3, 4)),
        for_keys[..., token] / queries.shape[-1],
        rtol=1e-3,
        atol=1e-6,
    )
