"""A conversation: nothing is read twice, nothing mapped twice, and what is exact stays exact."""

import dataclasses
import random

import pytest
import torch
from mapping import identity_mapper, random_mapper
from tiny import tiny_model

from kvhub import Conversation, KVMapper
from kvhub.cache import cache_of, concatenate_caches, crop_cache, prefill
from kvhub.conversation import Turn
from kvhub.errors import IncompatiblePairError, UsageError, VerificationError
from kvhub.spans import Span, append_span, common_prefix, crop_spans, plan_pieces

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 5}
DOUBLE = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", 3, dtype=torch.float64)


@pytest.fixture(scope="module")
def other():
    return tiny_model("qwen3", 2, seed=7, dtype=torch.float64)


@pytest.fixture(scope="module")
def mappers(model, other):
    return {
        ("a", "b"): random_mapper(model, other, seed=1, dtype=torch.float64),
        ("b", "a"): random_mapper(other, model, seed=2, dtype=torch.float64),
    }


@pytest.fixture
def pair(model, other, mappers):
    return Conversation({"a": model, "b": other}, mappers)


def tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (1, count), generator=generator)


def then(*parts):
    return torch.cat(parts, dim=1)


def states(cache):
    return torch.stack([torch.cat([layer.keys, layer.values], -1) for layer in cache.layers])


def parts(turn: Turn):
    kept = turn.kept_exact + turn.kept_own + turn.kept_mapped
    return kept + turn.mapped + turn.computed


class Watched:
    """A mapper that remembers the positions that it was given, and copies of what it read."""

    def __init__(self, mapper: KVMapper):
        self.config, self.key_weight = mapper.config, mapper.key_weight
        self.calls = []
        self._mapper = mapper

    def __call__(self, cache, *, positions, dtype):
        self.calls.append((positions.tolist(), states(cache).clone()))
        return self._mapper(cache, positions=positions, dtype=dtype)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "ministral3", "glm4"])
def test_with_the_identity_for_a_map_switching_changes_nothing(architecture):
    """Two models that are one, back and forth over eight turns, write what one alone writes."""
    model = tiny_model(architecture, 3, dtype=torch.float64)
    identity = identity_mapper(model, dtype=torch.float64)
    conversation = Conversation(
        {"a": model, "b": model}, {("a", "b"): identity, ("b", "a"): identity}
    )
    text = tokens(9)
    for turn in range(8):
        expected = model.generate(text, attention_mask=torch.ones_like(text), **GREEDY)
        found = conversation.reply("ab"[turn % 2], text, **GREEDY)
        assert torch.equal(then(text, found), expected)
        assert torch.equal(conversation.input_ids, expected)
        text = then(expected, tokens(3, seed=turn))
    assert all(parts(turn) == turn.prompt_tokens for turn in conversation.turns)
    # Of the other's turn: the reply's last token before it, three read, four of its own reply.
    assert [turn.mapped for turn in conversation.turns[2:]] == [8] * 6


def test_reading_predicts_what_a_prefill_predicts(pair, model):
    text = tokens(12)
    logits = pair.read("a", text)
    torch.testing.assert_close(logits, prefill(model, text).logits, **DOUBLE)
    assert torch.equal(pair.input_ids, text)
    longer = then(text, tokens(3, 1))
    torch.testing.assert_close(
        pair.read("a", longer), prefill(model, longer).logits[:, 12:], **DOUBLE
    )
    text = longer
    assert pair.read("a", text).shape[1] == 1
    assert pair.turns[-1].kept_exact == 14
    assert pair.turns[-1].computed == 1


def test_each_turn_maps_only_what_was_read_since(model, other, mappers):
    """No token is mapped twice, and none that the model has computed itself."""
    watched = {name: Watched(mapper) for name, mapper in mappers.items()}
    conversation = Conversation({"a": model, "b": other}, watched)
    text = tokens(20)
    for turn in range(8):
        text = then(text, conversation.reply("ab"[turn % 2], text, **GREEDY), tokens(4, turn))
    for (_, target), mapper in watched.items():
        positions = [position for call, _ in mapper.calls for position in call]
        assert len(positions) == len(set(positions))
        assert sum(turn.mapped for turn in conversation.turns if turn.model == target) == len(
            positions
        )
        mapped = {
            position
            for span in conversation.spans(target)
            if span.kind == "mapped"
            for position in range(span.start, span.stop)
        }
        assert mapped == set(positions)
    assert {position for call, _ in watched["a", "b"].calls for position in call}.isdisjoint(
        position for call, _ in watched["b", "a"].calls for position in call
    )


