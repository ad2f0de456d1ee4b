from dataclasses import replace

import pytest
import torch
from tiny import tiny_model

from kvhub import KVMapper, MapperConfig, ModelSpec
from kvhub.cache import build_cache, cache_of, prefill, read_cache
from kvhub.data import TokenBatch
from kvhub.errors import IncompatiblePairError, UsageError, VerificationError
from kvhub.evaluation import evaluate
from kvhub.metrics import score_predictions
from kvhub.report import SETTINGS, Report
from kvhub.rope import apply_rope, strip_rope


def mapper_between(source, target, weights):
    """A mapper of target layer i from source layer i with given `[layers, f, o]` weights."""
    specs = ModelSpec.from_model(source), ModelSpec.from_model(target)
    config = MapperConfig(
        source=specs[0],
        target=specs[1],
        heads="all",
        top_k=1,
        selection=tuple((layer,) for layer in range(specs[1].num_layers)),
        selection_method="probe",
        ridge={},
        weighting="uniform",
    )
    bias = torch.zeros(len(weights), 1, weights.shape[-1], dtype=weights.dtype)
    weights = weights[:, None]
    tensors = {"key_weight": weights, "key_bias": bias}
    return KVMapper(config, {**tensors, "value_weight": weights.clone(), "value_bias": bias + 0.01})


def identity_mapper(model):
    spec = ModelSpec.from_model(model)
    mapper = mapper_between(model, model, torch.eye(spec.kv_dim).repeat(spec.num_layers, 1, 1))
    mapper.value_bias.zero_()
    return mapper


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", seed=1)


