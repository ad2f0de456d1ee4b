from dataclasses import replace

import pytest
import torch
from tiny import tiny_config

from kvhub import ModelSpec
from kvhub.errors import VerificationError
from kvhub.fidelity import FidelityMeter
from kvhub.rope import apply_rope

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
SCALING = 0.4


@pytest.fixture(scope="module")
def spec():
    return replace(ModelSpec.from_config(tiny_config("qwen3", LAYERS)), tokenizer_digest=None)


def states(spec, batch, tokens, prefix, seed=0, error=0.3):
    """One layer of a target and of a map: content keys, and what `update` takes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads, length):
        return torch.randn(batch, heads, length, DIM, generator=generator, dtype=torch.float64)

    queries, content_keys, values = (
        draw(HEADS, tokens),
        draw(KV_HEADS, tokens),
        draw(KV_HEADS, tokens),
    )
    content_keys += 5
    mapped_content = content_keys[:, :, :prefix] + error * draw(KV_HEADS, prefix)
    mapped_values = values[:, :, :prefix] + error * draw(KV_HEADS, prefix)
    keys = apply_rope(content_keys, torch.arange(tokens), spec.rope)
    mapped_keys = apply_rope(mapped_content, torch.arange(prefix), spec.rope)
    content = {"keys": content_keys[:, :, :prefix], "mapped_keys": mapped_content}
    return content, (queries, keys, values, mapped_keys, mapped_values, SCALING)


def naive_outputs(queries, keys, values, prefix):
    """Weights and outputs `[heads, later tokens, ...]` of one sequence, head by head."""
    group = HEADS // KV_HEADS
    outputs, weights = [], []
    for head in range(HEADS):
        scores = SCALING * queries[head] @ keys[head // group].T
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        weights.append(scores.softmax(-1)[prefix:])
        outputs.append(weights[-1] @ values[head // group])
    return torch.stack(weights), torch.stack(outputs)


@pytest.fixture(scope="module")
def measured(spec):
    """Two batches of other lengths on each of two layers, and what the meter made of them."""
    meter = FidelityMeter(spec)
    parts = [(2, 11, 7), (3, 16, 12)]
    layers, cosines = [], []
    for layer in range(LAYERS):
        layers.append([states(spec, *part, seed=10 * layer + i) for i, part in enumerate(parts)])
        cosines.append([meter.update(layer, *inputs) for _, inputs in layers[-1]])
    return meter.result(), layers, cosines, parts


def test_r2_equals_a_dense_reference(measured):
    fidelity, layers, _, _ = measured
    for layer, batches in enumerate(layers):
        pairs = {
            "key": [(c["keys"], c["mapped_keys"]) for c, _ in batches],
            "value": [(i[2][:, :, : i[4].shape[2]], i[4]) for _, i in batches],
        }
        for name, pair in pairs.items():
            true, mapped = (
                torch.cat([part.transpose(1, 2).flatten(0, 1) for part in side])
                for side in zip(*pair, strict=True)
            )
            error = (true - mapped).square().sum((0, 2))
            total = (true - true.mean(0)).square().sum((0, 2))
            r2 = getattr(fidelity, f"{name}_r2")[layer]
            by_head = getattr(fidelity, f"{name}_r2_by_head")[layer]
            assert r2 == pytest.approx(float(1 - error.sum() / total.sum()), abs=1e-6)
            assert by_head == pytest.approx((1 - error / total).tolist(), abs=1e-6)


def test_cosine_equals_a_dense_reference(measured):
    fidelity, layers, cosines, parts = measured
    for layer, batches in enumerate(layers):
        every = []
        for (_, inputs), returned, (batch, _, prefix) in zip(
            batches, cosines[layer], parts, strict=True
        ):
            queries, keys, values, mapped_keys, mapped_values, _ = inputs
            for row in range(batch):
                _, true = naive_outputs(queries[row], keys[row], values[row], prefix)
                mixed_keys = torch.cat([mapped_keys[row], keys[row, :, prefix:]], dim=1)
                mixed_values = torch.cat([mapped_values[row], values[row, :, prefix:]], dim=1)
                _, mapped = naive_outputs(queries[row], mixed_keys, mixed_values, prefix)
                cosine = torch.cosine_similarity(true, mapped, dim=-1)
                every.append(cosine)
                assert float(returned[row]) == pytest.approx(float(cosine.mean()))
        by_head = torch.cat(every, dim=1).mean(1)
        assert fidelity.attention_output_cosine_by_head[layer] == pytest.approx(by_head.tolist())
        assert fidelity.attention_output_cosine[layer] == pytest.approx(float(by_head.mean()))


def test_placement_equals_its_definition_with_singular_vectors(measured):
    fidelity, layers, _, _ = measured
    for layer, batches in enumerate(layers):
        sums = torch.zeros(2, 2, KV_HEADS, dtype=torch.float64)
        for _, (queries, keys, values, mapped_keys, mapped_values, _) in batches:
            prefix = mapped_keys.shape[2]
            for row in range(len(queries)):
                weights, _ = naive_outputs(queries[row], keys[row], values[row], prefix)
                for head in range(KV_HEADS):
                    group = slice(2 * head, 2 * head + 2)
                    looks = queries[row, group, prefix:].reshape(-1, DIM)
                    _, singular, vectors = torch.linalg.svd(looks, full_matrices=True)
                    squares = torch.zeros(DIM, dtype=torch.float64)
                    squares[: len(singular)] = singular**2
                    error = mapped_keys[row, head] - keys[row, head, :prefix]
                    components = (error @ vectors.T).square().mean(0)
                    sums[0, 0, head] += (squares * components).sum() / squares.sum()
                    sums[0, 1, head] += components.mean()

                    paid = weights[group, :, :prefix].square().sum((0, 1))
                    error = mapped_values[row, head] - values[row, head, :prefix]
                    positions = error.square().sum(-1)
                    sums[1, 0, head] += (paid * positions).sum() / paid.sum()
                    sums[1, 1, head] += positions.mean()
        by_head = sums[:, 0] / sums[:, 1]
        for row, found in zip(
            by_head,
            (fidelity.key_error_placement_by_head, fidelity.value_error_placement_by_head),
            strict=True,
        ):
            assert found[layer] == pytest.approx(row.tolist(), rel=1e-6)
        expected = by_head.mean(-1)
        assert fidelity.key_error_placement[layer] == pytest.approx(float(expected[0]), rel=1e-6)
        assert fidelity.value_error_placement[layer] == pytest.approx(float(expected[1]))


def test_placement_is_above_one_where_attention_reads(spec):
    """An error along the only direction of the queries, or only at the token that is read."""
    generator = torch.Generator().manual_seed(0)
    tokens, prefix = 10, 8
    direction = torch.zeros(DIM, dtype=torch.float64)
    direction[DIM - 1] = 1.0
    queries = direction.expand(1, HEADS, tokens, DIM)
    values = torch.randn(1, KV_HEADS, tokens, DIM, generator=generator, dtype=torch.float64)
    keys = torch.zeros_like(values)
    keys[:, :, 3] = 50 * direction  # all attention goes to token 3

    def placement(key_error, read_token, other_token):
        meter = FidelityMeter(spec)
        mapped_values = values[:, :, :prefix].clone()
        mapped_values[:, :, 3] += read_token
        mapped_values[:, :, 6] += other_token
        mapped_keys = keys[:, :, :prefix] + key_error
        for layer in range(LAYERS):
            meter.update(layer, queries, keys, values, mapped_keys, mapped_values, 1.0)
        fidelity = meter.result()
        return fidelity.key_error_placement[0], fidelity.value_error_placement[0]

    seen = placement(direction, 1.0, 0.0)
    assert seen == pytest.approx((DIM, prefix))
    unseen = placement(torch.eye(DIM, dtype=torch.float64)[2], 0.0, 1.0)
    assert unseen == pytest.approx((0, 0), abs=1e-9)


def test_error_by_position_is_that_of_each_position(spec):
    content, inputs = states(spec, 2, 14, 13)
    queries, keys, values, mapped_keys, _, _ = inputs
    factor = torch.arange(13, dtype=torch.float64)[None, None, :, None] / 100
    meter = FidelityMeter(spec)
    for layer in range(LAYERS):
        meter.update(
            layer, queries, keys, values, mapped_keys, values[:, :, :13] * (1 + factor), SCALING
        )
    bins = meter.result().positions
    assert [(b.start, b.stop) for b in bins] == [(0, 1), (1, 2), (2, 4), (4, 8), (8, 13)]
    assert bins[0].value_error == 0
    assert bins[1].value_error == pytest.approx(0.01)
    for part in bins[1:]:
        assert part.start - 1e-9 <= 100 * part.value_error <= part.stop - 1 + 1e-9
    span = slice(bins[3].start, bins[3].stop)
    true, mapped = content["keys"][:, :, span], content["mapped_keys"][:, :, span]
    expected = float((true - mapped).norm() / true.norm())
    assert bins[3].key_error == pytest.approx(expected, rel=1e-6)


def test_an_exact_map_has_no_error_and_no_placement(spec):
    _, (queries, keys, values, *_) = states(spec, 2, 9, 5)
    meter = FidelityMeter(spec)
    for layer in range(LAYERS):
        inputs = (queries, keys, values, keys[:, :, :5], values[:, :, :5], SCALING)
        cosine = meter.update(layer, *inputs)
        assert cosine.tolist() == pytest.approx([1, 1])
    fidelity = meter.result()
    assert fidelity.key_r2 == fidelity.value_r2 == (1.0, 1.0)
    assert fidelity.key_error_placement == fidelity.value_error_placement == (None, None)
    assert fidelity.key_error_placement_by_head == ((None,) * KV_HEADS,) * LAYERS
    assert all(part.key_error == part.value_error == 0 for part in fidelity.positions)


def test_a_large_constant_offset_does_not_change_r2(spec):
    plain, shifted = FidelityMeter(spec), FidelityMeter(spec)
    for seed in range(3):
        _, inputs = states(spec, 2, 9, 5, seed)
        queries, keys, values, mapped_keys, mapped_values, _ = inputs
        for layer in range(LAYERS):
            plain.update(layer, *inputs)
            moved = (values + 1e4, mapped_keys, mapped_values + 1e4)
            shifted.update(layer, queries, keys, *moved, SCALING)
    assert shifted.result().value_r2 == pytest.approx(plain.result().value_r2, abs=1e-6)


def test_what_is_not_finite_or_was_never_seen_is_refused(spec):
    _, inputs = states(spec, 1, 9, 5)
    meter = FidelityMeter(spec)
    meter.update(0, *inputs)
    with pytest.raises(VerificationError, match=r"layers \[1\]"):
        meter.result()
    inputs[3][0, 0, 0, 0] = torch.nan
    meter.update(1, *inputs)
    with pytest.raises(VerificationError, match="not finite"):
        meter.result()
