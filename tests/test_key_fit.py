"""The keys' fit to the attention output, against autograd and sums of its own."""

from dataclasses import replace

import pytest
import torch
from tiny import tiny_model

from kvhub import ModelSpec
from kvhub.alignment_rows import Layer, key_rows, map_layer
from kvhub.key_fit import Descent, feel_errors
from kvhub.moments import Moments
from kvhub.rope import apply_rope, strip_rope

BATCH, HEADS, TOKENS, DIM = 2, 2, 9, 16


@pytest.fixture(scope="module")
def rope():
    # As of YaRN, so that the transposed rotation is not the inverse one.
    spec = ModelSpec.from_model(tiny_model("qwen3", 1)).require_rope()
    return replace(spec, attention_scaling=1.3)


def layer_of(rope, padding=0, seed=0, batch=BATCH):
    generator = torch.Generator().manual_seed(seed)
    queries, content, values = (
        torch.randn(batch, heads, TOKENS, DIM, dtype=torch.float64, generator=generator)
        for heads in (2 * HEADS, HEADS, HEADS)
    )
    mask = torch.ones(batch, TOKENS, dtype=torch.long)
    if padding:
        mask[1, -padding:] = 0
    return Layer(queries, apply_rope(content, torch.arange(TOKENS), rope), values, 0.4, mask)


def errors_of(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, HEADS, TOKENS, DIM, dtype=torch.float64, generator=generator)


def attention(layer, keys):
    """Outputs of the tokens of a batch, with 0 for padding, written with nothing of kvhub."""
    wide = [part.repeat_interleave(2, dim=1) for part in (keys, layer.values)]
    scores = layer.scaling * layer.queries @ wide[0].mT
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    seen = causal & layer.mask[:, None, None].bool()
    outputs = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ wide[1]
    return outputs * layer.mask[:, None, :, None]


@pytest.mark.parametrize("exact_prefix", [0, 3, 20])
@pytest.mark.parametrize("padding", [0, 2])
def test_errors_are_felt_as_autograd_says(rope, exact_prefix, padding):
    layer, errors = layer_of(rope, padding), errors_of()
    positions = torch.arange(TOKENS)
    content = strip_rope(layer.keys, positions, rope)

    def outputs(keys):
        return attention(layer, apply_rope(keys, positions, rope))

    gradient = torch.zeros_like(errors)
    change = torch.zeros(BATCH, HEADS, dtype=torch.float64)
    first = (torch.arange(TOKENS) < exact_prefix)[:, None].double()
    for part in (first, 1 - first):
        moved = torch.autograd.functional.jvp(outputs, content, part * errors)[1]
        gradient += part * torch.autograd.functional.vjp(outputs, content, moved)[1]
        change += moved.view(BATCH, HEADS, -1).square().sum(-1)
    found = feel_errors(layer, errors, rope, exact_prefix)
    torch.testing.assert_close(found[0], gradient)
    torch.testing.assert_close(found[1], change)
    norms = attention(layer, layer.keys).view(BATCH, HEADS, -1).square().sum(-1)
    torch.testing.assert_close(found[2], norms)


def test_logits_that_are_all_off_alike_are_not_felt(rope):
    layer = layer_of(rope)
    common = errors_of()[:, :, :1].expand(-1, -1, TOKENS, -1)
    errors = strip_rope(common, torch.arange(TOKENS), rope)
    scale = feel_errors(layer, errors_of(), rope, 0)[1]
    assert bool((feel_errors(layer, errors, rope, 0)[1] < 1e-20 * scale).all())
    # With exact first tokens the others' shift is one against these.
    assert bool((feel_errors(layer, errors, rope, 2)[1] > 1e-3 * scale).all())


def test_a_token_weighs_what_an_error_in_its_key_alone_does(rope):
    layer = layer_of(rope, padding=2)
    expected = torch.zeros(BATCH, HEADS, TOKENS, dtype=torch.float64)
    for token in range(TOKENS):
        for dim in range(DIM):
            one = torch.zeros(BATCH, HEADS, TOKENS, DIM, dtype=torch.float64)
            one[:, :, token, dim] = 1
            expected[:, :, token] += feel_errors(layer, one, rope, 2)[1]
    expected = expected / (layer.scaling * rope.attention_scaling) ** 2
    used = layer.mask.flatten().bool()
    matched = key_rows(layer, source_keys(0), "matched").weights
    torch.testing.assert_close(matched, expected.transpose(1, 2).flatten(0, 1)[used])
    # Each head of a sequence counts alike where they share their features.
    shares = (expected / expected.sum(-1, keepdim=True)).mean(1, keepdim=True)
    all_heads = key_rows(layer, source_keys(0), "all").weights
    torch.testing.assert_close(all_heads, shares.transpose(1, 2).flatten(0, 1)[used])