@pytest.fixture(scope="module")
def pair():
    """Two float64 models and a map between them that is neither good nor useless."""
    source = tiny_model("qwen3", seed=1, dtype=torch.float64)
    target = tiny_model("qwen3", seed=2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(2, 32, 32, generator=generator, dtype=torch.float64)
    return source, target, mapper_between(source, target, torch.eye(32) + 0.1 * weights)


@pytest.fixture(scope="module")
def written(model):
    """Text that the model itself wrote, so that it is right about it."""
    start = torch.randint(3, 60, (6, 4), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.generate(
            start, max_new_tokens=28, do_sample=False, eos_token_id=None, pad_token_id=0
        )


def random_ids(rows=3, length=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (rows, length), generator=generator)


def padded(ids, lengths):
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    ids = torch.where(mask, ids, 0)
    return TokenBatch(ids, mask.long(), tuple(range(len(ids))))


def test_an_identity_map_changes_nothing(model, written):
    report = evaluate(identity_mapper(model), model, model, [written[:4], written[4:]])
    target, mapped = report.settings["target_alone"], report.settings["mapped"]
    assert report.key_r2 == pytest.approx(1, abs=1e-6)
    assert report.value_r2 == pytest.approx(1, abs=1e-6)
    assert report.attention_output_cosine.value == pytest.approx(1, abs=1e-6)
    assert mapped.kl.value == pytest.approx(0, abs=1e-6)
    assert mapped.nll.value == pytest.approx(target.nll.value, abs=1e-5)
    assert mapped.agreement.value == target.agreement.value == 1
    assert target.accuracy.value == 1
    assert report.settings["no_context"].accuracy.value < 0.9
    assert report.retention.value == report.floor_normalized_retention.value == 1
    assert report.gap_recovered is None
    assert any("gap_recovered is not defined" in note for note in report.notes)


def test_metrics_equal_a_plain_reference(pair):
    """Every setting run sequence by sequence, the mapped cache spliced by hand."""
    source, target, mapper = pair
    ids = random_ids()
    report = evaluate(mapper, source, target, [ids], prefix_fraction=0.6, exact_prefix=2)
    prefix = 12
    labels = ids[:, prefix + 1 :]
    spec = mapper.config.target
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in SETTINGS}
    for row in range(len(ids)):
        sequence = ids[row : row + 1]
        true = prefill(target, sequence)
        own = read_cache(cache_of(true))
        keys, values = (
            torch.stack(part)[..., :prefix, :]
            for part in read_cache(cache_of(prefill(source, sequence)))
        )
        positions = torch.arange(prefix)
        keys = mapper.map_keys(strip_rope(keys, positions, mapper.config.source.rope))
        keys, values = apply_rope(keys, positions, spec.rope), mapper.map_values(values)
        for states, exact in ((keys, own[0]), (values, own[1])):
            states[..., :2, :] = torch.stack(exact)[..., :2, :]
        cache = build_cache(keys, values)
        logits = {
            "target_alone": true.logits[:, prefix:-1],
            "source_alone": prefill(source, sequence).logits[:, prefix:-1],
            "mapped": prefill(target, sequence[:, prefix:-1], cache=cache).logits,
            "no_context": prefill(target, sequence[:, prefix:-1]).logits,
        }
        for name in SETTINGS:
            scores = score_predictions(logits[name], logits["target_alone"], labels[row : row + 1])
            sums[name] += scores[0]
    per_token = {name: (sums[name] / labels.numel()).tolist() for name in SETTINGS}
    for name, expected in per_token.items():
        found = report.settings[name]
        values = [getattr(found, score).value for score in ("nll", "accuracy", "kl", "agreement")]
        # Float32 models in differently shaped batches: about 1e-7 of 4 nats.
        assert values == pytest.approx(expected, abs=2e-6), name
        assert found.perplexity.value == pytest.approx(2.718281828459045 ** expected[0])
        assert found.nll.low <= found.nll.value <= found.nll.high
    assert report.provenance["scored_tokens"] == labels.numel()
    assert report.provenance["prefix_tokens"] == 3 * prefix
    assert report.settings["mapped"].kl.value > 0.01


def test_fidelity_is_that_of_the_map_alone(pair):
    """R2 equals a dense reference over the prefixes, whatever part of them is kept exact."""
    source, target, mapper = pair
    ids = random_ids()
    reports = [
        evaluate(mapper, source, target, [ids[:2], ids[2:]], exact_prefix=n) for n in (0, 14)
    ]
    assert reports[0].layers == reports[1].layers
    assert reports[1].settings["mapped"].kl.value < reports[0].settings["mapped"].kl.value
    prefix = torch.arange(15)
    spec = mapper.config.target
    mapped = read_cache(mapper(cache_of(prefill(source, ids[:, :15]))))
    true = read_cache(cache_of(prefill(target, ids[:, :15])))
    for name, index in (("key", 0), ("value", 1)):
        for layer in range(2):
            states = [part[index][layer] for part in (true, mapped)]
            if name == "key":
                states = [strip_rope(part, prefix, spec.rope) for part in states]
            rows, fitted = (part.permute(0, 2, 1, 3).reshape(45, -1) for part in states)
            r2 = 1 - (rows - fitted).square().sum() / (rows - rows.mean(0)).square().sum()
            assert getattr(reports[0].layers, f"{name}_r2")[layer] == pytest.approx(float(r2))
    assert reports[0].key_r2 == pytest.approx(sum(reports[0].layers.key_r2) / 2)


def test_the_gap_is_measured_between_source_and_target(model, written):
    """The target wrote the text, so the source is worse; an exact cache closes the whole gap."""
    source = tiny_model("qwen3", seed=7)
    mapper = mapper_between(source, model, torch.zeros(2, 32, 32))
    report = evaluate(mapper, source, model, [written], exact_prefix=23)
    nll = {name: report.settings[name].nll.value for name in SETTINGS}
    gap = nll["source_alone"] - nll["target_alone"]
    assert gap > 0.5
    assert report.gap_recovered.value == pytest.approx((nll["source_alone"] - nll["mapped"]) / gap)
    accuracy = {name: report.settings[name].accuracy.value for name in SETTINGS}
    assert report.retention.value == pytest.approx(accuracy["mapped"])
    floor = accuracy["no_context"]
    assert report.floor_normalized_retention.value == pytest.approx(
        (accuracy["mapped"] - floor) / (1 - floor)
    )


def test_padding_and_batching_change_nothing(pair):
    source, target, mapper = pair
    ids, lengths = random_ids(4, 24), [17, 24, 12, 17]
    whole = evaluate(mapper, source, target, [padded(ids, lengths)])
    alone = evaluate(mapper, source, target, [ids[i : i + 1, :n] for i, n in enumerate(lengths)])

    def numbers(value):
        if isinstance(value, dict):
            return [number for part in value.values() for number in numbers(part)]
        if isinstance(value, list):
            return [number for part in value for number in numbers(part)]
        return [value] if isinstance(value, (int, float)) else []

    assert numbers(whole.to_dict()) == pytest.approx(numbers(alone.to_dict()), abs=1e-9)


def test_the_exact_curve_runs_from_the_map_alone_to_the_target_itself(pair):
    source, target, mapper = pair
    batches = [padded(random_ids(4, 24), [17, 24, 20, 17])]
    plain, bare = (
        evaluate(mapper, source, target, batches, exact_prefix=n).settings["mapped"] for n in (4, 0)
    )
    report = evaluate(mapper, source, target, batches, exact_budgets=(8, 0, 4, 100))
    assert report.settings["mapped"] == plain
    curve = {point.budget: point for point in report.exact}
    assert list(curve) == [0, 4, 8, 100]
    assert curve[0].kl.value == pytest.approx(bare.kl.value, abs=1e-9)
    assert curve[0].nll.value == pytest.approx(bare.nll.value, abs=1e-9)
    assert curve[4].kl.value == pytest.approx(plain.kl.value, abs=1e-9)
    assert curve[4].agreement == plain.agreement
    # Random models: neither is the better one, so there is no gap to recover.
    assert [point.gap_recovered for point in report.exact] == [report.gap_recovered] * 4
    assert curve[8].kl.value < curve[4].kl.value
    alone = report.settings["target_alone"]
    assert curve[100].kl.value == pytest.approx(0, abs=1e-9)
    assert curve[100].nll.value == pytest.approx(alone.nll.value, abs=1e-9)
    assert curve[100].agreement.value == 1
    prefixes = [12, 18, 15, 12]
    assert curve[8].share == 4 * 8 / sum(prefixes)
    assert curve[100].share == 1


def test_short_sequences_are_left_out_and_counted(pair):
    source, target, mapper = pair
    ids = random_ids(3, 24)
    report = evaluate(mapper, source, target, [padded(ids, [24, 5, 24])])
    expected = evaluate(mapper, source, target, [ids[[0, 2]]])
    assert report.settings == expected.settings
    assert report.provenance["sequences"] == 2
    assert report.provenance["skipped_sequences"] == 1
    assert any(note.startswith("1 sequences were too short") for note in report.notes)
    with pytest.raises(UsageError, match="No sequence is long enough"):
        evaluate(mapper, source, target, [ids[:, :5]])
    with pytest.raises(UsageError, match="No sequence is long enough"):
        evaluate(mapper, source, target, [])


def test_the_report_says_where_it_comes_from_and_survives_a_file(pair, tmp_path):
    source, target, mapper = pair
    calls = []
    report = evaluate(
        mapper,
        source,
        target,
        [random_ids(1), random_ids(2)],
        provenance={"mapper": "small-to-large", "data": {"source": "text"}},
        progress=lambda *call: calls.append(call),
    )
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report
    provenance = report.provenance
    assert provenance["mapper"] == "small-to-large"
    assert provenance["data"] == {"source": "text"}
    assert provenance["source"]["dtype"] == "float64"
    assert provenance["sequences"] == 3
    assert provenance["protocol"]["exact_prefix"] == 4
    assert provenance["protocol"]["prefix_fraction"] == 0.75
    assert set(provenance["versions"]) == {"kvhub", "torch", "transformers", "python"}
    assert calls == [(1, 2), (2, 2)]
    assert any("3 sequences are few" in note for note in report.notes)

    streamed = []
    evaluate(mapper, source, target, iter([random_ids(1)]), progress=lambda *c: streamed.append(c))
    assert streamed == [(1, 0)]


def test_a_multimodal_target_with_another_geometry_is_evaluated():
    source = tiny_model("ministral3", seed=1)
    target = tiny_model("mistral3", seed=2, num_key_value_heads=4)
    generator = torch.Generator().manual_seed(3)
    weights = 0.2 * torch.randn(2, 32, 64, generator=generator)
    report = evaluate(mapper_between(source, target, weights), source, target, [random_ids()])
    assert len(report.layers.key_r2_by_head[0]) == 4
    assert report.settings["mapped"].kl.value > 0


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_fraction": 0.0},
        {"prefix_fraction": 1.0},
        {"exact_prefix": -1},
        {"exact_budgets": (4, -1)},
    ],
)
def test_parameters_out_of_range_are_refused(pair, options):
    source, target, mapper = pair
    with pytest.raises(UsageError, match="found"):
        evaluate(mapper, source, target, [random_ids()], **options)


