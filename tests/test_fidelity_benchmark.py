"""`benchmarks/fidelity.py`: the documents have what it measured, and it goes on by method."""

import json
from pathlib import Path

import pytest
import torch
from tiny import tiny_model

from kvhub.data import TokenBatch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture
def fidelity(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import fidelity

    return fidelity


def test_the_documents_have_the_figures_that_were_measured(fidelity):
    found = json.loads((DOCS / "fidelity.json").read_text(encoding="utf-8"))
    assert list(found) == [*fidelity.PAIRS, *fidelity.REAL_PAIRS]
    assert all({row["method"] for row in rows} > fidelity.METHODS for rows in found.values())
    assert fidelity.summary(found) in (DOCS / "fidelity.md").read_text(encoding="utf-8")
    assert fidelity.table(found) in (DOCS / "fidelity-table.md").read_text(encoding="utf-8")


def test_methods_that_are_known_are_not_made_again(fidelity, monkeypatch):
    models = [tiny_model("qwen3", layers, seed=layers) for layers in (2, 3)]
    ids = torch.randint(3, 64, (12, 16), generator=torch.Generator().manual_seed(0))
    batches = [
        TokenBatch(rows, torch.ones_like(rows), tuple(range(start, start + 4)))
        for start, rows in zip((0, 4, 8), ids.split(4), strict=True)
    ]
    monkeypatch.setattr(fidelity, "TOP_K", 2)
    made = dict(fidelity.mappers(*models, batches, set()))
    assert list(made) == [
        "published",
        "matched, not aligned",
        "matched",
        "all, fewer, not aligned",
        "all, fewer",
        "all, not aligned",
        "all",
    ]
    sizes = {name: mapper.num_parameters for name, mapper in made.items()}
    assert sizes["published"] == sizes["all"]
    assert sizes["all, fewer"] <= sizes["matched"] < sizes["all"]
    later = dict(fidelity.mappers(*models, batches, set(made) - {"all"}))
    assert list(later) == ["all"]
    for name, tensor in later["all"].tensors().items():
        assert torch.equal(tensor, made["all"].tensors()[name])
