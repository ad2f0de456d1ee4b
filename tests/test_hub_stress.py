"""A part of `benchmarks/hub_stress.py`: each kind of fault in one push and one pull."""

from pathlib import Path

import pytest
from hub_server import CLIENT_WARNING
from huggingface_hub import close_session

ROOT = Path(__file__).parents[1]
ROUNDS = 16


@pytest.mark.filterwarnings(CLIENT_WARNING)
def test_no_fault_harms_a_version(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setenv("HF_TOKEN", "hf_stress")
    import hub_stress

    stress = hub_stress.run(ROUNDS, 0, tmp_path, monkeypatch)
    close_session()
    outcomes = stress.outcomes
    assert sum(count for (*_, end), count in outcomes.items() if end != "faults") == ROUNDS
    assert {kind for _, kind, _ in outcomes} == {*hub_stress.KINDS, "mixed"}
    # Faults struck and ended some rounds, and others came through.
    assert sum(count for (*_, end), count in outcomes.items() if end == "faults") > ROUNDS
    assert 0 < sum(count for (*_, end), count in outcomes.items() if end == "done") < ROUNDS
    assert len(stress.versions) > 2
    assert stress.loaded > 2
