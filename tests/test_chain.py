"""Keys are equal exactly where tokens, and all that their states depend on, are."""

import subprocess
import sys
from dataclasses import fields, replace

import pytest
from kvhub.exporters.chain import LAYOUT_VERSION, Namespace, chunk_keys, shard_key

from kvhub.errors import UsageError

SPACE = Namespace(
    model="org/small",
    revision="a" * 40,
    tokenizer_digest="b" * 64,
    rope_digest="c" * 64,
    kv_dtype="bfloat16",
    num_layers=2,
    kv_heads=4,
    head_dim=8,
    chunk_tokens=4,
)
PLAIN = {"salt": None, "lora": None, "exact": True}
TOKENS = list(range(100, 119))  # four chunks of four, and three tokens


def keys(tokens=TOKENS, namespace=SPACE, **options):
    return chunk_keys(namespace, tokens, **{**PLAIN, **options})


def test_there_is_a_key_for_each_complete_chunk():
    found = keys()
    assert len({*found}) == 4
    assert all(len(key) == 32 and {*key} <= {*"0123456789abcdef"} for key in found)
    assert [len(keys(TOKENS[:count])) for count in (0, 1, 3, 4, 5, 8)] == [0, 0, 0, 1, 1, 2]


def test_a_prefix_has_the_prefix_of_the_keys():
    for count in range(len(TOKENS)):
        assert keys(TOKENS[:count]) == keys()[: count // 4]
    assert keys(tuple(TOKENS)) == keys()


@pytest.mark.parametrize("position", [0, 3, 4, 9, 15])
def test_a_token_changes_its_chunk_and_all_that_follow(position):
    changed = [*TOKENS]
    changed[position] += 1
    same = [a == b for a, b in zip(keys(), keys(changed), strict=True)]
    assert same == [chunk < position // 4 for chunk in range(4)]


def test_equal_chunks_at_other_places_have_other_keys():
    assert len({*keys([7] * 16)}) == 4
    assert not {*keys(TOKENS[:8])} & {*keys(TOKENS[4:8] + TOKENS[:4])}


def test_every_field_of_the_namespace_changes_every_key():
    seen = {*keys()}
    for field in fields(SPACE):
        old = getattr(SPACE, field.name)
        other = replace(SPACE, **{field.name: 2 * old if isinstance(old, int) else f"{old}x"})
        assert other.digest != SPACE.digest
        found = {*keys(namespace=other)}
        assert not seen & found, field.name
        seen |= found


def test_fields_do_not_run_into_each_other():
    first = replace(SPACE, model="ab", revision="c")
    assert first.digest != replace(SPACE, model="a", revision="bc").digest
    assert replace(SPACE, num_layers=4, kv_heads=2).digest != SPACE.digest


def test_salt_adapter_and_exactness_are_told_apart():
    options = [
        {"salt": salt, "lora": lora, "exact": exact}
        for salt in (None, "", "a", "0", "None", "no salt", "a\0", "lora0", "\ud800")
        for lora in (None, 0, 1, 10)
        for exact in (True, False)
    ]
    found = [key for option in options for key in keys(**option)]
    assert len({*found}) == len(found) == 4 * len(options)


def test_keys_are_the_same_in_every_process():
    code = "from kvhub.exporters.chain import *; space = Namespace('m', 'r', 't', 'p', 'f', 1, 1, 1"
    code += ", 2); print(*chunk_keys(space, [1, 2], salt='s', lora=3, exact=False))"
    for seed in "12":
        process = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed},
        )  # fmt: skip
        # Written down: another value means that stored entries are not found any more.
        assert process.stdout.strip() == "f3a24ccc31584e73368b66ee71e7dbd9"
    assert LAYOUT_VERSION == "lkhtd-1"


@pytest.mark.parametrize("token", [-1, 2**63, -(2**63), 1.5, "1", None])
def test_what_is_no_token_has_no_key(token):
    with pytest.raises(UsageError, match=r"from 0 to 2\*\*63 - 1"):
        keys([1, 2, 3, token])
    with pytest.raises(UsageError, match=r"from 0 to 2\*\*63 - 1"):
        keys([*TOKENS, token])  # also behind the last chunk
    if token is not None:
        with pytest.raises(UsageError, match=r"from 0 to 2\*\*63 - 1"):
            keys(lora=token)


def test_the_largest_token_has_a_key():
    assert len({*keys([2**63 - 1] * 4), *keys([0] * 4), *keys([1] * 4)}) == 3


@pytest.mark.parametrize(
    "change",
    [
        *({name: ""} for name in ("model", "revision", "tokenizer_digest", "rope_digest")),
        *({"kv_dtype": ""}, {"layout": ""}, {"model": None}, {"chat_template_digest": None}),
        *({"num_layers": 0}, {"kv_heads": -1}, {"head_dim": 8.0}, {"num_layers": True}),
        *({"chunk_tokens": 0}, {"chunk_tokens": 24}, {"chunk_tokens": -32}),
    ],
)
def test_a_namespace_with_something_unknown_is_refused(change):
    with pytest.raises(UsageError, match=next(iter(change))):
        replace(SPACE, **change)


def test_shards_have_keys_of_their_own():
    key = keys()[0]
    spans = [(0, 4), (0, 2), (2, 4), (1, 2), (1, 12), (11, 2 + 10)]
    found = {shard_key(key, *span) for span in spans}
    assert len(found | {key}) == len(spans) + 1
    for span in ((2, 2), (3, 2), (-1, 2)):
        with pytest.raises(UsageError, match="heads"):
            shard_key(key, *span)
