import copy
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from mapping import identity_mapper
from tiny import tiny_model

from kvhub import KVMapper, ModelSpec, calibrate, fit, select_layers
from kvhub.alignment_passes import align_keys, align_values
from kvhub.alignment_rows import Layer, key_rows, map_layer, value_rows
from kvhub.data import TokenBatch
from kvhub.errors import ConflictError, IncompatiblePairError, UsageError, VerificationError
from kvhub.moments import Block, Moments
from kvhub.rope import apply_rope
from kvhub.value_fit import fit_values

HEADS = ("all", "matched")
TOKENS = 12


def batch_of(rows=4, tokens=TOKENS, start=0):
    ids = torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(start))
    return TokenBatch(ids, torch.ones_like(ids), tuple(range(start, start + rows)))


def batches():
    # Enough rows for 64 features, and every fifth sequence held out.
    return [batch_of(start=start) for start in range(0, 60, 4)]


@pytest.fixture(scope="module")
def source():
    return tiny_model("qwen3", 2, seed=1)


@pytest.fixture(scope="module")
def target():
    return tiny_model("qwen3", 3, seed=2)


@pytest.fixture(scope="module")
def plain(source, target):
    statistics = calibrate(source, target, batches(), held_out_every=5)
    return {
        heads: fit(sums, select_layers(sums, 2), heads=heads)
        for heads, sums in (("all", statistics), ("matched", statistics.matched()))
    }


def aligned(plain, source, target, text=None, **options):
    """Keys after all steps, and values fitted to them."""
    given = (source, target, text or batches())
    keys = align_keys(plain, *given, held_out_every=5, **options)[-1]
    return align_values(keys, *given, held_out_every=5, **options)


def random_layer(rope, padding=0):
    """A layer of 4 query heads on 2 KV heads, float64; the last `padding` tokens are none."""
    generator = torch.Generator().manual_seed(7)
    states = [
        torch.randn(2, heads, TOKENS, 16, dtype=torch.float64, generator=generator)
        for heads in (4, 2, 2)
    ]
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    if padding:
        mask[1, -padding:] = 0
    positions = torch.arange(TOKENS)
    queries, content, values = states
    keys = apply_rope(content, positions, rope)
    return Layer(queries, keys, values, 0.4, mask)


def random_states(top_k=2):
    generator = torch.Generator().manual_seed(8)
    return torch.randn(top_k, 2, 2 * TOKENS, 16, dtype=torch.float64, generator=generator)