def test_other_models_and_other_tokens_are_refused(pair):
    source, target, mapper = pair
    other = tiny_model("qwen3", layers=3)
    with pytest.raises(IncompatiblePairError):
        evaluate(mapper, other, target, [random_ids()])
    with pytest.raises(IncompatiblePairError):
        evaluate(mapper, source, other, [random_ids()])
    with pytest.raises(UsageError, match="below the smaller vocabulary"):
        evaluate(mapper, source, target, [random_ids() + 40])


def test_a_broken_model_is_an_error_not_a_number(pair):
    source, target, mapper = pair
    for name in ("source", "target"):
        broken = tiny_model("qwen3", seed=1, dtype=torch.float64)
        broken.lm_head.weight.data[5] = torch.nan
        models = {"source": source, "target": target, name: broken}
        with pytest.raises(VerificationError, match="not finite"):
            evaluate(mapper, models["source"], models["target"], [random_ids()])
    assert target.config._attn_implementation == "sdpa"


def test_a_mapper_without_tokens_to_map_is_never_scored(pair):
    source, target, mapper = pair
    ids = random_ids(2, 21)  # a prefix of 15
    assert evaluate(mapper, source, target, [ids], exact_prefix=14).provenance["sequences"] == 2
    with pytest.raises(UsageError, match="No sequence is long enough"):
        evaluate(mapper, source, target, [ids], exact_prefix=15)


def test_a_spec_with_a_known_tokenizer_still_fits_its_model(model):
    mapper = identity_mapper(model)
    config = replace(mapper.config, source=replace(mapper.config.source, tokenizer_digest="0" * 64))
    known = KVMapper(config, dict(mapper.named_buffers()))
    assert evaluate(known, model, model, [random_ids()]).settings["mapped"].kl.value < 1e-6
