"""The README.md of a package, rendered from config.json and report.json and never read back."""

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["render_card"]

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")

TEMPLATE = """\
---
{metadata}
---

# {name}

Maps the KV cache of `{source_id}` into one of `{target_id}`, so that the target goes on with a
conversation without prefilling it again.

```python
from kvhub import KVMapper, handoff

mapper = KVMapper.from_pretrained("{name}")
output_ids = handoff(mapper, source_model, target_model, input_ids, max_new_tokens=64)
```

## Compatibility

The mapper fits these two models and no others; it is checked on use.

{compatibility}

## The map

{heads_text} Each target layer reads {top_k} of {source_layers} source layers, by ridge regression
with lambda {ridge_lambda:g} ({ridge_scale}) on {tokens} tokens with {features} features;
weighting: {weighting}; stored as {dtype}.

## Quality

{quality}

## Calibration

{calibration}

## Limits

- A mapped cache approximates the target's own: output differs from what the target would write
  alone. Figures above hold for text like the calibration text; measure on your own with
  `kvhub evaluate {name} --data FILE`.
- Do not put mapped blocks into a prefix cache that other requests take for exact.
- The licences of both models apply to this map, which is derived from them.
"""


def render_card(
    name: str, config: dict[str, Any], report: dict[str, Any] | None, plots: list[str]
) -> str:
    """The card of a mapper as Markdown with Hub metadata.

    Parameters
    ----------
    name
        What the mapper is called in the load snippet.
    config
        The content of config.json.
    report
        The content of report.json, or None if the mapper was not evaluated yet.
    plots
        Names of the files under plots/.
    """
    from huggingface_hub import ModelCardData

    source, target, ridge = config["source"], config["target"], config["ridge"]
    ids = [spec["model_id"] for spec in (source, target)]
    metadata = ModelCardData(
        # A local path is not a Hub id, and the Hub refuses a card that names one.
        base_model=[model_id for model_id in ids if HUB_ID.fullmatch(model_id)] or None,
        library_name="kvhub",
        tags=["kvhub", "kv-cache", "kv-cache-mapping", target["model_type"]],
    )
    heads_text = (
        "A target head reads every KV head of its source layers."
        if config["heads"] == "all"
        else "A target head reads the same head of its source layers."
    )
    return TEMPLATE.format(
        metadata=metadata.to_yaml().strip(),
        name=name,
        source_id=source["model_id"],
        target_id=target["model_id"],
        compatibility=_table(("", "source", "target"), _compatibility_rows(source, target)),
        heads_text=heads_text,
        top_k=config["top_k"],
        source_layers=source["num_layers"],
        ridge_lambda=ridge["lambda"],
        ridge_scale=ridge["scale"],
        tokens=ridge["tokens"],
        features=ridge["features"],
        weighting=config["weighting"],
        dtype=config["dtype"],
        quality=_quality(name, config["quality"], report, plots),
        calibration=_table(
            ("", ""), [(key, _cell(value)) for key, value in config["calibration"].items()]
        ),
    )


def _compatibility_rows(source: dict[str, Any], target: dict[str, Any]) -> list[tuple[str, ...]]:
    def rope(spec: dict[str, Any]) -> str:
        found = spec["rope"]
        extra = ", ".join(f"{name} {value}" for name, value in found["parameters"].items())
        return f"{found['rope_type']}, theta {found['rope_theta']:g}" + (f", {extra}" * bool(extra))

    rows: list[tuple[str, ...]] = [
        ("model", source["model_id"], target["model_id"]),
        ("commit", source["revision"] or "local", target["revision"] or "local"),
        ("RoPE", rope(source), rope(target)),
    ]
    for label, key in (
        ("family", "model_type"),
        ("layers", "num_layers"),
        ("KV heads", "kv_heads"),
        ("head dim", "head_dim"),
        ("QK-norm", "qk_norm"),
        ("tokenizer", "tokenizer_digest"),
    ):
        rows.append((label, _cell(source[key]), _cell(target[key])))
    return rows


def _quality(
    name: str, quality: dict[str, Any], report: dict[str, Any] | None, plots: list[str]
) -> str:
    r2 = quality["held_out_r2"]
    text = (
        f"Held-out R2 on calibration text: keys {r2['keys']:.3f}, values {r2['values']:.3f} "
        f"(mean over target layers, {quality['held_out_tokens']} tokens)."
    )
    if report is None:
        return f"{text}\n\nNot evaluated yet: run `kvhub evaluate {name}`."
    rows = [
        (
            setting.replace("_", " "),
            *(_estimate(metrics[key]) for key in ("nll", "kl", "agreement")),
        )
        for setting, metrics in report["settings"].items()
    ]
    figures = [
        (label, _estimate(report[key]))
        for label, key in (
            ("retention (accuracy over the target's own)", "retention"),
            ("floor-normalised retention", "floor_normalized_retention"),
            ("gap between source and target recovered", "gap_recovered"),
            ("attention-output cosine", "attention_output_cosine"),
        )
    ]
    images = "\n".join(f"![{plot.removesuffix('.png')}](plots/{plot})" for plot in plots)
    parts = [
        text,
        _table(("setting", "NLL (nats)", "KL to target (nats)", "top-1 agreement"), rows),
        _table(("figure", "value"), figures),
        "Brackets are 95 % bootstrap intervals over sequences.",
        *(f"- {note}" for note in report["notes"]),
        images,
    ]
    return "\n\n".join(part for part in parts if part)


def _estimate(estimate: dict[str, float] | None) -> str:
    if estimate is None:
        return "not defined here"
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "unknown"
    return str(value).replace("|", "\\|")[:80]
