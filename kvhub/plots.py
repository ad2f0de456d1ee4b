"""The report's figures as PNG files; needs the extra `plots`.

Colours are Okabe and Ito's, which colour-blind readers can tell apart, and differ in lightness;
lines differ in marker as well.
"""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvhub.errors import UsageError
from kvhub.report import Estimate, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvhub.mapper_config import MapperConfig

__all__ = ["draw_plots", "save_plots"]

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
GREY, LIGHT, DARK = "#999999", "#E6E6E6", "#333333"
DPI = 150
LOWEST_R2 = -1.0  # what lies below is marked at the edge, or it would flatten all the rest
LABELS = {
    "target_alone": "target alone",
    "mapped": "mapped",
    "source_alone": "source alone",
    "no_context": "no context",
}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": DARK,
    "axes.grid.axis": "y",
    "grid.color": LIGHT,
    "figure.constrained_layout.use": True,
}


def save_plots(
    report: Report,
    config: "MapperConfig",
    directory: str | Path,
    *,
    scores: Sequence[Sequence[float]] | None = None,
) -> list[Path]:
    """Draw all figures into a directory, which is made if it is missing.

    Parameters
    ----------
    report, config, scores
        As for `draw_plots`.
    directory
        Where to; files of the same names are replaced.

    Returns
    -------
    paths
        Of the PNG files.

    Raises
    ------
    UsageError
        matplotlib is not installed.
    """
    directory = Path(directory)
    plots = draw_plots(report, config, scores=scores)
    directory.mkdir(parents=True, exist_ok=True)
    for name, png in plots.items():
        (directory / name).write_bytes(png)
    return [directory / name for name in plots]


