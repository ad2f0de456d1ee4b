"""What each command's result looks like to people; see `kvhub.console` for how it is printed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvhub.console import say, table
from kvhub.roofline import H100_SXM

if TYPE_CHECKING:
    from kvhub.comparison import Comparison, Timing
    from kvhub.compatibility import Decision
    from kvhub.estimates import Estimate as PairEstimate
    from kvhub.gate import GateResult
    from kvhub.mapper import KVMapper
    from kvhub.recipe import Recipe
    from kvhub.report import Estimate, Report
    from kvhub.roofline import Prediction

__all__ = [
    "show_check",
    "show_comparison",
    "show_config",
    "show_files",
    "show_fit",
    "show_recipes",
    "show_report",
    "show_store",
    "show_timings",
]


def megabytes(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def show_recipes(recipes: "Sequence[Recipe]") -> None:
    """The built-in pairs."""
    table(
        "Built-in pairs: kvhub fit NAME",
        ("name", "k ", "heads", "source", "target"),
        [(r.name, r.top_k, r.heads, r.source, r.target) for r in recipes],
    )


def show_check(
    source: str, target: str, decisions: "Sequence[Decision]", found: "PairEstimate | None"
) -> None:
    """Every compatibility decision, and what a mapper would weigh, cost and save."""
    table(
        f"{source} to {target}",
        ("", "source", "target", "verdict", "reason"),
        [(d.field, _short(d.source), _short(d.target), d.verdict, d.reason) for d in decisions],
    )
    if found is None:
        return
    table(
        f"A mapper with {found.heads} heads and k = {found.top_k}",
        ("", "value "),
        [
            ("parameters", f"{found.parameters:,}"),
            ("size in 16-bit", megabytes(found.size_bytes)),
            ("operations per token", f"{found.map_flops / 1e9:.3f} GFLOP"),
            ("calibration tokens needed", f"over {found.features:,}, better 10 x"),
            ("memory of the statistics", megabytes(found.statistics_bytes)),
        ],
    )
    times = ("map, ms ", "copy by NVLink, ms ", "by PCIe, ms ", "prefill again, ms ")
    table(
        "Predicted for one GPU from its peaks, not measured; faster with a copy by NVLink",
        ("GPU", "tokens ", *times, "faster "),
        [
            (
                p.device,
                p.tokens,
                *(f"{1e3 * seconds:.2f}" for seconds in (p.map.total, p.nvlink, p.pcie, p.prefill)),
                f"{p.gain:.1f}x",
            )
            for p in found.predictions
        ],
    )


def _short(value: object) -> str:
    """A digest's first characters say enough in a table."""
    text = str(value)
    return f"{text[:12]}…" if len(text) == 64 else text


def show_fit(name: str, mapper: "KVMapper") -> None:
    """The selected layers and the held-out R2 of each target layer."""
    quality = mapper.config.quality
    r2, per_layer = quality["held_out_r2"], quality["held_out_r2_per_layer"]
    rows: list[tuple[Any, ...]] = [
        (layer, " ".join(map(str, chosen)), f"{keys:.3f}", f"{values:.3f}")
        for layer, (chosen, keys, values) in enumerate(
            zip(mapper.config.selection, per_layer["keys"], per_layer["values"], strict=True)
        )
    ]
    table(
        f"{name}: {mapper.num_parameters:,} parameters, {megabytes(mapper.size_bytes)}",
        ("target layer ", "source layers", "held-out R2 keys ", "values "),
        [*rows, ("mean", "", f"{r2['keys']:.3f}", f"{r2['values']:.3f}")],
    )
    for kind, errors in quality.get("alignment", {}).items():
        before, after = (sum(parts) / len(errors) for parts in zip(*errors, strict=True))
        say(f"Held-out error of what is read, by its {kind}: {before:.3f}, aligned {after:.3f}.")


def show_timings(
    name: str, timings: "Sequence[Timing]", predictions: "Sequence[Prediction]", repeats: int
) -> None:
    """The map against prefilling again, and what the arithmetic of a roofline says of a GPU."""
    predicted = {
        p.tokens: f"{1e3 * p.map.total:.2f} ms, {1e3 * p.prefill:.2f} ms"
        for p in predictions
        if p.device == H100_SXM.name
    }
    table(
        f"{name}: medians of {repeats}",
        (
            *("tokens ", "map, ms ", "hand-off, ms ", "prefill again, ms ", "faster "),
            f"predicted for {H100_SXM.name}: map, prefill",
        ),
        [
            (
                t.tokens,
                f"{1e3 * t.map_seconds:.1f}",
                f"{1e3 * t.handoff_seconds:.1f}",
                f"{1e3 * t.prefill_seconds:.1f}",
                f"{t.speedup:.1f}x",
                predicted.get(t.tokens, "not predicted with networks"),
            )
            for t in timings
        ],
    )


def show_store(mappers: Sequence[dict[str, Any]]) -> None:
    """The local mappers."""
    table(
        "Local mappers",
        ("name", "source", "target", "k ", "heads", "R2 keys ", "values ", "size "),
        [
            (
                m["name"],
                m["source"],
                m["target"],
                m["top_k"],
                m["heads"],
                f"{m['held_out_r2']['keys']:.3f}",
                f"{m['held_out_r2']['values']:.3f}",
                megabytes(m["size_bytes"]),
            )
            for m in mappers
        ],
    )