def naive_attention(layer, keys, row, head, query):
    """What one query pays to each token it may see."""
    logits = layer.scaling * keys[row, head // 2, : query + 1] @ layer.queries[row, head, query]
    return logits.softmax(-1)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("exact_prefix", [0, 3])
def test_a_row_of_the_values_is_what_a_query_reads(target, heads, exact_prefix):
    layer = random_layer(ModelSpec.from_model(target).require_rope())
    states = random_states()
    mapped = layer.keys + 0.3 * torch.randn(layer.keys.shape, dtype=torch.float64)
    found = list(value_rows(layer, mapped, states, heads, exact_prefix))
    first = found.pop() if exact_prefix else None
    features = torch.cat([rows.features for rows in found])
    outputs = torch.cat([rows.outputs for rows in found])
    keys = torch.cat([layer.keys[:, :, :exact_prefix], mapped[:, :, exact_prefix:]], dim=2)
    by_token = states.unflatten(2, (2, TOKENS))  # [top_k, kv_heads, batch, tokens, head_dim]
    queries = [query for query in range(exact_prefix, TOKENS) if query % 2 == 0]
    expected_features, expected_outputs = [], []
    for row in range(2):
        for group_head in range(2):  # of the KV head's two query heads
            for query in queries:
                per_kv_head = []
                for kv_head in range(2):
                    head = 2 * kv_head + group_head
                    true = naive_attention(layer, layer.keys, row, head, query)
                    pays = naive_attention(layer, keys, row, head, query)
                    values = layer.values[row, kv_head, : query + 1]
                    seen = by_token[:, :, row, : query + 1]
                    if heads == "matched":
                        seen = seen[:, kv_head : kv_head + 1]
                    x = seen.permute(2, 0, 1, 3).flatten(1)
                    others = pays[exact_prefix:]
                    per_kv_head.append(
                        (
                            torch.cat([others @ x[exact_prefix:], others.sum()[None]]),
                            true @ values - pays[:exact_prefix] @ values[:exact_prefix],
                        )
                    )
                expected_features.append(torch.stack([x for x, _ in per_kv_head]))
                expected_outputs.append(torch.stack([y for _, y in per_kv_head]))
    torch.testing.assert_close(features, torch.stack(expected_features))
    torch.testing.assert_close(outputs, torch.stack(expected_outputs))
    if first is None:
        return
    # A row for each exact token: an error e in its value moves the outputs by the attention times
    # e, so squared and summed over the same queries by the weight times |e|^2.
    error = 0.5 * torch.randn(2, 2, 3, 16, dtype=torch.float64)
    moved = torch.zeros(2, 2, 3, dtype=torch.float64)
    for row, head, query, token in product(range(2), range(4), queries, range(3)):
        pays = naive_attention(layer, keys, row, head, query)
        moved[row, head // 2, token] += (pays[token] * error[row, head // 2, token]).square().sum()
    weights = first.weights.view(2, 3, 2).transpose(1, 2)
    torch.testing.assert_close(weights * error.square().sum(-1), moved)
    expected = layer.values[:, :, :3].transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(first.outputs, expected)
    seen = by_token[:, :, :, :3]  # [top_k, kv_heads, batch, 3, head_dim]
    if heads == "all":
        x = seen.permute(2, 3, 0, 1, 4).flatten(2)[:, :, None].expand(-1, -1, 2, -1)
    else:
        x = seen.permute(2, 3, 1, 0, 4).flatten(3)
    torch.testing.assert_close(first.features[..., :-1], x.flatten(0, 1))
    assert bool((first.features[..., -1] == 1).all())
    assert first.sequences.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("heads", HEADS)
def test_values_that_are_a_map_of_the_source_leave_no_residual(target, heads):
    layer = random_layer(ModelSpec.from_model(target).require_rope())
    states = random_states()
    groups, width = (1, 32) if heads == "all" else (2, 16)
    weights = torch.randn(groups, 2 * width, width, dtype=torch.float64)
    bias = torch.randn(groups, width, dtype=torch.float64)
    layer = replace(layer, values=map_layer(states, weights, bias, heads, 2, 16))
    for rows in value_rows(layer, layer.keys, states, heads, 2):
        per_head = weights.unflatten(2, (2 // groups, 16)).movedim(2, 1).flatten(0, 1)
        found = torch.einsum("rhf,hfo->rho", rows.features[..., :-1], per_head)
        found = found + rows.features[..., -1:] * bias.view(2, 16)
        torch.testing.assert_close(rows.outputs, found)


@pytest.mark.parametrize("heads", HEADS)
def test_padding_adds_no_rows_and_changes_none(target, heads):
    rope = ModelSpec.from_model(target).require_rope()
    states = random_states()
    layer = random_layer(rope, padding=3)
    noisy = [part.clone() for part in (layer.keys, layer.values)]
    for part in (*noisy, layer.queries):
        part[1, :, -3:] = 100.0
    other = replace(layer, keys=noisy[0], values=noisy[1])
    for first, second in zip(
        [key_rows(layer, states, heads), *value_rows(layer, layer.keys, states, heads, 2)],
        [key_rows(other, states, heads), *value_rows(other, other.keys, states, heads, 2)],
        strict=True,
    ):
        for item in fields(first):
            a, b = getattr(first, item.name), getattr(second, item.name)
            if a is not None:
                torch.testing.assert_close(a, b)
    assert len(key_rows(layer, states, heads).sequences) == 2 * TOKENS - 3


def rows_of_values(heads_count=2, rows=200, features=6, outputs=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads_count, features, dtype=torch.float64, generator=generator)
    mass = torch.rand(rows, heads_count, 1, dtype=torch.float64, generator=generator)
    y = torch.randn(rows, heads_count, outputs, dtype=torch.float64, generator=generator)
    y = y + x[..., :outputs] + 2 * mass
    return torch.cat([x + 3 * mass, mass], dim=-1), y


def block_of(x, y):
    moments = Moments.zeros(x.shape[1], x.shape[2], y.shape[2])
    for part_x, part_y in zip(x.split(70), y.split(70), strict=True):
        moments.update(part_x, part_y)
    return Block(**{item.name: getattr(moments, item.name) for item in fields(Block)})


@pytest.mark.parametrize("groups", [1, 2])
def test_values_are_the_ridge_solution_that_does_not_penalise_the_bias(groups, monkeypatch):
    monkeypatch.setattr("kvhub.value_fit.LAMBDAS", (0.05,))
    x, y = rows_of_values()
    weight = torch.full((groups, 6, 6 // groups), 9.0, dtype=torch.float64)
    bias = torch.zeros(groups, 6 // groups, dtype=torch.float64)
    block = block_of(x, y)
    found_weight, found_bias, (before, after) = fit_values(block, block, weight, bias)
    by_head = found_weight.unflatten(2, (2 // groups, 3)).movedim(2, 1).flatten(0, 1)
    for head in range(2):
        features, mass = x[:, head, :-1], x[:, head, -1:]
        # What the mass explains is taken out first, as a mean is by centring.
        out = features - mass @ torch.linalg.lstsq(mass, features).solution
        penalty = 0.05 * out.square().sum(0).mean()
        rows = torch.cat(
            [x[:, head], torch.cat([penalty.sqrt() * torch.eye(6).double(), torch.zeros(6, 1)], 1)]
        )
        right = torch.cat([y[:, head], torch.zeros(6, 3, dtype=torch.float64)])
        expected = torch.linalg.lstsq(rows, right).solution
        torch.testing.assert_close(by_head[head], expected[:-1])
        torch.testing.assert_close(found_bias.view(2, 3)[head], expected[-1])
    residual = y - torch.einsum("rhf,hfo->rho", x[..., :-1], by_head)
    residual = residual - x[..., -1:] * found_bias.view(2, 3)
    assert after == pytest.approx(float(residual.square().sum() / y.square().sum()))
    assert before > after


def test_weights_that_no_penalty_improves_stay(monkeypatch):
    x, y = rows_of_values()
    held_x, _ = rows_of_values(seed=1)
    weight = torch.randn(2, 6, 3, dtype=torch.float64)
    bias = torch.randn(2, 3, dtype=torch.float64)
    exact = torch.einsum("rhf,hfo->rho", held_x[..., :-1], weight) + held_x[..., -1:] * bias
    found = fit_values(block_of(x, y), block_of(held_x, exact), weight, bias)
    assert torch.equal(found[0], weight)
    assert torch.equal(found[1], bias)


@pytest.mark.parametrize("heads", HEADS)
def test_alignment_lowers_held_out_errors_and_keeps_the_shape(target, heads):
    # A relative of the target, so that there is something to map.
    source = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(5)
    for parameter in source.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += 0.1 * parameter.data.std() * noise
    text = [batch_of(8, 48, start) for start in range(0, 80, 8)]
    statistics = calibrate(source, target, text, heads=heads, held_out_every=5)
    before = fit(statistics, select_layers(statistics, 2), heads=heads)
    found = aligned(before, source, target, text)
    errors = found.config.quality["alignment"]
    for kind in ("keys", "values"):
        assert len(errors[kind]) == 3
        assert all(after <= first for first, after in errors[kind])
        assert sum(after for _, after in errors[kind]) < sum(first for first, _ in errors[kind])
    shapes = {name: tensor.shape for name, tensor in found.tensors().items()}
    assert shapes == {name: tensor.shape for name, tensor in before.tensors().items()}
    assert found.config.ridge["alignment"]["exact_prefix"] == 4


def test_a_perfect_mapper_stays_as_it_is(target):
    identity = identity_mapper(target)
    found = aligned(identity, target, target)
    for before, after in found.config.quality["alignment"]["values"]:
        assert before < 1e-9
        assert after <= before
    for name, tensor in identity.tensors().items():
        torch.testing.assert_close(found.tensors()[name], tensor, rtol=0, atol=2e-3)


def test_each_of_the_first_steps_leaves_less_error_in_the_keys(target):
    tensors = identity_mapper(target).tensors()
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(tensors["key_weight"].shape, generator=generator)
    tensors["key_weight"] = tensors["key_weight"] + 0.1 * noise
    start = KVMapper(identity_mapper(target).config, tensors)
    found = align_keys(start, target, target, batches(), held_out_every=5, steps=2)
    once = align_keys(start, target, target, batches(), held_out_every=5, steps=1)
    errors = [mapper.config.quality["alignment"]["keys"] for mapper in found]
    for first, second in zip(*errors, strict=True):
        assert first[0] == second[0] > 2 * first[1] > 2 * second[1]
    for steps, mapper in enumerate(found, start=1):
        assert mapper.config.ridge["alignment"]["key_steps"] == steps
        for part in ("weight", "bias"):
            name = f"value_{part}"
            assert torch.equal(mapper.tensors()[name], start.tensors()[name])
    # A step more does not change what was after the first.
    for name, tensor in once[0].tensors().items():
        assert torch.equal(found[0].tensors()[name], tensor)
    assert not torch.equal(found[0].key_weight, found[1].key_weight)


def test_passes_of_few_layers_give_what_one_pass_gives(plain, source, target):
    passes = []
    few = aligned(
        plain["matched"], source, target, memory_bytes=1, progress=lambda *at: passes.append(at)
    )
    once = aligned(plain["matched"], source, target)
    for name, tensor in once.tensors().items():
        torch.testing.assert_close(few.tensors()[name], tensor)
    # 15 batches, read for the keys of each of three layers five times and once for its values.
    assert (15 * 3 * 5, 15 * 3 * 5) in passes
    assert passes[-1] == (15 * 3, 15 * 3)


@pytest.mark.parametrize(("fit_part", "passes"), [(align_keys, 5), (align_values, 1)])
def test_an_interrupted_alignment_goes_on(plain, source, target, tmp_path, fit_part, passes):
    path = tmp_path / "state"

    def run(mapper=plain["matched"], **options):
        options = {"held_out_every": 5, "memory_bytes": 1, **options}
        found = fit_part(mapper, source, target, batches(), **options)
        return found if isinstance(found, list) else [found]

    def stop(done, total):
        if done == 15 * passes + 1:  # the first of three layers is done
            raise KeyboardInterrupt

    whole = run()
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=path, progress=stop)
    seen = []
    resumed = run(checkpoint=path, progress=lambda *at: seen.append(at))
    assert seen[-1] == (2 * 15 * passes, 2 * 15 * passes)
    for first, second in zip(whole, resumed, strict=True):
        assert first.config == second.config
        for name, tensor in first.tensors().items():
            assert torch.equal(second.tensors()[name], tensor)
    with pytest.raises(ConflictError, match="another mapper"):
        run(plain["all"], checkpoint=path)
    for option in ({"exact_prefix": 3}, {"held_out_every": 6}):
        with pytest.raises(ConflictError, match="other settings"):
            run(checkpoint=path, **option)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(VerificationError, match="not a whole safetensors file"):
        run(checkpoint=path)


@pytest.mark.parametrize("fit_part", [align_keys, align_values])
def test_what_cannot_be_aligned_is_refused(plain, source, target, fit_part):
    with pytest.raises(IncompatiblePairError):
        fit_part(plain["all"], target, source, batches())
    with pytest.raises(UsageError, match="held out"):
        fit_part(plain["all"], source, target, batches(), held_out_every=1000)
    with pytest.raises(UsageError, match="more than once"):
        fit_part(plain["all"], source, target, iter(batches()))


def test_keys_take_at_least_one_step(plain, source, target):
    with pytest.raises(UsageError, match="at least one step"):
        align_keys(plain["all"], source, target, batches(), steps=0)
