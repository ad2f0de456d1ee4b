import json
import math
from dataclasses import replace

import pytest

from kvhub.errors import NotFoundError, VerificationError
from kvhub.report import (
    SETTINGS,
    Estimate,
    ExactPoint,
    Fidelity,
    PositionBin,
    Report,
    SettingMetrics,
)


def estimate(value):
    return Estimate(value, value - 0.05, value + 0.05)


@pytest.fixture
def report():
    return Report(
        settings={
            name: SettingMetrics(*(estimate(0.1 * i + 0.01 * index) for i in range(5)))
            for index, name in enumerate(SETTINGS)
        },
        retention=estimate(0.9),
        floor_normalized_retention=None,
        gap_recovered=estimate(1 / 3),
        key_r2=0.8,
        value_r2=0.7,
        attention_output_cosine=estimate(0.97),
        layers=Fidelity(
            key_r2=(0.9, 0.7),
            value_r2=(0.8, 0.6),
            key_r2_by_head=((0.9, 0.9), (0.8, 0.6)),
            value_r2_by_head=((0.8, 0.8), (0.7, 0.5)),
            attention_output_cosine=(0.99, 0.95),
            attention_output_cosine_by_head=((0.99,) * 4, (0.95,) * 4),
            key_error_placement=(0.8, None),
            value_error_placement=(1.2, 1.1),
            positions=(PositionBin(0, 1, 0.1, 0.2), PositionBin(1, 2, 0.3, 0.4)),
        ),
        notes=("3 sequences were too short and are left out.",),
        provenance={"mapper": "small-to-large", "data": {"source": "text", "files": ["a", "b"]}},
    )


def test_dict_and_file_give_an_equal_report(report, tmp_path):
    assert Report.from_dict(report.to_dict()) == report
    report.save(tmp_path / "new" / "report.json")
    assert Report.load(tmp_path / "new" / "report.json") == report
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.json"]


def test_the_dict_is_plain_json(report):
    data = report.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["settings"]["mapped"]["kl"] == pytest.approx(
        {"value": 0.32, "low": 0.27, "high": 0.37}
    )
    assert data["floor_normalized_retention"] is None


def test_the_exact_curve_survives_and_reports_without_one_still_load(report):
    points = tuple(
        ExactPoint(budget, budget / 192, *(estimate(0.1 / (1 + budget)) for _ in range(3)), gap)
        for budget, gap in ((0, None), (4, estimate(0.5)), (64, estimate(0.9)))
    )
    longer = replace(report, exact=points)
    assert Report.from_dict(json.loads(json.dumps(longer.to_dict()))) == longer
    before = longer.to_dict()
    for point in before["exact"]:
        del point["gap_recovered"]
    assert [point.gap_recovered for point in Report.from_dict(before).exact] == [None] * 3
    older = longer.to_dict()
    del older["exact"]
    assert Report.from_dict(older) == report
    damaged = longer.to_dict()
    del damaged["exact"][1]["kl"]
    with pytest.raises(VerificationError, match=r"missing keys \['kl'\]"):
        Report.from_dict(damaged)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_never_gets_into_a_report(report, bad):
    with pytest.raises(VerificationError, match=r"report\.key_r2 should be a finite number"):
        replace(report, key_r2=bad)
    layers = replace(report.layers, value_r2_by_head=((0.8, 0.8), (0.7, bad)))
    with pytest.raises(VerificationError, match=r"layers\.value_r2_by_head\[1\]\[1\]"):
        replace(report, layers=layers)
    with pytest.raises(VerificationError, match=r"provenance\.seconds"):
        replace(report, provenance={"seconds": bad})


def change(data, path, value):
    *parents, last = path
    for key in parents:
        data = data[key]
    if value is None:
        del data[last]
    else:
        data[last] = value


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        (["schema_version"], 2, "schema version 2"),
        (["schema_version"], None, "schema version None"),
        (["extra"], 1, "unknown keys .'extra'"),
        (["retention", "extra"], 1, "unknown keys .'extra'"),
        (["layers", "key_r2"], None, "missing keys .'key_r2'"),
        (["layers", "positions"], [{"start": 0}], "missing keys"),
        (["settings", "mapped", "nll"], None, "missing keys .'nll'"),
        (["settings", "mapped"], None, "found"),
        (["settings", "other"], {}, "found"),
    ],
)
def test_what_is_not_a_report_of_this_version_is_refused(report, path, value, found):
    data = report.to_dict()
    change(data, path, value)
    with pytest.raises(VerificationError, match=found):
        Report.from_dict(data)


def test_missing_and_damaged_files_are_told_apart(report, tmp_path):
    path = tmp_path / "report.json"
    with pytest.raises(NotFoundError, match="no report"):
        Report.load(path)
    report.save(path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(VerificationError, match="not JSON"):
        Report.load(path)
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(VerificationError, match="holds a list"):
        Report.load(path)


def test_a_report_that_cannot_be_written_leaves_the_old_one(report, tmp_path):
    path = tmp_path / "report.json"
    report.save(path)
    with pytest.raises(TypeError):
        replace(report, provenance={"data": object()}).save(path)
    assert Report.load(path) == report
    assert [found.name for found in tmp_path.iterdir()] == ["report.json"]
