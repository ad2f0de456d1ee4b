"""The YAML at the top of a card, which the Hub reads: kvhub's keys, and the user's own behind."""

import re
from typing import Any

import yaml
from kvhub.cards.licenses import License
from kvhub.cards.markdown import plain
from kvhub.cards.own_text import OwnText

__all__ = ["dataset_id", "front_matter", "hub_id", "known_license"]

OURS = {
    *("base_model", "base_model_relation", "library_name", "pipeline_tag", "tags", "datasets"),
    *("license", "license_name", "license_link", "license_links", "new_version", "model-index"),
}
TAGS = ("kvhub", "kv-cache", "kv-cache-mapping")
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*\w", re.ASCII)
FIGURES = (
    ("retention", "Retention: accuracy over the target's own"),
    ("floor_normalized_retention", "Retention above no context"),
    ("gap_recovered", "Gap between source and target recovered"),
    ("attention_output_cosine", "Attention-output cosine"),
    ("key_r2", "R2 of keys"),
    ("value_r2", "R2 of values"),
)
METRICS = (
    ("agreement", "Top-1 agreement with the target"),
    ("kl", "KL divergence from the target, nats per token"),
    ("accuracy", "Top-1 accuracy"),
    ("nll", "Negative log likelihood, nats per token"),
)


def hub_id(spec: dict[str, Any]) -> str | None:
    """A model's id on the Hub; None for a local model, which has no commit.

    `models/small` can be either, and the Hub refuses a path or takes it for somebody's model.
    """
    model_id = str(spec["model_id"])
    known = spec["revision"] and REPO_ID.fullmatch(model_id) and not re.search(r"--|\.\.", model_id)
    return model_id if known else None


def dataset_id(about: dict[str, Any]) -> str | None:
    """The id on the Hub of the text that `kvhub.corpus.describe` tells about."""
    name = str(about.get("data")).partition(":")[0]
    return name if about.get("kind") == "dataset" and REPO_ID.fullmatch(name) else None


def known_license(license: "License | str | None", own: OwnText) -> License | None:
    """The licence that was asked for, else what the card said so far."""
    found = own.strings("license")
    if isinstance(license, str):
        # The one that the card has may have a name and links besides.
        license = None if [license] == found else License(license.strip().lower())
    if license is not None or len(found) != 1:
        return license
    name = (*own.strings("license_name"), None)[0]
    links = own.strings("license_links") or own.strings("license_link")
    return License(found[0], name, tuple(links))


def front_matter(
    config: dict[str, Any],
    report: dict[str, Any] | None,
    name: str,
    license: License | None,
    new_version: str | None,
    own: OwnText,
) -> str:
    """The metadata between its two lines of dashes.

    Tags that are not kvhub's are the user's and stay; so does the successor that the card names.
    """
    specs = (config["source"], config["target"])
    base_models = list(dict.fromkeys(found for spec in specs if (found := hub_id(spec))))
    tags = [*TAGS, *(plain(spec["model_type"]) for spec in specs)]
    for role in ("source", "target"):
        if found := hub_id(config[role]):
            tags.append(f"{role}:{found}")
    tags += [tag for tag in own.strings("tags") if not tag.startswith(("source:", "target:"))]
    dataset = dataset_id(config["calibration"])
    data: dict[str, Any] = {
        "base_model": base_models or None,
        # Without it, the Hub takes a model with two bases for their merge.
        "base_model_relation": "adapter" if base_models else None,
        "library_name": "kvhub",
        "pipeline_tag": "text-generation",
        **_license_keys(license),
        "tags": list(dict.fromkeys(tags)),
        "datasets": [dataset] if dataset else None,
        "new_version": new_version or (*own.strings("new_version"), None)[0],
        "model-index": _model_index(name, report) if report else None,
    }
    ours = yaml.safe_dump(
        {key: value for key, value in data.items() if value is not None},
        sort_keys=False,
        allow_unicode=True,
        width=10**6,
    )
    return f"---\n{ours}{own.other_keys(OURS)}---"


def _license_keys(license: License | None) -> dict[str, Any]:
    if license is None:
        return {}
    if license.id != "other":
        return {"license": license.id}
    keys: dict[str, Any] = {"license": "other", "license_name": license.name}
    if len(license.links) == 1:
        keys["license_link"] = license.links[0]
    elif license.links:
        # The Hub follows one link, or a file's name: this card, whose last section has them all.
        keys |= {"license_link": "README.md", "license_links": list(license.links)}
    return keys


def _model_index(name: str, report: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures as the Hub's evaluation results; those that are not defined are left out."""
    about = report["provenance"]
    data = plain(about.get("data") or "text")
    dataset = {"name": data, "type": dataset_id(about) or data}
    if dataset_id(about):
        config = data.partition(":")[2]
        for key, value in (
            ("config", config),
            ("split", about.get("split")),
            ("revision", about.get("revision")),
        ):
            if value:
                dataset[key] = str(value)
    metrics = [(key, label, report[key]) for key, label in FIGURES]
    for setting, suffix in (("mapped", "mapped cache"), ("source_alone", "source alone")):
        for key, label in METRICS:
            metrics.append((key, f"{label}, {suffix}", report["settings"][setting][key]))
    return [
        {
            "name": name,
            "results": [
                {
                    "task": {"type": "text-generation", "name": "Text generation"},
                    "dataset": dataset,
                    "metrics": [
                        {"type": key, "value": _value(estimate), "name": label}
                        for key, label, estimate in metrics
                        if estimate is not None
                    ],
                }
            ],
        }
    ]


def _value(estimate: Any) -> float:
    return float(estimate["value"] if isinstance(estimate, dict) else estimate)
