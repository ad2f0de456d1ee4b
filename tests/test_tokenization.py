import json

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvhub.errors import VerificationError
from kvhub.tokenization import file_digest, token_differences, tokenizer_digest

VOCABULARY = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}
MERGES = [("a", "b"), ("ab", "c")]


def build(vocabulary=VOCABULARY, merges=MERGES, added=("<end>",), **model_options):
    tokenizer = Tokenizer(models.BPE(dict(vocabulary), list(merges), **model_options))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in added])
    return tokenizer


def lowercase(tokenizer):
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])


def split_on_spaces(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


def prefix_space(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def test_equal_tokenizers_have_one_digest():
    digest = tokenizer_digest(build())
    assert digest == tokenizer_digest(build())
    assert len(digest) == 64
    assert digest == tokenizer_digest(build(dict(reversed(VOCABULARY.items()))))


@pytest.mark.parametrize(
    "other",
    [
        build({**VOCABULARY, "c": 4, "abc": 2}),
        build({**VOCABULARY, "bc": 5}),
        build(merges=MERGES[:1]),
        build({**VOCABULARY, "bc": 5}, merges=[("b", "c"), ("a", "b")]),
        build(added=("<end>", "<more>")),
        build(added=("<stop>",)),
        build(byte_fallback=True),
        build(ignore_merges=True),
        build(unk_token="a"),
    ],
    ids=["ids", "vocab", "merges", "order", "added", "name", "bytes", "ignored", "unknown"],
)
def test_whatever_changes_ids_changes_the_digest(other):
    assert tokenizer_digest(other) != tokenizer_digest(build())


@pytest.mark.parametrize("change", [lowercase, split_on_spaces, prefix_space])
def test_whatever_changes_the_text_first_changes_the_digest(change):
    tokenizer = build()
    change(tokenizer)
    assert tokenizer_digest(tokenizer) != tokenizer_digest(build())


def test_merge_order_matters():
    vocabulary = {**VOCABULARY, "bc": 5}
    first = build(vocabulary, [("a", "b"), ("b", "c")])
    second = build(vocabulary, [("b", "c"), ("a", "b")])
    assert first.encode("abc").ids != second.encode("abc").ids
    assert tokenizer_digest(first) != tokenizer_digest(second)


def test_what_only_goes_around_a_text_does_not_matter():
    tokenizer = build()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", 5)]
    )
    tokenizer.enable_padding()
    tokenizer.enable_truncation(8)
    assert tokenizer_digest(tokenizer) == tokenizer_digest(build())
    wrapped = PreTrainedTokenizerFast(tokenizer_object=build(), chat_template="{{ messages }}")
    assert tokenizer_digest(wrapped) == tokenizer_digest(build())


def test_both_forms_of_merges_have_one_digest(tmp_path):
    state = json.loads(build().to_str())
    assert state["model"]["merges"][0] == ["a", "b"]
    pairs, strings = tmp_path / "pairs.json", tmp_path / "strings.json"
    pairs.write_text(json.dumps(state))
    state["model"]["merges"] = [" ".join(merge) for merge in state["model"]["merges"]]
    strings.write_text(json.dumps(state))
    assert file_digest(pairs) == file_digest(strings) == tokenizer_digest(build())

    class OldForm:
        def to_str(self):
            return strings.read_text()

    assert tokenizer_digest(OldForm()) == tokenizer_digest(build())


def test_empty_and_absent_affixes_have_one_digest():
    # transformers builds its own classes with "" where tokenizer.json says null.
    other = build(continuing_subword_prefix="", end_of_word_suffix="")
    assert tokenizer_digest(other) == tokenizer_digest(build())


def test_a_tokenizer_of_another_kind_has_no_digest():
    class Slow:
        def get_vocab(self):
            return VOCABULARY

    assert tokenizer_digest(Slow()) is None


def test_a_file_that_is_no_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(VerificationError, match=r"Expected a tokenizer in .*tokenizer\.json"):
        file_digest(path)


def test_differences_name_both_tokens():
    source, target = build(), build({**VOCABULARY, "bc": 5, "ca": 6}, added=("<end>",))
    assert token_differences(source, source) == []
    assert token_differences(source, target) == [
        (5, "<end>", "bc"),
        (6, None, "ca"),
        (7, None, "<end>"),
    ]
    assert token_differences(target, source, limit=2) == [(5, "bc", "<end>"), (6, "ca", None)]
