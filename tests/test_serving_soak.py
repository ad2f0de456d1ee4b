"""A part of `benchmarks/serving_soak.py`: faults make no wrong token, and a wrong one is found."""

import logging
from pathlib import Path

import pytest
import torch
from kvhub.exporters import loader

ROOT = Path(__file__).parents[1]
CONVERSATIONS = 6


@pytest.fixture
def soak(monkeypatch, caplog):
    # Captured records hold errors, and these what was open where they were raised.
    caplog.set_level(logging.CRITICAL, "kvhub")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import serving_soak

    return serving_soak


def test_no_fault_makes_a_wrong_token(soak, tmp_path):
    found = soak.run(tmp_path, "files", CONVERSATIONS, seconds=8.0)
    # Memory is settled after minutes only.
    missed = [row for row in soak.results(found) if not row.passed and row.name != "memory"]
    assert missed == [], (found.dead, found.examples)
    # Faults struck, and requests were served through them in each of the ways that there are.
    assert found.faults
    for states in found.states.values():
        assert states["applied"] > 0
        assert any(state.startswith("fallback_reprefill") for state in states)


def test_a_wrong_token_is_found(soak, tmp_path, monkeypatch):
    right = loader.map_paged

    def wrong(plan, source, target, **options):
        right(plan, source, target, **options)
        # In one layer, of keys and values alike; noise that float32 does not make.
        states = target.pool[target.block_table[0].long(), 1]
        target.pool[target.block_table[0].long(), 1] = states + torch.randn_like(states)

    monkeypatch.setattr(loader, "map_paged", wrong)
    found = soak.run(tmp_path, "files", CONVERSATIONS, seconds=2.5)
    missed = {row.name for row in soak.results(found) if not row.passed}
    assert {"wrong token", "wrong states"} <= missed
    assert any("wrong" in example or "token" in example for example in found.examples)
    # Only answers that stand on what was mapped.
    assert found.total("wrong states") < found.total("requests")
