"""What the test Hub reads in a model card, and what it refuses there."""

import math
import re
from typing import Any

import yaml

FRONT_MATTER = re.compile(r"\A\s*^---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def card_data(readme: bytes) -> dict[str, Any]:
    """The metadata of a model card; empty where there is none that can be read."""
    match = FRONT_MATTER.search(readme.decode(errors="replace"))
    try:
        data = yaml.safe_load(match[1]) if match else {}
    except (yaml.YAMLError, ValueError):
        data = {}
    return data if isinstance(data, dict) else {}


def card_tags(card: dict[str, Any]) -> list[str]:
    """What the Hub's filters look through: a card's tags, and some of its other metadata."""
    tags = as_list(card.get("tags"))
    tags += as_list(card.get("library_name"))
    for key in ("license", "datasets", "base_model"):
        tags += [f"{key.removesuffix('s')}:{value}" for value in as_list(card.get(key))]
    if relation := card.get("base_model_relation"):
        tags += [f"base_model:{relation}:{value}" for value in as_list(card.get("base_model"))]
    return tags


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def card_errors(readme: str) -> list[str]:
    """Why the Hub would refuse this model card."""
    match = FRONT_MATTER.search(readme)
    try:
        card = (yaml.safe_load(match[1]) if match else None) or {}
    except (yaml.YAMLError, ValueError) as error:
        return [f"Invalid YAML: {error}"]
    if not isinstance(card, dict):
        return ["The metadata must be a mapping"]
    errors = []
    if not isinstance(card.get("license", ""), str):
        errors.append('"license" must be a string')
    for key in ("tags", "language", "datasets", "base_model"):
        if not all(isinstance(value, str) for value in as_list(card.get(key))):
            errors.append(f'"{key}" must be a string or a list of strings')
    for value in as_list(card.get("base_model")):
        if not MODEL_ID.fullmatch(str(value)):
            errors.append(f'"base_model" with value "{value}" is not valid. Use a model id')
    return errors + _index_errors(card.get("model-index", []))


def _index_errors(index: Any) -> list[str]:
    try:
        metrics = [
            metric for model in index for result in model["results"] for metric in result["metrics"]
        ]
        values = [(metric["type"], metric["value"]) for metric in metrics]
    except (KeyError, TypeError):
        return ['"model-index" must list models with results with metrics with type and value']
    return [
        f'"model-index" has a value of {name} that is not a number: {value!r}'
        for name, value in values
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
    ]