def show_files(path: str, files: dict[str, tuple[str, int]]) -> None:
    """The verified files of a package."""
    table(
        f"{path}: verified",
        ("file", "bytes ", "sha256"),
        [(name, f"{size:,}", sha256) for name, (sha256, size) in files.items()],
    )


def show_report(name: str, report: "Report") -> None:
    """The figures of an evaluation, each beside what it is compared with."""
    table(
        f"{name}: how the next tokens are predicted",
        ("", "NLL, nats ", "perplexity ", "accuracy ", "KL to target ", "agreement "),
        [
            (
                setting.replace("_", " "),
                _interval(metrics.nll),
                f"{metrics.perplexity.value:.2f}",
                _interval(metrics.accuracy),
                _interval(metrics.kl),
                _interval(metrics.agreement),
            )
            for setting, metrics in report.settings.items()
        ],
    )
    table(
        "Summary, with 95 % bootstrap intervals over sequences",
        ("", "value "),
        [
            ("retention: accuracy over the target's own", _interval(report.retention)),
            ("  above no context", _interval(report.floor_normalized_retention)),
            ("gap between source and target recovered", _interval(report.gap_recovered)),
            ("attention-output cosine", _interval(report.attention_output_cosine)),
            ("held-out R2 of keys", f"{report.key_r2:.3f}"),
            ("held-out R2 of values", f"{report.value_r2:.3f}"),
        ],
    )
    if report.gate is not None:
        _show_gate(report.gate)
    if report.exact:
        table(
            "Mapped, by how many tokens the target computes itself",
            ("tokens ", "of the prefix ", "NLL, nats ", "KL to target ", "agreement ", "gap "),
            [
                (
                    point.budget,
                    f"{100 * point.share:.1f} %",
                    *(
                        _interval(part)
                        for part in (point.nll, point.kl, point.agreement, point.gap_recovered)
                    ),
                )
                for point in report.exact
            ],
        )
    for note in report.notes:
        say(f"Note: {note}")


def _show_gate(gate: "GateResult") -> None:
    table(
        f"Gate: {'met' if gate.passed else 'not met'}; the worse end of an interval counts",
        ("", "value ", "counts ", "threshold ", "", "why"),
        [
            (
                c.name.replace("_", " "),
                f"{c.value:.3f}",
                f"{c.bound:.3f}",
                f"{'at most' if c.upper else 'at least'} {c.threshold:g}",
                "pass" if c.passed else "FAIL",
                c.reason,
            )
            for c in gate.criteria
        ],
    )


def _interval(estimate: "Estimate | None") -> str:
    if estimate is None:
        return "undefined"
    return f"{estimate.value:.3f}\n({estimate.low:.3f} to {estimate.high:.3f})"


def show_comparison(comparison: "Comparison", texts: dict[str, str]) -> None:
    """Three continuations side by side, and what each cost."""
    decision = comparison.decision
    handed = "mapped hand-off" if decision is None or decision.mapped else "hand-off, read again"
    labels = {"target": "target alone", "mapped": handed, "source": "source alone"}
    if decision is not None:
        say(f"{'Mapped' if decision.mapped else 'Read again'}: {decision.reason}.")
    table("", tuple(labels.values()), [[texts[way].strip("\n") for way in labels]])
    table(
        f"{comparison.prompt_tokens} prompt tokens",
        ("", "until the context is there, ms ", "new tokens, ms "),
        [
            (
                label,
                f"{1e3 * getattr(comparison, way).context_seconds:.1f}",
                f"{1e3 * getattr(comparison, way).generate_seconds:.1f}",
            )
            for way, label in labels.items()
        ],
    )


def show_config(path: str, config: dict[str, Any]) -> None:
    """A mapper's config as tables."""
    source, target = config["source"], config["target"]
    keys = ("model_id", "revision", "model_type", "num_layers", "kv_heads", "head_dim", "qk_norm")
    rows = [(key, source[key], target[key]) for key in keys]
    for key in ("rope_type", "rope_theta"):
        rows.append((key, source["rope"][key], target["rope"][key]))
    table(path, ("", "source", "target"), rows)
    r2 = config["quality"]["held_out_r2"]
    ridge = dict(config["ridge"])
    alignment = ridge.pop("alignment", None)
    table(
        "",
        ("", "value"),
        [
            ("heads", config["heads"]),
            ("top_k", config["top_k"]),
            ("selection", config["selection_method"]),
            ("ridge", ", ".join(f"{key} {value}" for key, value in ridge.items())),
            ("aligned", "no" if alignment is None else "to the attention output"),
            ("weighting", config["weighting"]),
            *((f"networks: {key}", value) for key, value in config.get("repair", {}).items()),
            ("dtype", config["dtype"]),
            ("held-out R2", f"keys {r2['keys']:.3f}, values {r2['values']:.3f}"),
            *((key, value) for key, value in config["calibration"].items()),
            ("kvhub", config["kvhub_version"]),
        ],
    )
