import struct
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from regression import spec

from kvhub import MapperConfig
from kvhub.errors import UsageError
from kvhub.plots import draw_plots, save_plots
from kvhub.report import (
    SETTINGS,
    Estimate,
    ExactPoint,
    Fidelity,
    PositionBin,
    Report,
    SettingMetrics,
)

NAMES = [
    "error_by_position.png",
    "error_placement.png",
    "fidelity_per_layer.png",
    "layer_selection.png",
    "settings.png",
]


def config_of(source_layers, target_layers, top_k, name="model"):
    return MapperConfig(
        source=spec(source_layers, name=f"org/small-{name}"),
        target=spec(target_layers, name=f"/some/folder/large-{name}"),
        heads="all",
        top_k=top_k,
        selection=tuple(tuple(range(top_k)) for _ in range(target_layers)),
        selection_method="probe",
        ridge={},
        weighting="uniform",
    )


def report_of(layers, bins=5, worst=0.2):
    def estimate(value):
        return Estimate(value, value - 0.05, value + 0.05)

    curve = (*(max(worst, 0.9 - 0.02 * layer) for layer in range(layers - 1)), worst)
    heads = tuple((value, value) for value in curve)
    starts = [0, *(2**index for index in range(bins))]
    return Report(
        settings={
            name: SettingMetrics(*(estimate(0.2 + 0.1 * index) for _ in range(5)))
            for index, name in enumerate(SETTINGS)
        },
        retention=estimate(0.9),
        floor_normalized_retention=None,
        gap_recovered=None,
        key_r2=0.8,
        value_r2=0.7,
        attention_output_cosine=estimate(0.97),
        layers=Fidelity(
            *(curve, curve, heads, heads, tuple(0.9 for _ in curve), heads, curve, curve),
            positions=tuple(PositionBin(start, stop, 0.1, 0.2) for start, stop in pairwise(starts)),
            key_error_placement_by_head=heads,
            value_error_placement_by_head=tuple((None, value) for value in curve),
        ),
        notes=(),
        provenance={},
    )


def size(png):
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


@pytest.fixture(scope="module")
def plots():
    return draw_plots(report_of(2), config_of(3, 2, 2))


# Warnings are errors here, so this also finds labels that do not fit and axes that collapse.
@pytest.mark.parametrize(
    ("source_layers", "target_layers", "top_k", "worst", "scored"),
    [(1, 1, 1, 1.0, False), (40, 64, 8, -9.0, True), (80, 32, 20, -1e5, False)],
)
def test_every_figure_is_drawn_for_small_and_large_pairs(
    source_layers, target_layers, top_k, worst, scored
):
    config = config_of(source_layers, target_layers, top_k, "with-a-rather-long-published-name")
    scores = [[0.5 - 0.1 * i for i in range(source_layers)] for _ in range(target_layers)]
    report = report_of(target_layers, bins=15, worst=worst)
    plots = draw_plots(report, config, scores=scores if scored else None)
    assert sorted(plots) == NAMES
    for png in plots.values():
        width, height = size(png)
        assert 550 <= width <= 1250
        assert 300 <= height <= 1250


def test_the_exact_curve_is_drawn_where_there_is_one(plots):
    def curve(*budgets):
        figures = [Estimate(0.3, 0.2, 0.4)] * 3
        return tuple(ExactPoint(budget, budget / 3072, *figures) for budget in budgets)

    report, config = report_of(2), config_of(3, 2, 2)
    found = draw_plots(replace(report, exact=curve(0, 1, 4, 16, 64)), config)
    assert sorted(found) == sorted([*NAMES, "exact.png"])
    assert {name: found[name] for name in NAMES} == plots
    other = draw_plots(replace(report, exact=curve(7)), config)
    assert other["exact.png"] != found["exact.png"]
    width, height = size(found["exact.png"])
    assert 550 <= width <= 1250
    assert 300 <= height <= 1250


def test_files_are_written_and_replaced(tmp_path):
    report, config = report_of(2), config_of(3, 2, 2)
    folder = tmp_path / "new" / "plots"
    paths = save_plots(report, config, folder)
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    assert sorted(path.name for path in paths) == NAMES
    paths[0].write_bytes(b"old")
    save_plots(report, config, folder)
    size(paths[0].read_bytes())


def test_figures_show_what_changes_and_nothing_else(plots):
    config = config_of(3, 2, 2)

    def changed(report, config):
        other = draw_plots(report, config)
        return [name for name in NAMES if other[name] != plots[name]]

    settings = {**report_of(2).settings}
    settings["mapped"] = settings["no_context"]
    report = replace(report_of(2, bins=4), settings=settings)
    assert changed(report, config) == ["error_by_position.png", "settings.png"]
    config = replace(config, selection=((0, 2), (0, 1)))
    assert changed(report_of(2, worst=0.3), config) == [
        "error_placement.png",
        "fidelity_per_layer.png",
        "layer_selection.png",
    ]


def test_the_callers_matplotlib_is_left_alone_and_has_no_say(plots):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    mpl.rcParams["font.size"] = 31
    try:
        assert draw_plots(report_of(2), config_of(3, 2, 2)) == plots
        assert mpl.rcParams["font.size"] == 31
    finally:
        mpl.rcParams.update(before)
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError) as error:
        save_plots(report_of(2), config_of(3, 2, 2), tmp_path / "plots")
    assert "matplotlib" in error.value.message
    assert 'pip install "kvhub[plots]"' in error.value.hint
    assert list(tmp_path.iterdir()) == []