def descent_of(layers, states, heads, weight, bias):
    features = states[0].shape[0] * DIM * (HEADS if heads == "all" else 1)
    moments = Moments.zeros(len(weight), features, 0)
    for layer, source in zip(layers, states, strict=True):
        rows = key_rows(layer, source, heads)
        moments.update(rows.features, rows.outputs, rows.weights)
    return Descent(weight, bias, moments, DIM)


def random_map(heads, seed):
    generator = torch.Generator().manual_seed(seed)
    groups, width = (1, 2 * DIM) if heads == "all" else (2, DIM)
    shape = (groups, width, width)
    weight = torch.randn(*shape, dtype=torch.float64, generator=generator) / width**0.5
    return weight, torch.randn(groups, width, dtype=torch.float64, generator=generator)


def source_keys(seed, batch=BATCH):
    generator = torch.Generator().manual_seed(seed)
    shape = (1, HEADS, batch * TOKENS, DIM)
    return 3 + torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_steps_descend_and_the_best_on_held_out_text_is_taken(rope, heads):
    states = [source_keys(seed) for seed in (4, 5, 6)]
    layers = []
    for (seed, padding), source in zip(((0, 0), (2, 3), (3, 0)), states, strict=True):
        layer, truth = layer_of(rope, padding, seed), random_map(heads, 8)
        keys = apply_rope(map_layer(source, *truth, heads, BATCH, DIM), torch.arange(TOKENS), rope)
        layers.append(replace(layer, keys=keys + 0.3 * layer.keys))
    descent = descent_of(layers, states, heads, *random_map(heads, 7))
    held_out = torch.tensor([False, True])
    positions = torch.arange(TOKENS)

    def losses(weight, bias):
        """Fitted and held-out |J d|^2 per head, from the mapper's own map."""
        total = torch.zeros(BATCH, HEADS, dtype=torch.float64)
        for layer, source in zip(layers, states, strict=True):
            mapped = map_layer(source, weight, bias, heads, BATCH, DIM)
            errors = mapped - strip_rope(layer.keys, positions, rope)
            total += feel_errors(layer, errors, rope, 2)[1]
        return total

    def current():
        weight = descent.solution[:, :-1]
        bias = descent.solution[:, -1] - torch.einsum("gf,gfo->go", descent.mean, weight)
        return losses(weight, bias)

    trail, left = [current()], []
    for _ in range(12):
        for layer, source in zip(layers, states, strict=True):
            descent.add(layer, source, held_out, heads, rope, 2)
        descent.step()
        trail.append(current())
        left.append(descent.result()[-1])
        tracked = trail[0][1] + 2 * descent.loss.flatten()
        torch.testing.assert_close(tracked, trail[-1][1])
    fitted, apart = (torch.stack([point[row] for point in trail]) for row in range(2))
    assert torch.equal(trail[0], trail[1])  # the first pass only looks
    assert bool((fitted[2:] < fitted[1:-1]).all())
    weight, bias, after = descent.result()
    before = left[0]
    assert left == sorted(left, reverse=True)
    found = losses(weight, bias)[1]
    torch.testing.assert_close(found, apart.amin(0))
    assert bool((found < apart[0]).any())
    assert bool((apart[-1] > found).any())  # so that taking the last one would show
    norms = sum(feel_errors(layer, errors_of(), rope, 2)[2][1].sum() for layer in layers)
    assert before == pytest.approx(float(apart[0].sum() / norms))
    assert after == pytest.approx(float(found.sum() / norms))


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_a_map_that_is_right_is_found_again(rope, heads):
    source, truth = source_keys(0, batch=40), random_map(heads, 50)
    layer = layer_of(rope, batch=40)
    content = map_layer(source, *truth, heads, 40, DIM)
    layer = replace(layer, keys=apply_rope(content, torch.arange(TOKENS), rope))
    held_out = torch.arange(40) % 10 == 9

    def descend(start, steps):
        descent = descent_of([layer], [source], heads, *start)
        for _ in range(1 + steps):
            descent.add(layer, source, held_out, heads, rope, 2)
            descent.step()
        return descent.result()

    start = random_map(heads, 51)
    before, after = (descend(start, steps)[-1] for steps in (0, 60))
    assert after < 1e-3 * before
    for found, true in zip(descend(truth, 2), truth, strict=False):
        torch.testing.assert_close(found, true)