def test_every_mapped_state_comes_from_a_state_that_a_model_computed(model, other, mappers):
    """Each is one map away from the origin's own cache, at a token the origin did not map."""
    watched = {name: Watched(mapper) for name, mapper in mappers.items()}
    conversation = Conversation({"a": model, "b": other}, watched)
    text = tokens(20)
    choose = random.Random(3)
    for turn in range(12):
        name = choose.choice("ab")
        reached = {pair: len(mapper.calls) for pair, mapper in watched.items()}
        before = {role: conversation.spans(role) for role in "ab"}
        reply = conversation.reply(name, text, **GREEDY)
        for (source, target), mapper in watched.items():
            for positions, _ in mapper.calls[reached[source, target] :]:
                assert target == name
                for span in before[source]:
                    if span.kind == "mapped":
                        assert not set(positions) & set(range(span.start, span.stop))
        text = then(text, reply, tokens(4, turn))
        if turn % 3 == 2:  # the template forgets something
            text = text[:, [i for i in range(text.shape[1]) if not 14 <= i < 17]]
    for (source, target), mapper in mappers.items():
        own, found = conversation.cache(source), conversation.cache(target)
        if conversation.turns[-1].model != target:
            continue
        for span in conversation.spans(target):
            if span.kind == "mapped":
                assert span.origin == source
                positions = torch.arange(span.start, span.stop)
                expected = mapper(crop_cache(own, span.start, span.stop), positions=positions)
                given = states(found)[..., span.start : span.stop, :]
                torch.testing.assert_close(given, states(expected), **DOUBLE)


def test_a_token_that_is_only_mapped_elsewhere_is_computed(pair, model):
    """a reads X Y, b maps both, a's Y is lost by a rewrite: b's mapped Y must not come back."""
    text = tokens(20)
    pair.read("a", text)
    pair.read("b", then(text, tokens(3, 1)))
    assert pair.turns[-1].mapped == 16
    pair.read("a", then(text[:, :10], tokens(2, 2)))
    longer = then(text, tokens(3, 1), tokens(2, 3))
    pair.read("a", longer)
    turn = pair.turns[-1]
    # Of b's cache only the three tokens that b computed are mapped.
    assert (turn.kept_exact, turn.mapped, turn.computed, turn.reprefilled) == (10, 3, 12, 10)
    assert pair.spans("a") == (
        Span(0, 20, "exact"),
        Span(20, 23, "mapped", "b"),
        Span(23, 25, "own"),
    )
    exact = states(cache_of(prefill(model, text)))
    torch.testing.assert_close(states(pair.cache("a"))[..., :20, :], exact, **DOUBLE)


def test_own_turns_stay_bit_for_bit_and_equal_a_prefill(pair, model):
    """As long as nothing mapped precedes; what the target computed is never replaced after that."""
    text = tokens(10)
    text = then(text, pair.reply("a", text, **GREEDY), tokens(4, 1))
    text = then(text, pair.reply("a", text, **GREEDY), tokens(4, 2))
    assert pair.spans("a") == (Span(0, 23, "exact"),)
    first = states(pair.cache("a"))
    expected = states(cache_of(prefill(model, text[:, :23])))
    torch.testing.assert_close(first, expected, **DOUBLE)
    for turn in range(4):
        text = then(text, pair.reply("ba"[turn % 2], text, **GREEDY), tokens(4, turn))
        second = states(pair.cache("a"))
        assert torch.equal(second[..., : first.shape[-2], :], first)
        first = second
    kinds = [span.kind for span in pair.spans("a")]
    assert kinds == ["exact", "mapped", "own", "mapped", "own"]


def test_the_first_tokens_are_each_models_own(pair, model, other):
    text = tokens(16)
    pair.read("a", text)
    pair.read("b", text)
    assert pair.spans("b") == (
        Span(0, 4, "exact"),
        Span(4, 15, "mapped", "a"),
        Span(15, 16, "own"),
    )
    exact = states(cache_of(prefill(other, text[:, :4])))
    torch.testing.assert_close(states(pair.cache("b"))[..., :4, :], exact, **DOUBLE)


