"""A hand-off by policy: mapped where gate and probe agree, else the target alone, exactly."""

from dataclasses import replace

import pytest
import torch
from mapping import identity_mapper, random_mapper
from test_report import report  # noqa: F401 - a fixture
from tiny import tiny_model

from kvhub import handoff
from kvhub.cache import cache_of, prefill
from kvhub.errors import NotFoundError, UsageError, VerificationError
from kvhub.gate import Gate, check_gate
from kvhub.generation import prefill_mapped
from kvhub.package import save
from kvhub.policy import Policy, nll_excess

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
PROBE = Policy(probe_tokens=8)


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", 3)


@pytest.fixture(scope="module")
def other():
    return tiny_model("qwen3", 2, seed=7)


def prompt(batch=1, tokens=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (batch, tokens), generator=generator)


def native(model, ids, mask=None):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **GREEDY)


def nll(model, ids, first):
    """NLL in nats per token of the tokens from `first` on, each from all before it."""
    logprobs = model(ids).logits.double().log_softmax(-1)
    found = logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return -found[:, first - 1 :].mean(1)


@pytest.mark.parametrize("padded", [0, 4])
def test_the_own_cache_is_mapped_and_writes_what_the_target_writes(model, padded):
    ids = prompt(2)
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    decisions = []
    found = handoff(
        identity_mapper(model),
        model,
        model,
        ids,
        attention_mask=mask,
        policy=PROBE,
        on_decision=decisions.append,
        **GREEDY,
    )
    assert torch.equal(found, native(model, ids, mask))
    (decision,) = decisions
    assert decision.mapped
    assert abs(decision.excess) < 1e-4


def test_a_veto_is_the_target_alone(model, other):
    """The map is random: its predictions are worse than the source's somewhere."""
    ids = prompt(3)
    decisions = []
    found = handoff(
        random_mapper(other, model),
        other,
        model,
        ids,
        policy=replace(PROBE, max_excess=-1e9),
        on_decision=decisions.append,
        **GREEDY,
    )
    assert torch.equal(found, native(model, ids))
    assert not decisions[0].mapped
    assert "above" in decisions[0].reason


@torch.no_grad()
def test_the_excess_is_that_of_full_forward_passes(model, other):
    """With the target's own cache: its NLL of the last tokens less the source's."""
    ids = prompt(2)
    source_cache, target_cache = (
        cache_of(prefill(part, ids[:, :length])) for part, length in ((other, 24), (model, 15))
    )
    before = [layer.keys.clone() for layer in source_cache.layers]
    found = nll_excess(other, model, source_cache, target_cache, ids, torch.ones_like(ids))
    torch.testing.assert_close(found, nll(model, ids, 16) - nll(other, ids, 16), rtol=0, atol=1e-4)
    assert target_cache.get_seq_length() == 23
    assert source_cache.get_seq_length() == 24
    for layer, keys in zip(source_cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


def test_the_probed_tokens_stay_as_the_target_computed_them(model, other):
    ids, mapper = prompt(), random_mapper(other, model)
    cache, decision = replace(PROBE, max_excess=1e9).prefill(mapper, other, model, ids)
    expected = prefill_mapped(mapper, other, model, ids, exact_suffix=9)
    prefill(model, ids[:, 15:-1], cache=expected)
    assert decision.mapped
    assert cache.get_seq_length() == 23
    for a, b in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys)
        torch.testing.assert_close(a.values, b.values)


def test_the_worst_row_decides_for_the_batch(model):
    assert PROBE.judge(torch.tensor([-3.0, PROBE.max_excess], dtype=torch.float64)).mapped
    decision = PROBE.judge(torch.tensor([-3.0, PROBE.max_excess + 0.01]))
    assert not decision.mapped
    assert decision.excess == pytest.approx(PROBE.max_excess + 0.01)


@pytest.mark.parametrize("tokens", [2, 9, 13])
def test_a_prompt_too_short_to_probe_is_read_again(model, other, tokens):
    ids, decisions = prompt(1, tokens), []
    found = handoff(
        random_mapper(other, model),
        other,
        model,
        ids,
        policy=PROBE,
        on_decision=decisions.append,
        **GREEDY,
    )
    assert torch.equal(found, native(model, ids))
    assert not decisions[0].mapped
    assert decisions[0].excess is None


def test_a_failed_gate_needs_no_source_and_no_probe(model, other, report, monkeypatch):  # noqa: F811
    failed = check_gate(replace(report, key_r2=-3.0))
    monkeypatch.setattr("kvhub.policy.prefill_mapped", None)
    decisions = []
    found = handoff(
        random_mapper(other, model),
        other,
        model,
        prompt(),
        policy=replace(PROBE, gate=failed),
        on_decision=decisions.append,
        **GREEDY,
    )
    assert torch.equal(found, native(model, prompt()))
    assert "key_r2 -3 against -1" in decisions[0].reason


def test_the_gate_alone_maps_like_no_policy(model, other, report):  # noqa: F811
    lenient = Gate(max_kl_over_source=9.0, min_attention_output_cosine=0.0)
    policy = Policy(check_gate(report, lenient), probe_tokens=0)
    assert policy.gate.passed
    mapper = random_mapper(other, model)
    found = handoff(mapper, other, model, prompt(), policy=policy, **GREEDY)
    assert torch.equal(found, handoff(mapper, other, model, prompt(), **GREEDY))


def test_a_package_gives_its_verdict(model, other, report, tmp_path):  # noqa: F811
    mapper = random_mapper(other, model)
    save(mapper, tmp_path / "new")
    with pytest.raises(NotFoundError, match="no report"):
        Policy.from_package(tmp_path / "new")
    judged = replace(report, gate=check_gate(report, Gate(min_key_r2=0.81)))
    save(mapper, tmp_path / "judged", report=judged.to_dict())
    policy = Policy.from_package(tmp_path / "judged", probe_tokens=3)
    assert policy.gate == judged.gate
    assert policy.probe_tokens == 3
    own = Gate(min_key_r2=0.79)
    assert Policy.from_package(tmp_path / "judged", gate=own).gate == check_gate(report, own)
    older = {key: value for key, value in report.to_dict().items() if key != "gate"}
    save(mapper, tmp_path / "older", report=older)
    assert Policy.from_package(tmp_path / "older").gate == check_gate(report)


def test_wrong_arguments_are_refused(model, other):
    with pytest.raises(UsageError, match="must not be negative; found -1"):
        Policy(probe_tokens=-1)
    with pytest.raises(UsageError, match="on_decision needs a policy"):
        handoff(random_mapper(other, model), other, model, prompt(), on_decision=print)
    broken = cache_of(prefill(model, prompt()[:, :15]))
    broken.layers[2].values[0, 0, 6, 0] = float("nan")
    source_cache = cache_of(prefill(other, prompt()))
    with pytest.raises(VerificationError, match="not finite"):
        nll_excess(other, model, source_cache, broken, prompt(), torch.ones_like(prompt()))
