"""What `kvhub fit` does around the closed forms: which fit it keeps, and which text it trusts."""

from contextlib import contextmanager
from pathlib import Path

import torch

from kvhub import KVMapper, alignment
from kvhub.fitting import FitPlan, fit_mapper

FAMILY = Path(__file__).parents[1] / "examples" / "tiny_family"


@contextmanager
def track(_name):
    yield lambda *_at: None


def fitted(**options):
    said = []
    plan = FitPlan(
        name="mine",
        source=str(FAMILY / "small"),
        target=str(FAMILY / "middle"),
        top_k=1,
        heads="matched",
        data="stdlib",
        sequences=30,
        length=64,
        **options,
    )
    return fit_mapper(plan, track, said.append), " ".join(said)


def same(first, second):
    pairs = zip(first.tensors().values(), second.tensors().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_fit_is_aligned_and_says_what_that_gave():
    aligned, said = fitted()
    plain, _ = fitted(align=False, overwrite=True)
    assert "KL" in said
    assert "alignment" in aligned.config.ridge
    assert "alignment" not in plain.config.ridge
    assert not same(aligned, plain)
    # R2 is of the weights that are saved, so the plain fit, which minimises it, has the larger one.
    r2 = [mapper.config.quality["held_out_r2"]["values"] for mapper in (plain, aligned)]
    assert r2[1] < r2[0]


def test_an_alignment_that_is_farther_on_held_out_text_is_left_out(monkeypatch):
    original = alignment.align_keys

    def damaged(*arguments, **options):
        return [
            KVMapper(mapper.config, {name: 2 * part for name, part in mapper.tensors().items()})
            for mapper in original(*arguments, **options)
        ]

    monkeypatch.setattr(alignment, "align_keys", damaged)
    mapper, said = fitted()
    plain, _ = fitted(align=False, overwrite=True)
    assert "Left out" in said
    assert same(mapper, plain)
    assert "alignment" not in mapper.config.ridge


def test_given_statistics_are_aligned_only_on_request(tmp_path, monkeypatch):
    path = tmp_path / "statistics"
    fitted(statistics=path, align=False)
    loads = []
    monkeypatch.setattr("kvhub.fitting.load_pair", lambda *given: loads.append(given))
    mapper, said = fitted(statistics=path, overwrite=True)
    assert "no model is loaded" in said
    assert loads == []
    assert "alignment" not in mapper.config.ridge
    monkeypatch.undo()
