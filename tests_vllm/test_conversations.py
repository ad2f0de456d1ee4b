"""Conversations that go back and forth between two servers, each the target of the other."""

import pytest
from conftest import FAMILY, OTHER, TINY, text_tokens
from conversation import converse

from kvhub.models import load_tokenizer


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("first", TINY)
def test_back_and_forth(servers, deployed, first, chat):
    """A model's own chunks come back exact, and its answer is its own; the other maps."""
    names = [first, OTHER[first], first, OTHER[first], first]
    tokenizer = load_tokenizer(str(FAMILY / first))
    start = 6000 + 500 * (2 * TINY.index(first) + chat)
    lengths = (100, 40, 70, 40, 40)
    texts = [
        tokenizer.decode(text_tokens()[start + 100 * turn :][:length])
        for turn, length in enumerate(lengths)
    ]
    found = converse(servers, deployed, names, texts, tokenizer, chat=chat)
    assert found[0] == []
    for kinds in (found[1], found[3]):
        assert kinds[0] == kinds[-1] == "mapped"
    assert {"exact"} <= {*found[2]} <= {"exact", "computed"}
    assert "exact" in found[4]
    assert len(found[4]) > len(found[2])