def test_a_template_that_rewrites_history_gives_what_a_fresh_run_gives(pair, model, other, mappers):
    """Thinking is dropped from an earlier turn: all behind it moves to other positions."""
    text, thinking = tokens(12), tokens(5, 1)
    pair.read("a", then(text, thinking, tokens(6, 2)))
    pair.read("b", then(text, thinking, tokens(6, 2), tokens(2, 3)))
    stripped = then(text, tokens(6, 2), tokens(2, 3))
    pair.read("a", stripped)
    turn = pair.turns[-1]
    kept = common_prefix(then(text, thinking)[0].tolist(), stripped[0].tolist())
    assert kept in (12, 13)  # a token may happen to be the same
    assert (turn.kept_exact, turn.mapped, turn.computed) == (kept, 0, 20 - kept)
    fresh = Conversation({"a": model, "b": other}, mappers)
    fresh.read("a", stripped)
    torch.testing.assert_close(states(pair.cache("a")), states(fresh.cache("a")), **DOUBLE)
    # And for the other one, whose kept tokens are mapped.
    later = then(stripped, tokens(3, 4))
    found = pair.read("b", later)
    expected = fresh.read("b", later)
    torch.testing.assert_close(found, expected, **DOUBLE)
    torch.testing.assert_close(states(pair.cache("b")), states(fresh.cache("b")), **DOUBLE)
    assert [span.kind for span in pair.spans("b")] == [span.kind for span in fresh.spans("b")]


@pytest.mark.parametrize("exact", [0, 1, 4])
def test_the_whole_equals_a_cache_put_together_by_hand(exact, model, other, mappers):
    pair = Conversation({"a": model, "b": other}, mappers, exact_prefix=exact)
    text = tokens(14)
    pair.read("a", text)
    longer = then(text, tokens(5, 1))
    logits = pair.read("b", longer)
    source = crop_cache(cache_of(prefill(model, text)), exact, 14)
    cache = mappers["a", "b"](source, positions=torch.arange(exact, 14))
    if exact:
        cache = concatenate_caches(cache_of(prefill(other, text[:, :exact])), cache)
    expected = prefill(other, longer[:, 14:], cache=cache)
    torch.testing.assert_close(logits, expected.logits, **DOUBLE)
    torch.testing.assert_close(states(pair.cache("b")), states(cache_of(expected)), **DOUBLE)


def test_without_a_mapper_the_missing_part_is_read_exactly_and_the_turn_says_so(
    model, other, mappers
):
    there = {("a", "b"): mappers["a", "b"]}
    conversation = Conversation({"a": model, "b": other}, there)
    text = tokens(10)
    conversation.read("a", text)
    text = then(text, conversation.reply("b", text, **GREEDY), tokens(3, 1))
    found = conversation.reply("a", text, **GREEDY)
    expected = model.generate(text, attention_mask=torch.ones_like(text), **GREEDY)
    assert torch.equal(then(text, found), expected)
    turn = conversation.turns[-1]
    assert (turn.kept_exact, turn.mapped, turn.computed, turn.reprefilled) == (10, 0, 8, 4)
    assert [span.kind for span in conversation.spans("a")] == ["exact"]


def test_short_and_repeated_prompts(pair, model):
    for count in (1, 2, 4, 5, 6):
        text = tokens(count, seed=count)
        expected = model.generate(text, attention_mask=torch.ones_like(text), **GREEDY)
        for _ in range(2):
            assert torch.equal(then(text, pair.reply("a", text, **GREEDY)), expected)
            assert parts(pair.turns[-1]) == count
        pair.reply("b", text, **GREEDY)


def test_caches_that_were_handed_out_do_not_change(pair):
    text = tokens(12)
    pair.read("a", text)
    held = pair.cache("a")
    before = states(held).clone()
    pair.reply("b", text, **GREEDY)
    pair.reply("a", then(text[:, :6], tokens(9, 1)), **GREEDY)
    assert held.get_seq_length() == 12
    assert torch.equal(states(held), before)
    # Nor does changing one change the conversation.
    inside = states(pair.cache("a")).clone()
    pair.cache("a").layers[0].keys.zero_()
    assert torch.equal(states(pair.cache("a")), inside)


