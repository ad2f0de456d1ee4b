"""The code and the commands in a card: how to use a mapper, and how to make it again."""

import json
import re
import shlex
from typing import Any

from kvhub.cards.markdown import plain
from kvhub.cards.metadata import hub_id

__all__ = ["evaluate_command", "fit_command", "load_snippet", "shown_model"]

SNIPPET = """\
from kvhub import KVMapper, handoff
from kvhub.models import load_model, load_tokenizer

mapper = KVMapper.from_pretrained({mapper})
source = load_model({source})
target = load_model({target})
tokenizer = load_tokenizer({target})

input_ids = tokenizer("What both models have read so far.", return_tensors="pt")["input_ids"]
output_ids = handoff(mapper, source, target, input_ids, max_new_tokens=64)
print(tokenizer.decode(output_ids[0]))"""
# `kvhub fit` holds out every tenth sequence and has no option for it.
HELD_OUT_EVERY = 10
DTYPES = ("float32", "bfloat16", "float16")
REPAIR = ("sequences", "size_budget", "hidden")


def shown_model(spec: dict[str, Any]) -> str:
    """A model's id or relative path; of another path its last part, as a card is public."""
    name: str = plain(spec["model_id"]) or plain(spec["model_type"])
    if re.match(r"[/~.\\]|[A-Za-z]:", name) or "\\" in name:
        name = re.split(r"[/\\]+", name.rstrip("/\\"))[-1] or plain(spec["model_type"])
    return name


def load_snippet(config: dict[str, Any], name: str, repo_id: str | None, tag: str | None) -> str:
    """Python that loads a mapper with its two models and hands a text over."""

    def arguments(name: str, revision: str | None) -> str:
        quoted = json.dumps(plain(name), ensure_ascii=False)
        return quoted if revision is None else f"{quoted}, revision={json.dumps(revision)}"

    def model(spec: dict[str, Any]) -> str:
        return arguments(shown_model(spec), spec["revision"] if hub_id(spec) else None)

    return SNIPPET.format(
        mapper=arguments(repo_id or name, tag if repo_id else None),
        source=model(config["source"]),
        target=model(config["target"]),
    )


def fit_command(config: dict[str, Any], name: str) -> str | None:
    """The `kvhub fit` that makes a mapper of this config, and `kvhub repair`; None if none does.

    Nothing is left to a default, which another version of kvhub may have changed.
    """
    calibration, ridge = config["calibration"], config["ridge"]
    if "refit" in calibration:
        return None if "repair" in config else _refit_command(calibration["refit"], name)
    counts = ("sequences", "length", "stride")
    if (
        not isinstance(calibration.get("data"), str)
        or not all(isinstance(calibration.get(key), int) for key in counts)
        or calibration.get("held_out_every") != HELD_OUT_EVERY
        or config["dtype"] not in DTYPES
    ):
        return None
    repaired = "repair" in config
    linear = f"{name}-linear" if repaired else name
    options = {
        "source": shown_model(config["source"]),
        "target": shown_model(config["target"]),
        "name": linear,
        "data": _data(calibration),
        **{key: calibration[key] for key in counts},
        "top-k": config["top_k"],
        "heads": config["heads"],
        "ridge-lambda": ridge["lambda"],
        "lambda-scale": ridge["scale"],
        "weighting": config["weighting"],
        "selection": config["selection_method"],
        "dtype": config["dtype"],
    }
    flag = "--align" if "alignment" in ridge else "--no-align"
    commands = [f"{_command('kvhub fit', options)} {flag}"]
    if repaired:
        about = config["quality"].get("repair", {})
        options = {"name": name, "dtype": config["dtype"]}
        options |= {key.replace("_", "-"): about[key] for key in REPAIR if key in about}
        if isinstance(about.get("data"), str):
            options["data"] = _data(about)
        commands.append(_command(f"kvhub repair {shlex.quote(plain(linear))}", options))
    return "\n".join(commands)


def _refit_command(record: dict[str, Any], name: str) -> str | None:
    if "mapper" not in record:
        return None
    options = {
        "name": name,
        "data": _data(record),
        **{key: record[key] for key in ("sequences", "length", "stride", "strength")},
        **({"statistics": "FILE"} if record["method"] == "statistics" else {}),
    }
    return _command(f"kvhub refit {shlex.quote(plain(record['mapper']))}", options)


def evaluate_command(config: dict[str, Any], report: dict[str, Any], name: str) -> str | None:
    """The `kvhub evaluate` that makes the figures of a report; None if none does."""
    about, calibration = report["provenance"], config["calibration"]
    sequences, protocol = about.get("sequences"), about.get("protocol", {})
    if not isinstance(about.get("data"), str) or "exact_prefix" not in protocol:
        return None
    options = {
        "sequences": sequences + about["skipped_sequences"],
        "exact-prefix": protocol["exact_prefix"],
    }
    # Text that calibration has not seen of its own is the default.
    held_out = about["data"] == "stdlib-held-out" and calibration.get("data") == "stdlib"
    if not held_out and not about.get("start"):
        options["data"] = _data(about)
    return _command(f"kvhub evaluate {shlex.quote(plain(name))}", options)


def _data(about: dict[str, Any]) -> str:
    """A text as `--data` takes it, a dataset at the commit that was read."""
    commit = about.get("revision")
    return (
        f"{about['data']}@{commit}" if commit and about.get("kind") == "dataset" else about["data"]
    )


def _command(command: str, options: dict[str, Any]) -> str:
    lines = [command]
    for option, value in options.items():
        part = f"--{option} {shlex.quote(plain(value))}"
        if len(lines[-1]) + len(part) < 88:
            lines[-1] += f" {part}"
        else:
            lines.append(f"  {part}")
    return " \\\n".join(lines)
