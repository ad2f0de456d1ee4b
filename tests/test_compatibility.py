import dataclasses

import pytest
from tiny import LLAMA3, YARN, tiny_config, tiny_model

from kvhub.compatibility import (
    check_pair,
    compare_model,
    compare_pair,
    require_pair,
    require_same,
)
from kvhub.errors import IncompatiblePairError, UsageError
from kvhub.spec import ModelSpec

FIELDS = [
    "support",
    "model_type",
    "num_layers",
    "kv_heads",
    "head_dim",
    "rope",
    "layer_types",
    "sliding_window",
    "tokenizer",
    "vocab_size",
    "max_positions",
    "dtype",
]


def spec(architecture="qwen3", layers=2, name="org/name", digest="0" * 64, **overrides):
    return ModelSpec.from_config(tiny_config(architecture, layers, **overrides), name, None, digest)


def decide(source, target, field, heads="all"):
    decisions = {d.field: d for d in compare_pair(source, target, heads)}
    return decisions[field]


def verdicts(source, target, heads="all"):
    return {d.field: d.verdict for d in compare_pair(source, target, heads) if d.verdict != "ok"}


def test_every_field_is_decided_in_one_order():
    decisions = compare_pair(spec(), spec(layers=3))
    assert [d.field for d in decisions] == FIELDS
    assert all(d.verdict == "ok" and d.reason for d in decisions)
    refused = compare_pair(spec(), ModelSpec.from_config({"model_type": "gpt2"}))
    assert [d.field for d in refused] == FIELDS


def test_a_pair_that_differs_where_it_may():
    source = spec(layers=2, head_dim=16, num_key_value_heads=2, hidden_size=32, rope_theta=1e4)
    target = spec(layers=5, head_dim=8, num_key_value_heads=4, hidden_size=64, rope_scaling=YARN)
    assert verdicts(source, target) == {}
    assert check_pair(source, target) == []
    require_pair(source, target)
    assert decide(source, target, "num_layers").target == 5
    assert (
        decide(source, target, "head_dim").source,
        decide(source, target, "head_dim").target,
    ) == (
        16,
        8,
    )


def test_matched_heads_need_as_many_on_both_sides():
    source, target = spec(), spec(num_key_value_heads=4)
    assert verdicts(source, target, "all") == {}
    assert verdicts(source, target, "matched") == {"kv_heads": "refuse"}
    assert verdicts(source, source, "matched") == {}
    refusal = check_pair(source, target, "matched")[0]
    assert (refusal.field, refusal.source, refusal.target) == ("kv_heads", 2, 4)
    with pytest.raises(IncompatiblePairError, match=r"kv_heads is 2 .* and 4 .*") as caught:
        require_pair(source, target, "matched")
    assert "--heads all" in caught.value.hint


def test_rope_may_differ_because_it_is_applied_anew():
    three_one, three_two = spec("llama"), spec("llama", rope_scaling={**LLAMA3, "factor": 32.0})
    same, other = decide(three_one, three_one, "rope"), decide(three_one, three_two, "rope")
    assert same.reason == "equal"
    assert other.verdict == "ok"
    assert "applied anew" in other.reason
    assert "factor 8" in other.source
    assert "factor 32" in other.target
    interleaved = decide(spec("glm4"), spec("qwen3"), "rope")
    assert interleaved.verdict == "ok"
    assert "8 dims, interleaved" in interleaved.source


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            {"support", "layer_types", "sliding_window"},
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {"support", "rope"}),
        ({"num_kv_shared_layers": 1}, {"support"}),
    ],
)
def test_either_side_can_refuse(overrides, fields, swapped):
    pair = [spec(), spec(name="org/odd", **overrides)]
    if swapped:
        pair.reverse()
    refusals = check_pair(*pair)
    assert {d.field for d in refusals} == fields
    support = refusals[0]
    odd, plain = (support.source, support.target) if swapped else (support.target, support.source)
    assert odd == "; ".join(pair[0 if swapped else 1].unsupported)
    assert plain == "supported"
    with pytest.raises(IncompatiblePairError) as caught:
        require_pair(*pair)
    assert odd in caught.value.message
    assert "org/odd" in caught.value.message


