"""How far a mapper is aligned: the rule, and that what is tried is on the way."""

import copy
from contextlib import contextmanager

import pytest
import torch
from tiny import tiny_model

from kvhub import calibrate, evaluate, fit, select_layers
from kvhub.alignment import VALUE_SHARES, Candidate, align, choose, held_out_batches
from kvhub.alignment_passes import align_keys, align_values
from kvhub.data import TokenBatch
from kvhub.exact import EXACT_PREFIX
from kvhub.key_fit import STEPS


@pytest.fixture(scope="module")
def models():
    """A target, and a relative of it for a source."""
    target = tiny_model("qwen3", 2, seed=2)
    source = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(5)
    for parameter in source.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += 0.1 * parameter.data.std() * noise
    return source, target


@pytest.fixture(scope="module")
def text():
    ids = torch.randint(3, 64, (60, 24), generator=torch.Generator().manual_seed(0))
    return [
        TokenBatch(rows, torch.ones_like(rows), tuple(range(start, start + len(rows))))
        for start, rows in zip(range(0, 60, 6), ids.split(6), strict=True)
    ]


@pytest.fixture(scope="module")
def plain(models, text):
    statistics = calibrate(*models, text, heads="matched", held_out_every=5)
    return fit(statistics, select_layers(statistics, 1), heads="matched")


def test_every_step_and_share_is_tried_by_an_evaluation(models, text, plain):
    tracked = {}

    @contextmanager
    def track(description):
        at = tracked.setdefault(description, [])
        yield lambda *given: at.append(given)

    found = align(plain, *models, text, held_out_every=5, track=track)
    start, *others = found.tried
    assert start.mapper is plain
    assert (start.key_steps, start.value_share) == (0, 0)
    stepped, shared = others[:STEPS], others[STEPS:]
    keys = align_keys(plain, *models, text, held_out_every=5)
    for count, (candidate, expected) in enumerate(zip(stepped, keys, strict=True), start=1):
        assert (candidate.key_steps, candidate.value_share) == (count, 0)
        how = candidate.mapper.config.ridge["alignment"]
        assert (how["key_steps"], how["value_share"]) == (count, 0)
        for name, tensor in expected.tensors().items():
            assert torch.equal(candidate.mapper.tensors()[name], tensor)
    chosen = min(stepped, key=lambda one: sum(one.kl))
    values = align_values(chosen.mapper, *models, text, held_out_every=5)
    for candidate, share in zip(shared, VALUE_SHARES, strict=True):
        assert (candidate.key_steps, candidate.value_share) == (chosen.key_steps, share)
        how = candidate.mapper.config.ridge["alignment"]
        assert (how["key_steps"], how["value_share"]) == (chosen.key_steps, share)
        for name, tensor in candidate.mapper.tensors().items():
            before, after = chosen.mapper.tensors()[name], values.tensors()[name]
            torch.testing.assert_close(tensor, before + share * (after - before))
        errors = candidate.mapper.config.quality["alignment"]
        # Those of values that went only part of the way are not known.
        assert set(errors) == ({"keys", "values"} if share == 1 else {"keys"})
    held_out = held_out_batches(text, 5)
    for candidate in found.tried:
        for exact_prefix, kl in zip((0, EXACT_PREFIX), candidate.kl, strict=True):
            report = evaluate(candidate.mapper, *models, held_out, exact_prefix=exact_prefix)
            assert kl == pytest.approx(report.settings["mapped"].kl.value, rel=1e-5)
    assert found == choose(start, others)
    assert [len(batch.sequence_ids) for batch in held_out] == [1, 1, 1, 1, 2] * 2
    totals = {"keys": (2 + STEPS) * 10, "values": 10}
    compared = {"keys": (1 + STEPS) * 10, "values": len(VALUE_SHARES) * 10}
    for kind in ("keys", "values"):
        for name, total in (
            (f"Align {kind}", totals[kind]),
            (f"Compare {kind} on held-out text", compared[kind]),
        ):
            assert tracked[name] == [(done, total) for done in range(1, total + 1)]


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        ([(3, 2), (2, 1.5), (2, 1), (4, 0.1)], 2),  # the last ruins what is mapped
        ([(3, 2), (2, 2.1), (2, 2.2), (1, 2.3)], 0),  # none is better in both
        ([(3, 2), (3, 1.9), (3.1, 0), (3, 1.8)], 3),
        ([(3, 2), (3, 2)], 0),
    ],
)
def test_what_is_worse_in_either_setting_is_not_taken(plain, kl, expected):
    start, *others = (Candidate(plain, index, 0.0, pair) for index, pair in enumerate(kl))
    found = choose(start, others)
    assert found.best.key_steps == expected
    assert [one.kl for one in found.tried] == kl


def test_an_alignment_goes_on_after_its_keys(models, text, plain, tmp_path):
    path = tmp_path / "mine.alignment"
    whole = align(plain, *models, text, held_out_every=5)
    passes = []

    @contextmanager
    def track(description):
        yield lambda *_at: passes.append(description)

    @contextmanager
    def stop(description):
        if description == "Align values":
            raise KeyboardInterrupt
        yield lambda *_at: None

    with pytest.raises(KeyboardInterrupt):
        align(plain, *models, text, held_out_every=5, checkpoint=path, track=stop)
    resumed = align(plain, *models, text, held_out_every=5, checkpoint=path, track=track)
    assert "Align keys" not in passes
    assert "Align values" in passes
    for first, second in zip(whole.tried, resumed.tried, strict=True):
        assert first.kl == second.kl
        for name, tensor in first.mapper.tensors().items():
            assert torch.equal(second.mapper.tensors()[name], tensor)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "mine.alignment.keys",
        "mine.alignment.values",
    ]


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_held_out_batches_are_every_tenth_sequence(rows):
    batches = [
        TokenBatch(
            torch.arange(start, start + rows)[:, None].expand(rows, 5),
            torch.ones(rows, 5, dtype=torch.long),
            tuple(range(start, start + rows)),
        )
        for start in range(0, 24, rows)
    ]
    found = held_out_batches(batches)
    assert [number for batch in found for number in batch.sequence_ids] == [9, 19]
    assert [number for batch in found for number in batch.input_ids[:, 0].tolist()] == [9, 19]
