"""The README.md of a package, rendered from config.json and report.json and never read back.

Only what people wrote into an earlier card is taken from it, see `own_text`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvhub.cards.commands import evaluate_command, fit_command, load_snippet, shown_model
from kvhub.cards.licenses import License
from kvhub.cards.markdown import code, fenced, link, plain, table, text
from kvhub.cards.metadata import dataset_id, front_matter, hub_id, known_license
from kvhub.cards.own_text import read_own_text

__all__ = ["render_card"]

HUB = "https://huggingface.co"
SETTINGS = ("mapped", "target_alone", "source_alone", "no_context")


def render_card(
    name: str,
    config: dict[str, Any],
    report: dict[str, Any] | None,
    plots: list[str],
    *,
    repo_id: str | None = None,
    version: str | None = None,
    license: License | str | None = None,
    new_version: str | None = None,
    previous: str | None = None,
    command: str | None = None,
) -> str:
    """The card of a mapper as Markdown with Hub metadata.

    The same arguments give the same card, and with that card as `previous` they give it again.

    Parameters
    ----------
    name
        What the mapper is called in the local store.
    config
        The content of config.json.
    report
        The content of report.json, or None if the mapper was not evaluated yet.
    plots
        Names of the files under plots/.
    repo_id, version
        Where it is published and as which version, such as `1.0.0`; None for a local mapper.
    license
        The mapper's own, an identifier of the Hub or what `stricter_license` gives; None keeps
        what `previous` says.
    new_version
        The repository that replaces this one; None keeps what `previous` says.
    previous
        The card that this one replaces: text outside kvhub's part, and keys and tags that are not
        kvhub's, are kept.
    command
        What made the mapper, where that is known; by default the command that its config gives.
    """
    own = read_own_text(previous)
    found = known_license(license, own)
    title = plain(repo_id.rpartition("/")[2] if repo_id else name)
    tag = None if version is None else f"v{version.removeprefix('v')}"
    reference = name if repo_id is None else repo_id + (f"@{tag}" if tag else "")
    source, target = config["source"], config["target"]
    template = Path(__file__).with_name("mapper_card.md").read_text(encoding="utf-8")
    body = template.format(
        title=text(title),
        source=_model(source),
        target=_model(target),
        snippet=fenced("python", load_snippet(config, name, repo_id, tag)),
        local_models=_local_models(source, target),
        compatibility=table(("", "source", "target"), _compatibility_rows(source, target)),
        quality=_quality(config, report, plots, reference),
        calibration=_calibration(config["calibration"]),
        fit=_fit(config),
        evaluate_own=code(f"kvhub evaluate {reference} --data FILE"),
        reproduce=_reproduce(config, report, name, command),
        license=_license(found, title),
    )
    # A part that is empty leaves two blank lines more.
    body = re.sub(r"\n{3,}", "\n\n", body).strip("\n")
    metadata = front_matter(config, report, title, found, new_version, own)
    return "\n\n".join(part for part in (metadata, own.above, body, own.below) if part) + "\n"


def _model(spec: dict[str, Any]) -> str:
    found = hub_id(spec)
    shown: str = link(found, f"{HUB}/{found}") if found else code(shown_model(spec))
    return shown


def _local_models(*specs: dict[str, Any]) -> str:
    names = list(dict.fromkeys(code(shown_model(spec)) for spec in specs if not hub_id(spec)))
    if not names:
        return ""
    are = "is a folder" if len(names) == 1 else "are folders"
    return f"{' and '.join(names)} {are} of the author's."


def _compatibility_rows(*specs: dict[str, Any]) -> list[list[str]]:
    rows = [
        ["model", *(_model_cell(spec) for spec in specs)],
        ["commit", *(text(spec["revision"] or "local") for spec in specs)],
    ]
    for label, key in (
        ("family", "model_type"),
        ("layers", "num_layers"),
        ("KV heads", "kv_heads"),
        ("head dim", "head_dim"),
    ):
        rows.append([label, *(text(spec[key]) for spec in specs)])
    ropes = [spec["rope"] for spec in specs]
    rows += [
        ["RoPE type", *(text(rope["rope_type"]) for rope in ropes)],
        ["RoPE theta", *(_number(rope["rope_theta"]) for rope in ropes)],
        ["RoPE scaling", *(_scaling(rope) for rope in ropes)],
        ["QK-norm", *("yes" if spec["qk_norm"] else "no" for spec in specs)],
        ["tokenizer (sha256)", *(text(spec["tokenizer_digest"] or "unknown") for spec in specs)],
    ]
    return rows


def _model_cell(spec: dict[str, Any]) -> str:
    found = hub_id(spec)
    shown: str = link(found, f"{HUB}/{found}") if found else text(shown_model(spec))
    return shown


def _scaling(rope: dict[str, Any]) -> str:
    parts = [f"{key} {_number(value)}" for key, value in rope["parameters"].items()]
    if rope["attention_scaling"] != 1:
        parts.append(f"attention scaling {_number(rope['attention_scaling'])}")
    return ", ".join(parts) or "none"


def _number(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    shown: str = text(int(value) if whole else value)
    return shown


def _quality(
    config: dict[str, Any], report: dict[str, Any] | None, plots: list[str], reference: str
) -> str:
    quality = config["quality"]
    parts = []
    if r2 := quality.get("held_out_r2"):
        parts.append(
            f"Held-out R2 on calibration text: keys {r2['keys']:.3f}, values {r2['values']:.3f} "
            f"(mean over target layers, {quality['held_out_tokens']} tokens)."
        )
    if report is None:
        return "\n\n".join([*parts, f"Not evaluated yet: {code(f'kvhub evaluate {reference}')}."])
    settings = report["settings"]
    metrics = ("nll", "accuracy", "kl", "agreement")
    rows = [
        [setting.replace("_", " "), *(_estimate(settings[setting][key]) for key in metrics)]
        for setting in SETTINGS
    ]
    header = ("", "NLL, nats", "accuracy", "KL to the target, nats", "top-1 agreement with it")
    figures = [
        ("retention: accuracy over the target's own", _estimate(report["retention"])),
        ("the same of source alone", _source_retention(settings)),
        ("retention above no context", _estimate(report["floor_normalized_retention"])),
        ("gap between source and target recovered", _estimate(report["gap_recovered"])),
        ("attention-output cosine", _estimate(report["attention_output_cosine"])),
        ("R2 of keys", f"{report['key_r2']:.3f}"),
        ("R2 of values", f"{report['value_r2']:.3f}"),
    ]
    parts += [
        _evaluated_on(report["provenance"]),
        table(header, rows),
        table(("figure", "value"), figures),
        "Brackets are 95 % bootstrap intervals over sequences.",
        _gate(report.get("gate")),
        "\n".join(f"- {text(note)}" for note in report["notes"]),
        "\n".join(
            f"![{text(plot.removesuffix('.png').replace('_', ' '))}](plots/{quote(plot)})"
            for plot in plots
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def _gate(gate: dict[str, Any] | None) -> str:
    if gate is None:
        return ""
    rows = [
        [
            text(criterion["name"].replace("_", " ")),
            f"{criterion['bound']:.3f}",
            f"{'at most' if criterion['upper'] else 'at least'} {criterion['threshold']:g}",
            "yes" if criterion["passed"] else "**no**",
            text(criterion["reason"]),
        ]
        for criterion in gate["criteria"]
    ]
    verdict = "met" if gate["passed"] else "**not met**: let the target read its prompts itself"
    return "\n\n".join(
        [
            f"Quality gate: {verdict}. Of an interval, the worse end counts.",
            table(("", "counts", "threshold", "met", "why"), rows),
        ]
    )


def _evaluated_on(about: dict[str, Any]) -> str:
    protocol = about.get("protocol", {})
    if "sequences" not in about or "exact_prefix" not in protocol:
        return ""
    return (
        f"On {about['sequences']} sequences of {text(about.get('data', 'text'))}: "
        f"{about['prefix_tokens']} tokens of context, the first {protocol['exact_prefix']} of each "
        f"sequence exact and the rest mapped, and {about['scored_tokens']} tokens after it scored."
    )


def _source_retention(settings: dict[str, Any]) -> str:
    accuracy = settings["target_alone"]["accuracy"]["value"]
    if accuracy == 0:
        return "not defined here"
    return f"{settings['source_alone']['accuracy']['value'] / accuracy:.3f}"


def _estimate(estimate: dict[str, float] | None) -> str:
    if estimate is None:
        return "not defined here"
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _calibration(calibration: dict[str, Any]) -> str:
    rows = []
    for key, value in _flat(calibration):
        dataset = dataset_id(calibration) if key == "data" else None
        shown = link(value, f"{HUB}/datasets/{dataset}") if dataset else text(value)
        rows.append((text(key.replace("_", " ")), shown))
    return table(("", ""), rows) if rows else "Not recorded."


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values, those of a dictionary inside, such as a refit, behind its own key."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key} ")
        else:
            yield f"{prefix}{key}", f"{value:.4g}" if isinstance(value, float) else value


def _fit(config: dict[str, Any]) -> str:
    ridge = config["ridge"]
    aligned = ""
    if alignment := ridge.get("alignment"):
        share = alignment.get("value_share", 1.0)  # older mappers may lack it
        values = "as they were" if share == 0 else f"{share:.0%} of the way to the best ones"
        aligned = (
            " Then fitted again to the target's attention output: keys by Gauss-Newton, values "
            f"{values}."
        )
    networks = ""
    if repair := config.get("repair"):
        layers = ", ".join(f"{kind} of target layers {repair[kind]}" for kind in ("keys", "values"))
        networks = f" Networks of width {repair['hidden']} add to the linear map: {layers}."
    heads = (
        "A target head reads every KV head of its source layers."
        if config["heads"] == "all"
        else "A target head reads the same head of its source layers."
    )
    return (
        f"{heads} Each target layer reads {config['top_k']} of {config['source']['num_layers']} "
        f"source layers, by ridge regression with lambda {ridge['lambda']:g} "
        f"({text(ridge['scale'])}) on {ridge['tokens']} tokens with {ridge['features']} features; "
        f"weighting: {text(config['weighting'])}; stored as {text(config['dtype'])}."
        f"{aligned}{networks}"
    )


def _reproduce(
    config: dict[str, Any], report: dict[str, Any] | None, name: str, command: str | None
) -> str:
    fit = command or fit_command(config, name)
    evaluate = evaluate_command(config, report, name) if report else None
    parts = []
    if fit is None:
        parts.append("It was fitted from Python; `config.json` has all of its settings.")
    commands = [found for found in (fit, evaluate) if found]
    if commands:
        parts.append(fenced("sh", "\n".join(commands)))
    kinds = (config["calibration"].get("kind"), (report or {}).get("provenance", {}).get("kind"))
    if commands and "files" in kinds:
        parts.append(
            "`--data` names the author's files; their sha256 is in `config.json` or `report.json`."
        )
    parts.append(_versions(config, report))
    return "\n\n".join(parts)


def _versions(config: dict[str, Any], report: dict[str, Any] | None) -> str:
    fitted = f"Fitted with kvhub {text(config['kvhub_version'])}"
    # The built-in texts are those of a version of Python.
    if python := config["calibration"].get("python"):
        fitted += f" on text of Python {text(python)}"
    versions = (report or {}).get("provenance", {}).get("versions")
    if not versions:
        return f"{fitted}."
    listed = ", ".join(f"{text(package)} {text(value)}" for package, value in versions.items())
    return f"{fitted}; evaluated with {listed}."


def _license(license: License | None, title: str) -> str:
    derived = "The map is derived from both models, so it is under the licences of both."
    if license is None:
        return f"{derived} Which these are is not known here: see the models' own cards."
    links = [f"<{found}>" for found in license.links if re.fullmatch(r"https?://[^\s<>]+", found)]
    parts = [
        f"{derived} Together: **{text(license.label)}**.",
        "\n".join(f"- {found}" for found in links),
    ]
    if version := license.llama:
        parts.append(_llama_duties(version, title))
    return "\n\n".join(part for part in parts if part)


def _llama_duties(version: str, title: str) -> str:
    notice = (
        f"Llama {version} is licensed under the Llama {version} Community License, Copyright © "
        "Meta Platforms, Inc. All Rights Reserved."
    )
    if version == "2":
        return notice
    built = "Built with Meta Llama 3" if version == "3" else "Built with Llama"
    duties = (
        f"**{built}.** {notice} That licence asks of everybody who distributes what was made with "
        f"Llama to say “{built}” where it is seen, to pass on the licence with this notice, and to "
        "begin the model's name with “Llama”"
    )
    missing = "" if title.lower().startswith("llama") else ", as this one's does not"
    return f"{duties}{missing}."
