"""The gate: which figure it looks at, on which side of it, and that verdict and file agree."""

from dataclasses import replace

import pytest
from test_report import report  # noqa: F401 - a fixture

from kvhub.errors import VerificationError
from kvhub.gate import REASONS, Gate, GateResult, check_gate
from kvhub.report import Estimate, Report

TIGHT = Estimate(0.5, 0.5, 0.5)


def with_kl(report, mapped, source):  # noqa: F811
    settings = {**report.settings}
    settings["mapped"] = replace(settings["mapped"], kl=mapped)
    settings["source_alone"] = replace(settings["source_alone"], kl=source)
    return replace(report, settings=settings)


@pytest.fixture
def good(report):  # noqa: F811
    """Twice as near to the target as the source is, and sure of it."""
    return with_kl(report, Estimate(0.2, 0.19, 0.21), Estimate(0.4, 0.38, 0.42))


def verdicts(report, gate=None):  # noqa: F811
    return {c.name: c.passed for c in check_gate(report, gate).criteria}


def test_a_good_mapper_passes_with_a_reason_for_every_threshold(good):
    result = check_gate(good)
    assert result.passed
    assert result.failures == ()
    assert {c.name: c.reason for c in result.criteria} == REASONS
    ratio = result.criteria[0]
    assert (ratio.value, ratio.bound) == (pytest.approx(0.5), pytest.approx(0.21 / 0.38))


def test_a_mapped_target_that_is_no_nearer_than_the_source_fails(good):
    """By its interval too: half as far on average, but not surely nearer."""
    assert not verdicts(with_kl(good, TIGHT, Estimate(0.4, 0.4, 0.4)))["kl_over_source"]
    unsure = with_kl(good, Estimate(0.2, 0.1, 0.5), Estimate(0.4, 0.38, 0.42))
    assert verdicts(unsure) == {**verdicts(good), "kl_over_source": False}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"gap_recovered": Estimate(0.2, -0.01, 0.4)}, "gap_recovered"),
        ({"attention_output_cosine": Estimate(0.9, 0.1, 0.95)}, "attention_output_cosine"),
        ({"key_r2": -1.01}, "key_r2"),
    ],
)
def test_each_figure_fails_alone_at_its_lower_bound(good, change, name):
    result = check_gate(replace(good, **change))
    assert [c.name for c in result.failures] == [name]
    assert not result.passed


def test_without_a_gap_the_other_criteria_decide(good):
    """From a large model to a smaller one there is no gap to recover."""
    without = replace(good, gap_recovered=None)
    assert set(verdicts(without)) == set(REASONS) - {"gap_recovered"}
    assert check_gate(without).passed


def test_thresholds_are_the_callers_if_given(good):
    strict = Gate(max_kl_over_source=0.5, min_gap_recovered=0.9, min_key_r2=0.81)
    assert verdicts(good, strict) == {
        "kl_over_source": False,
        "gap_recovered": False,
        "attention_output_cosine": True,
        "key_r2": False,
    }


def test_equal_models_leave_a_finite_ratio(good):
    nothing = Estimate(0.0, 0.0, 0.0)
    assert check_gate(with_kl(good, nothing, nothing)).criteria[0].bound == 0
    worse = check_gate(with_kl(good, TIGHT, nothing))
    assert not worse.passed
    Report.from_dict(replace(good, gate=worse).to_dict())


def test_a_report_keeps_the_verdict_and_an_older_one_has_none(good, tmp_path):
    judged = replace(good, gate=check_gate(replace(good, key_r2=-3.0)))
    judged.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == judged
    assert judged.to_dict()["gate"]["passed"] is False
    older = good.to_dict()
    del older["gate"]
    for name in ("key_error_placement_by_head", "value_error_placement_by_head"):
        del older["layers"][name]
    found = Report.from_dict(older)
    assert found.gate is None
    assert found.layers.key_error_placement_by_head == ()


@pytest.mark.parametrize(
    "change",
    [
        {"passed": False},
        {"criteria": []},
        {"criteria": [{"name": "key_r2"}]},
        {"more": 1},
    ],
)
def test_a_verdict_that_its_criteria_do_not_give_is_refused(good, change):
    data = {**check_gate(good).to_dict(), **change}
    with pytest.raises(VerificationError, match="gate"):
        GateResult.from_dict(data)
    with pytest.raises(VerificationError, match="gate"):
        Report.from_dict({**good.to_dict(), "gate": data})