def draw_plots(
    report: Report, config: "MapperConfig", *, scores: Sequence[Sequence[float]] | None = None
) -> dict[str, bytes]:
    """Draw all figures.

    Parameters
    ----------
    report
        From `kvhub.evaluation.evaluate`.
    config
        Of the mapper.
    scores
        `[target_layers][source_layers]`: the R2 that layers were selected by, from
        `Selection.scores`; without them the figure shows the chosen layers alone.

    Returns
    -------
    plots
        PNG content by file name.

    Raises
    ------
    UsageError
        matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UsageError(
            "Plots need matplotlib, which is not installed.", 'Run pip install "kvhub[plots]".'
        ) from error
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        figures = {
            "settings.png": _settings(report),
            "fidelity_per_layer.png": _fidelity(report),
            "error_by_position.png": _positions(report),
            "error_placement.png": _placement(report),
            "layer_selection.png": _selection(config, scores),
        }
        if report.exact:
            figures["exact.png"] = _exact(report)
        return {name: _png(figure, config) for name, figure in figures.items()}


def _png(figure: "Figure", config: "MapperConfig") -> bytes:
    names = [Path(spec.model_id).name for spec in (config.source, config.target)]
    if all(names):
        one_line = len(names[0]) + len(names[1]) < 9 * figure.get_figwidth()
        text = f"{names[0]} → {names[1]}" if one_line else f"{names[0]}\n→ {names[1]}"
        figure.suptitle(text, x=0.01, ha="left", fontsize=10.5, weight="bold")
    buffer = io.BytesIO()
    # Without the software's version, equal reports give equal files.
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _figure(width: float, height: float) -> "Figure":
    # Not from pyplot, which would keep every figure and touch the caller's backend.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def _settings(report: Report) -> "Figure":
    """One panel per metric, one bar per setting, with intervals."""
    panels = {
        "nll": "NLL (nats per token; lower is better)",
        "kl": "KL from target alone (nats; lower is better)",
        "accuracy": "top-1 accuracy",
        "agreement": "top-1 agreement with target alone",
    }
    colors = {"target_alone": DARK, "mapped": BLUE, "source_alone": GREY, "no_context": LIGHT}
    figure = _figure(8.0, 4.0)
    axes = figure.subplots(2, 2)
    for axis, (metric, title) in zip(axes.flat, panels.items(), strict=True):
        estimates: list[Estimate] = [
            getattr(report.settings[setting], metric) for setting in LABELS
        ]
        values = [estimate.value for estimate in estimates]
        below = [max(0.0, estimate.value - estimate.low) for estimate in estimates]
        above = [max(0.0, estimate.high - estimate.value) for estimate in estimates]
        places = range(len(LABELS))
        axis.barh(places, values, color=[colors[name] for name in LABELS], height=0.7)
        axis.errorbar(values, places, xerr=[below, above], fmt="none", ecolor=ORANGE, capsize=2.5)
        for place, estimate in zip(places, estimates, strict=True):
            axis.annotate(
                f"{estimate.value:.3g}",
                (max(estimate.high, estimate.value), place),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                in_layout=False,
            )
        axis.set_yticks(places, list(LABELS.values()))
        axis.invert_yaxis()
        axis.set_title(title)
        # Room for the numbers behind the longest bar, where the axis needs no ticks.
        longest = max(1e-9, *(estimate.high for estimate in estimates))
        axis.set_xlim(0, 1.2 * longest)
        axis.set_xticks([tick for tick in axis.get_xticks() if tick <= longest])
        axis.tick_params(axis="y", length=0)
    figure.supxlabel("orange: 95 % bootstrap interval over sequences", fontsize=8, color=DARK)
    return figure


def _fidelity(report: Report) -> "Figure":
    """R2 of keys and values above, attention-output cosine below, over target layers and heads."""
    layers = report.layers
    figure = _figure(6.4, 4.6)
    above, below = figure.subplots(2, 1, sharex=True)
    curves = {"keys": layers.key_r2, "values": layers.value_r2}
    _curves(above, range(len(layers.key_r2)), curves, lowest=LOWEST_R2)
    bottom = max(LOWEST_R2, min(*layers.key_r2, *layers.value_r2))
    _heads(above, layers.key_r2_by_head, BLUE, bottom)
    _heads(above, layers.value_r2_by_head, ORANGE, bottom)
    worst = min(*layers.key_r2, *layers.value_r2)
    clipped = f"; ▼ below {LOWEST_R2:g}, down to {worst:.3g}" if worst < LOWEST_R2 else ""
    above.set_title(f"R² of the mapped cache (1 is exact{clipped})")
    above.legend(loc="best", frameon=False, ncols=2)
    cosine = {"cosine": layers.attention_output_cosine}
    _curves(below, range(len(layers.key_r2)), cosine, colors=(GREEN,))
    lowest = min(layers.attention_output_cosine)
    _heads(below, layers.attention_output_cosine_by_head, GREEN, lowest)
    below.set_title("attention-output cosine (1 is exact; dots: heads, lowest at the edge)")
    below.set_xlabel("target layer")
    _integer_ticks(below.xaxis)
    return figure


def _curves(
    axis: "Axes",
    places: Sequence[int],
    curves: dict[str, tuple[float, ...]],
    *,
    lowest: float | None = None,
    colors: tuple[str, ...] = (BLUE, ORANGE),
) -> None:
    """Lines up to 1; points below `lowest` are drawn at the edge as triangles."""
    values = [value for curve in curves.values() for value in curve]
    bottom = min(values) if lowest is None else max(lowest, min(values))
    for (name, curve), color, marker in zip(curves.items(), colors, "os", strict=False):
        clipped = [max(bottom, value) for value in curve]
        axis.plot(places, clipped, color=color, marker=marker, markersize=3.5, label=name)
        low = [place for place, value in zip(places, curve, strict=True) if value < bottom]
        if low:
            axis.plot(low, [bottom] * len(low), "v", color=color, markersize=8, clip_on=False)
    span = max(1e-3, 1 - bottom)
    axis.set_ylim(bottom - 0.08 * span, max(1.0, *values) + 0.05 * span)
    axis.grid(visible=True)


def _heads(axis: "Axes", rows: Sequence[Sequence[float | None]], color: str, bottom: float) -> None:
    """A pale dot for each head of a layer; those below `bottom` lie on it."""
    dots = [
        (layer, max(bottom, value))
        for layer, row in enumerate(rows)
        for value in row
        if value is not None
    ]
    if dots:
        places, values = zip(*dots, strict=True)
        axis.plot(places, values, ".", color=color, alpha=0.35, markersize=4, zorder=1)


def _placement(report: Report) -> "Figure":
    """Whether errors lie where attention reads, over target layers and heads."""
    layers = report.layers
    figure = _figure(6.4, 4.6)
    axes = figure.subplots(2, 1, sharex=True)
    keys = layers.key_error_placement, layers.key_error_placement_by_head
    values = layers.value_error_placement, layers.value_error_placement_by_head
    panels = (
        ("keys, along the directions of the queries", BLUE, *keys),
        ("values, at the tokens that are attended to", ORANGE, *values),
    )
    for axis, (title, color, means, heads) in zip(axes, panels, strict=True):
        axis.axhline(1, color=DARK, linewidth=1, linestyle="--")
        line = [math.nan if mean is None else mean for mean in means]
        axis.plot(range(len(line)), line, color=color, marker="o", markersize=3.5)
        _heads(axis, heads, color, -math.inf)
        axis.set_title(f"error of {title}")
        axis.grid(visible=True)
    axes[-1].set_xlabel("target layer (dots: heads)")
    figure.supylabel("error there, over the mean error", fontsize=9, color=DARK)
    _integer_ticks(axes[-1].xaxis)
    return figure


def _positions(report: Report) -> "Figure":
    """Relative error of keys and values in bins of position."""
    bins = report.layers.positions
    figure = _figure(6.4, 3.2)
    axis = figure.subplots()
    errors = {
        "keys": [part.key_error for part in bins],
        "values": [part.value_error for part in bins],
    }
    for (name, curve), color, marker in zip(errors.items(), (BLUE, ORANGE), "os", strict=True):
        axis.plot(range(len(bins)), curve, color=color, marker=marker, label=name)
    axis.set_xlabel("position in the sequence")
    labels = [f"{part.start}" for part in bins]
    if len(bins) > 9:
        axis.set_xlabel("position in the sequence, from")
    else:
        for index, part in enumerate(bins):
            if part.stop > part.start + 1:
                labels[index] += f"\u2013{part.stop - 1}"
    axis.set_xticks(range(len(bins)), labels)
    axis.set_ylim(0, 1.1 * max(1e-9, *(max(curve) for curve in errors.values())))
    axis.set_title("relative error of the map alone, mean over target layers (0 is exact)")
    axis.grid(visible=True)
    axis.legend(loc="best", frameon=False)
    return figure


def _exact(report: Report) -> "Figure":
    """KL and agreement over the tokens that the target computes itself."""
    points = report.exact
    source = report.settings["source_alone"]
    panels = {
        "KL from target alone (nats; lower is better)": ([p.kl for p in points], source.kl),
        "top-1 agreement with target alone": ([p.agreement for p in points], source.agreement),
    }
    figure = _figure(8.0, 3.2)
    places = range(len(points))
    for axis, (title, (estimates, alone)) in zip(
        figure.subplots(1, 2), panels.items(), strict=True
    ):
        values = [estimate.value for estimate in estimates]
        below = [max(0.0, estimate.value - estimate.low) for estimate in estimates]
        above = [max(0.0, estimate.high - estimate.value) for estimate in estimates]
        axis.errorbar(
            places, values, yerr=[below, above], color=BLUE, marker="o", capsize=2.5, label="mapped"
        )
        axis.axhline(alone.value, color=GREY, linestyle="--", label="source alone")
        # Budgets double or more, so they stand side by side and not to scale.
        axis.set_xticks(places, [f"{p.budget}\n{100 * p.share:.3g} %" for p in points])
        axis.set_ylim(0, 1.1 * max(1e-9, alone.value, *(estimate.high for estimate in estimates)))
        axis.set_title(title)
        axis.grid(visible=True)
        axis.legend(loc="best", frameon=False)
    figure.supxlabel("tokens that the target computes itself, and their share of the prefix")
    return figure


def _selection(config: "MapperConfig", scores: Sequence[Sequence[float]] | None) -> "Figure":
    """Target layers by source layers: which are read, over how well each predicts alone."""
    source, target = config.source.num_layers, config.target.num_layers
    longest = max(source, target)
    width = 1.0 if scores is None else 1.9
    figure = _figure(max(4.0, width + 4.2 * source / longest), 1.4 + 4.2 * target / longest)
    axis = figure.subplots()
    if scores is None:
        ranks = [[0.0] * source for _ in range(target)]
        for row, layers in enumerate(config.selection):
            for rank, layer in enumerate(layers):
                ranks[row][layer] = 1 - 0.7 * rank / config.top_k
        cells: dict[str, Any] = {"edgecolors": "white", "linewidth": min(0.8, 16 / longest)}
        axis.pcolormesh(
            range(source), range(target), ranks, cmap="Blues", vmin=0, vmax=1.1, **cells
        )
        axis.set_aspect("equal")
        axis.set_title(f"{config.top_k} source layers per target layer, best darkest")
    else:
        image = axis.imshow(scores, cmap="cividis", vmin=0, vmax=1, origin="lower")
        figure.colorbar(image, ax=axis, label="R² of that layer alone", shrink=0.8, extend="min")
        places = [(layer, row) for row, layers in enumerate(config.selection) for layer in layers]
        x, y = zip(*places, strict=True)
        size = min(6.0, 100 / longest)
        axis.plot(x, y, "o", color="white", markeredgecolor="black", markersize=size, mew=0.6)
        axis.set_title(f"○ {config.top_k} source layers per target layer")
    axis.set_xlabel("source layer")
    axis.set_ylabel("target layer")
    axis.grid(visible=False)
    _integer_ticks(axis.xaxis)
    _integer_ticks(axis.yaxis)
    return figure


def _integer_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