def test_a_spec_that_hides_its_reasons_is_still_refused():
    sliding = spec(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    hidden = dataclasses.replace(sliding, unsupported=())
    assert {d.field for d in check_pair(spec(), hidden)} == {"layer_types", "sliding_window"}
    no_rope = dataclasses.replace(spec(), rope=None)
    assert {d.field for d in check_pair(no_rope, spec())} == {"rope"}


@pytest.mark.parametrize(
    ("source", "target", "verdict"),
    [
        ("a" * 64, "a" * 64, "ok"),
        ("a" * 64, "b" * 64, "refuse"),
        ("a" * 64, None, "warn"),
        (None, "a" * 64, "warn"),
        (None, None, "warn"),
    ],
)
def test_tokenizers(source, target, verdict):
    decision = decide(spec(digest=source), spec(digest=target), "tokenizer")
    assert (decision.source, decision.target, decision.verdict) == (source, target, verdict)


def test_embeddings_may_be_padded_if_the_tokenizer_is_one():
    padded = spec(vocab_size=128)
    assert decide(spec(), padded, "vocab_size").verdict == "ok"
    assert decide(spec(), spec(vocab_size=128, digest=None), "vocab_size").verdict == "warn"
    # Equal sizes prove nothing.
    assert decide(spec(digest="a"), spec(digest="b"), "vocab_size").verdict == "ok"
    assert decide(spec(digest="a"), spec(digest="b"), "tokenizer").verdict == "refuse"


def test_warnings_do_not_refuse():
    source = spec("llama", max_position_embeddings=65536)
    target = spec("qwen3", max_position_embeddings=32768)
    assert verdicts(source, target) == {"model_type": "warn", "max_positions": "warn"}
    require_pair(source, target)
    assert verdicts(target, source) == {"model_type": "warn"}


def test_all_refusals_are_in_one_error():
    source = spec(name="org/a", num_key_value_heads=4)
    target = spec(name="org/b", digest="1" * 64, rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(IncompatiblePairError) as caught:
        require_pair(source, target, "matched")
    for part in ("org/a", "org/b", "kv_heads is 4", "tokenizer is 000", "type dynamic"):
        assert part in caught.value.message
    assert caught.value.hint == "See every decision: kvhub check org/a org/b"
    assert caught.value.exit_code == 6


def test_other_commits_are_told_apart_from_other_geometry(caplog):
    stored = dataclasses.replace(spec(name="org/model"), revision="a" * 40)
    moved = dataclasses.replace(stored, revision="b" * 40)
    verdicts = {match.field: match.verdict for match in compare_model(stored, moved)}
    assert verdicts.pop("revision") == "warn"
    assert set(verdicts.values()) == {"ok"}
    with caplog.at_level("WARNING", logger="kvhub"):
        for _ in range(2):
            require_same(stored, moved, "source")
        require_same(stored, stored, "source")
        require_same(stored, dataclasses.replace(stored, revision=None), "source")
        require_same(stored, dataclasses.replace(moved, model_id="/some/folder"), "source")
    (record,) = caplog.records
    assert f"source revision {'a' * 40}; found {'b' * 40}" in record.getMessage()
    fork = dataclasses.replace(stored, model_id="org/fork")
    assert [m.field for m in compare_model(stored, fork) if m.verdict != "ok"] == ["model_id"]


def test_unknown_heads():
    with pytest.raises(UsageError, match="'all' or 'matched', found 'each'"):
        compare_pair(spec(), spec(), "each")


def test_a_live_model_is_the_one_of_its_spec():
    live = ModelSpec.from_model(tiny_model("llama"))
    stored = spec("llama", name="org/elsewhere", vocab_size=80, max_position_embeddings=65536)
    stored = dataclasses.replace(stored, revision="0" * 40, dtype="bfloat16")
    require_same(stored, live, "source")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"head_dim": 8}, "expected head_dim 16 but found 8"),
        ({"num_key_value_heads": 4}, "expected kv_heads 2 but found 4"),
        ({"layers": 3}, "expected num_layers 2 but found 3"),
        ({"hidden_size": 64}, "expected hidden_size 32 but found 64"),
        ({"architecture": "qwen3"}, "expected model_type llama but found qwen3"),
        ({"rope_scaling": {**LLAMA3, "factor": 32.0}}, "factor 8, .* but found .*factor 32"),
        ({"rope_theta": 1e4}, "RoPE .*theta 500000, .* found .*theta 10000"),
        ({"digest": "1" * 64}, "tokenizer_digest 000.* but found 111"),
    ],
)
def test_another_live_model_is_refused(overrides, message):
    stored = spec("llama", name="org/stored")
    found = spec(**{"architecture": "llama", "name": "org/found", **overrides})
    with pytest.raises(IncompatiblePairError, match=message) as caught:
        require_same(stored, found, "target")
    assert caught.value.message.startswith("The target model org/found is not the one")
    assert "org/stored" in caught.value.hint


def test_an_unknown_tokenizer_is_not_another_one():
    require_same(spec(digest="a"), spec(digest=None), "source")
    require_same(spec(digest=None), spec(digest="a"), "source")


def test_frequencies_may_differ_by_rounding_only():
    stored = spec()

    def scaled(factor):
        rope = stored.rope
        inv_freq = (*rope.inv_freq[:-1], rope.inv_freq[-1] * factor)
        return dataclasses.replace(stored, rope=dataclasses.replace(rope, inv_freq=inv_freq))

    require_same(stored, scaled(1 + 1e-7), "source")
    with pytest.raises(IncompatiblePairError, match="RoPE"):
        require_same(stored, scaled(1 + 1e-4), "source")


def test_attention_scaling_is_part_of_rope():
    stored = spec(rope_scaling=YARN)
    other = spec(rope_scaling={**YARN, "attention_factor": 1.0})
    assert stored.rope.inv_freq == other.rope.inv_freq
    with pytest.raises(IncompatiblePairError, match=r"attention scaling 1\.27726"):
        require_same(stored, other, "source")


def test_two_ropes_never_look_alike_in_the_error():
    stored = spec(rope_scaling=YARN)
    other = spec(rope_scaling={**YARN, "beta_fast": 16.0})
    with pytest.raises(IncompatiblePairError, match=r"beta_fast 32.* but found .*beta_fast 16"):
        require_same(stored, other, "source")


@pytest.mark.parametrize("change", [{"interleaved": True}, {"rope_type": "linear"}])
def test_how_pairs_rotate_is_part_of_rope(change):
    stored = spec()
    other = dataclasses.replace(stored, rope=dataclasses.replace(stored.rope, **change))
    with pytest.raises(IncompatiblePairError, match="RoPE"):
        require_same(stored, other, "source")
    assert decide(stored, other, "rope").reason != "equal"
