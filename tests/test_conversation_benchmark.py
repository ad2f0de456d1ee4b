"""`benchmarks/conversations.py` with the identity for a map: sharing may not change a thing."""

from pathlib import Path

import pytest
import torch
from mapping import identity_mapper
from tiny import tiny_model

from kvhub.models import load_tokenizer

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import conversations
    import coqa

    return conversations, coqa


@pytest.fixture
def shared():
    model = tiny_model("qwen3", 2, dtype=torch.float64, vocab_size=4096)
    identity = identity_mapper(model, dtype=torch.float64)
    models = {"first": model, "second": model}
    return models, {("first", "second"): identity, ("second", "first"): identity}


def test_every_way_predicts_what_the_model_predicts_alone(benchmarks, shared):
    conversations, _ = benchmarks
    protocol = conversations.Protocol(context=11, segment=5, turns=4)
    generator = torch.Generator().manual_seed(0)
    documents = [
        torch.randint(3, 4096, (1, protocol.length), generator=generator) for _ in range(2)
    ]
    found = conversations.measure(*shared, documents, protocol, "identity")
    ways = conversations.summarize(found, protocol)
    assert list(ways) == ["once", "switch", "one-way", "remap", "first"]
    for result in ways.values():
        assert abs(result["kl"]["value"]) < 1e-6
        assert result["agreement"]["value"] == 1
        assert abs(result["nll_gap"]["value"]) < 1e-6
        assert len(result["kl_by_turn"]) == 4
    # Handed off once: the passage but for the exact prefix; every turn computes its own segment.
    assert ways["once"]["mapped_tokens"] == 11 - 4
    assert ways["once"]["computed_tokens"] == 4 + 4 * 5
    assert ways["remap"]["mapped_tokens"] == sum(11 + 5 * turn - 4 for turn in range(4))


def test_shared_answers_are_the_ones_given_alone(benchmarks, shared, monkeypatch):
    _, coqa = benchmarks
    monkeypatch.setattr(coqa, "NEW_TOKENS", 3)
    monkeypatch.setattr(coqa, "f1", lambda answer, reference: len(answer) + ord(reference))
    tokenizer = load_tokenizer(str(ROOT / "examples/tiny_family/large"))
    dialogue = coqa.Dialogue("def story():", tuple("abcde"), tuple("vwxyz"))
    result = coqa.measure(*shared, tokenizer, 1, given=[dialogue])
    alone = result["alone"]["f1_by_turn"]
    assert len(alone) == 5
    assert result["once"]["f1_by_turn"] == alone
    assert result["switch"]["f1_by_turn"] == [alone[0], None, alone[2], None, alone[4]]


def test_f1_counts_words_without_case_punctuation_and_articles(benchmarks):
    _, coqa = benchmarks
    assert coqa.f1("The White House.", "white house") == 1
    assert coqa.f1("white", "a white house") == pytest.approx(2 / 3)
    assert coqa.f1("", "white") == 0
    assert coqa.f1("the", "an") == 1
