"""How far a mapper is aligned: the rule, and that the steps are on the way."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from mapping import random_mapper
from tiny import tiny_model

from kvhub import KVMapper, ModelSpec, evaluate
from kvhub.alignment_choice import VALUE_SHARES, choose_alignment
from kvhub.data import TokenBatch
from kvhub.exact import EXACT_PREFIX


@pytest.fixture(scope="module")
def models():
    return tiny_model("qwen3", 2, seed=1), tiny_model("qwen3", 3, seed=2)


@pytest.fixture(scope="module")
def mappers(models):
    plain = random_mapper(*map(ModelSpec.from_model, models))
    ridge = {**plain.config.ridge, "alignment": {"exact_prefix": 4}}
    tensors = {name: 3 * tensor for name, tensor in plain.tensors().items()}
    errors = {"keys": [[2.0, 1.0]] * 3, "values": [[4.0, 3.0]] * 3}
    quality = {**plain.config.quality, "alignment": errors}
    return plain, KVMapper(replace(plain.config, ridge=ridge, quality=quality), tensors)


def text():
    ids = torch.randint(3, 64, (3, 40), generator=torch.Generator().manual_seed(0))
    return [
        TokenBatch(ids[rows], torch.ones_like(ids[rows]), tuple(rows)) for rows in ([0, 1], [2])
    ]


def test_candidates_lie_on_the_way_and_have_the_kl_of_an_evaluation(mappers, models):
    plain, aligned = mappers
    progress = []
    best, tried = choose_alignment(plain, aligned, *models, text(), lambda *at: progress.append(at))
    assert [one.value_share for one in tried] == [None, *VALUE_SHARES]
    assert tried[0].mapper is plain
    for candidate in tried[1:]:
        tensors = candidate.mapper.tensors()
        for part in ("weight", "bias"):
            torch.testing.assert_close(tensors[f"key_{part}"], 3 * plain.tensors()[f"key_{part}"])
            expected = (1 + 2 * candidate.value_share) * plain.tensors()[f"value_{part}"]
            torch.testing.assert_close(tensors[f"value_{part}"], expected)
        assert candidate.mapper.config.ridge["alignment"]["value_share"] == candidate.value_share
        errors = candidate.mapper.config.quality["alignment"]
        # Those of values that went only part of the way are not known.
        assert set(errors) == ({"keys", "values"} if candidate.value_share == 1 else {"keys"})
    for candidate in tried:
        for exact_prefix, kl in zip((0, EXACT_PREFIX), candidate.kl, strict=True):
            report = evaluate(candidate.mapper, *models, text(), exact_prefix=exact_prefix)
            assert kl == pytest.approx(report.settings["mapped"].kl.value, rel=1e-5)
    assert best in tried
    assert progress[-1] == (8, 8)
    assert progress == sorted(progress)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        ({None: (3, 2), 0.0: (2, 1.5), 0.5: (2, 1), 1.0: (4, 0.1)}, 0.5),  # 1 ruins what is mapped
        ({None: (3, 2), 0.0: (2, 2.1), 0.5: (2, 2.2), 1.0: (1, 2.3)}, None),  # none is better
        ({None: (3, 2), 0.0: (3, 1.9), 0.5: (3.1, 0), 1.0: (3, 1.8)}, 1.0),
    ],
)
def test_what_is_worse_in_either_setting_is_not_taken(mappers, models, monkeypatch, kl, expected):
    def fake(mapper, *_given, **_options):
        share = mapper.config.ridge.get("alignment", {}).get("value_share")
        none, sink = (SimpleNamespace(kl=SimpleNamespace(value=value)) for value in kl[share])
        return SimpleNamespace(exact=[none], settings={"mapped": sink}, provenance={"sequences": 2})

    monkeypatch.setattr("kvhub.alignment_choice.evaluate", fake)
    best, tried = choose_alignment(*mappers, *models, text())
    assert best.value_share == expected
    assert [one.kl for one in tried] == [pytest.approx(pair) for pair in kl.values()]