def test_a_failing_turn_leaves_the_conversation_as_it_was(model, other, mappers, monkeypatch):
    conversation = Conversation({"a": model, "b": other}, mappers)
    text = tokens(12)
    conversation.read("a", text)
    before = states(conversation.cache("a")).clone()

    def interrupted(*args, **options):
        output(*args, **options)
        raise KeyboardInterrupt

    output = model.generate
    with monkeypatch.context() as patch:
        patch.setattr(model, "generate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            conversation.reply("a", then(text, tokens(3, 1)), **GREEDY)
    assert torch.equal(states(conversation.cache("a")), before)
    assert len(conversation.turns) == 1
    assert torch.equal(conversation.input_ids, text)
    # A source cache that is not finite never becomes part of a target's.
    conversation._memories["a"].cache.layers[0].values[..., 7, :] = torch.inf
    with pytest.raises(VerificationError, match="not finite"):
        conversation.read("b", text)
    assert conversation.spans("b") == ()


def test_a_cache_of_another_length_than_the_text_is_refused(pair, model, monkeypatch):
    generate = model.generate

    def shorter(*args, **options):
        result = generate(*args, **options)
        options["cache" if "cache" in options else "past_key_values"].crop(-6)
        return result

    monkeypatch.setattr(model, "generate", shorter)
    with pytest.raises(VerificationError, match="has 10 tokens after this turn, expected 16"):
        pair.reply("a", tokens(12), **GREEDY)
    assert pair.turns == []


def test_models_that_do_not_keep_every_token_are_refused(other):
    sliding = tiny_model(
        "mistral", 2, dtype=torch.float64, sliding_window=8, layer_types=["sliding_attention"] * 2
    )
    with pytest.raises(IncompatiblePairError, match="sliding"):
        Conversation({"a": sliding, "b": other}, {})


def test_mappers_for_other_models_are_refused(model, other, mappers):
    models = {"a": model, "b": other}
    with pytest.raises(IncompatiblePairError, match="source model"):
        Conversation(models, {("b", "a"): mappers["a", "b"]})
    with pytest.raises(UsageError, match="found \\('a', 'c'\\)"):
        Conversation(models, {("a", "c"): mappers["a", "b"]})
    with pytest.raises(UsageError, match="from one model to another"):
        Conversation(models, {("a", "a"): mappers["a", "b"]})
    with pytest.raises(UsageError, match="exact_prefix"):
        Conversation(models, mappers, exact_prefix=-1)


def test_mappers_of_two_tokenizers_are_refused(model, other, mappers):
    changed = {}
    for digest, (pair, mapper) in zip("12", mappers.items(), strict=True):
        config = dataclasses.replace(
            mapper.config,
            source=dataclasses.replace(mapper.config.source, tokenizer_digest=digest),
            target=dataclasses.replace(mapper.config.target, tokenizer_digest=digest),
        )
        changed[pair] = KVMapper(config, dict(mapper.named_buffers()))
    with pytest.raises(IncompatiblePairError, match="different tokenizers: \\['1', '2'\\]"):
        Conversation({"a": model, "b": other}, changed)


@pytest.mark.parametrize(
    "input_ids",
    [tokens(0), tokens(4)[0], tokens(4).repeat(2, 1), tokens(4).double(), tokens(4) + 64],
    ids=["empty", "flat", "batch", "floats", "other-vocabulary"],
)
def test_only_one_row_of_the_models_own_tokens_is_taken(pair, input_ids):
    with pytest.raises(UsageError, match="input_ids"):
        pair.reply("a", input_ids)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"num_return_sequences": 2}, {"use_cache": False}, {"attention_mask": 1}],
    ids=lambda options: next(iter(options)),
)
def test_options_that_leave_no_cache_of_one_answer_are_refused(pair, options):
    with pytest.raises(UsageError, match=next(iter(options))):
        pair.reply("a", tokens(4), **options)


def test_unknown_models_are_named(pair):
    for call in (pair.reply, pair.read):
        with pytest.raises(UsageError, match="No model 'c'"):
            call("c", tokens(4))
    with pytest.raises(UsageError, match="No model 'c'"):
        pair.spans("c")
    with pytest.raises(UsageError, match="b has not had a turn"):
        pair.cache("b")


def test_a_plan_covers_every_token_once_and_maps_no_mapped_state():
    """Over random records of two other models, against the rule applied token by token."""
    choose = random.Random(0)
    for _ in range(300):
        length = choose.randrange(1, 30)
        kept = choose.randrange(length)
        prefix = choose.randrange(6)
        others = {}
        for name in "xy":
            spans = ()
            for stop in sorted(choose.sample(range(1, 31), 4)):
                spans = append_span(spans, stop, choose.choice(["z", None]))
            others[name] = crop_spans(spans, choose.randrange(length + 1))
        mappable = choose.choice([["x"], ["y", "x"], []])
        kind = {
            (name, position): span.kind
            for name, spans in others.items()
            for span in spans
            for position in range(span.start, span.stop)
        }
        pieces = plan_pieces(kept, length, others, mappable, prefix)
        assert [piece.start for piece in pieces] == [kept, *(p.stop for p in pieces[:-1])]
        assert pieces[-1].stop == length
        assert pieces[-1].origin is None
        for piece in pieces:
            for position in range(piece.start, piece.stop):
                inside = prefix <= position < length - 1
                able = [n for n in mappable if kind.get((n, position), "mapped") != "mapped"]
                assert piece.origin == (able[0] if inside and able else None)
                held = any((name, position) in kind for name in others)
                assert piece.read_elsewhere == (inside and held and not able)
