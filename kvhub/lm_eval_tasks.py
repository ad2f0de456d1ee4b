"""Harness tasks under target-alone, mapped and source-alone, with what the mapper retains."""

import logging
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvhub.errors import NetworkError, NotFoundError
from kvhub.generation import EXACT_PREFIX
from kvhub.lm_eval_adapter import BATCH_SIZE, SETTINGS, HandoffLM, Setting
from kvhub.mapper import KVMapper

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["CHANCE", "evaluate_tasks"]

logger = logging.getLogger(__name__)

# Accuracy of guessing.
CHANCE = {
    "arc_challenge": 0.25,
    "gsm8k": 0.0,
    "hellaswag": 0.25,
    "mmlu": 0.25,
    "winogrande": 0.5,
}


def evaluate_tasks(
    mapper: KVMapper,
    source_model: "PreTrainedModel",
    target_model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    tasks: str | Sequence[str | Mapping[str, Any]],
    *,
    settings: Sequence[Setting] = SETTINGS,
    limit: float | None = None,
    num_fewshot: int | None = None,
    exact_prefix: int = EXACT_PREFIX,
    max_length: int | None = None,
    batch_size: int = BATCH_SIZE,
    chance: Mapping[str, float] | None = None,
    **harness_options: Any,
) -> dict[str, Any]:
    """Run tasks of the harness in several settings and compare them.

    Parameters
    ----------
    mapper, source_model, target_model, tokenizer
        As for `HandoffLM`.
    tasks
        Names, task files or task configs, as the harness takes them.
    settings
        Of `SETTINGS`; retention needs `mapped` and `target_alone`.
    limit
        Documents per task, or a share of them if below 1.
    num_fewshot
        Examples in front of each question; None: the task's own number.
    exact_prefix, max_length, batch_size
        As for `HandoffLM`.
    chance
        Accuracy of guessing by task, beyond and before those in `CHANCE`.
    harness_options
        Passed to `lm_eval.simple_evaluate`, for example `task_manager` or `apply_chat_template`.

    Returns
    -------
    results
        JSON-able, by task and group of tasks:

        - `samples` (None for a group) and `chance` (None where unknown);
        - `settings`: the harness' metrics by setting, None where it has no number;
        - `retention`: mapped / target alone, of each metric of which more is better;
        - `floor_normalized_retention`: (mapped - chance) / (target alone - chance); None where
          chance is unknown or the target is not above it by 1.96 standard errors.

    Raises
    ------
    UsageError
        A setting is unknown, or see `HandoffLM`.
    NotFoundError
        A task is unknown.
    NetworkError
        The harness cannot reach a task's data.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    options = {"log_samples": False, **harness_options}
    models = {
        setting: HandoffLM(
            mapper,
            source_model,
            target_model,
            tokenizer,
            setting=setting,
            exact_prefix=exact_prefix,
            max_length=max_length,
            batch_size=batch_size,
        )
        for setting in settings
    }
    manager = options.pop("task_manager", None) or TaskManager()
    wanted = [tasks] if isinstance(tasks, str) else list(tasks)
    unknown = [
        task
        for task in wanted
        if isinstance(task, str) and task not in manager.all_tasks and not Path(task).is_file()
    ]
    if unknown or not wanted:
        raise NotFoundError(
            f"The harness has no task {', '.join(unknown) or 'without a name'}.",
            "See the tasks with: lm_eval ls tasks",
        )
    outputs = {}
    for setting, model in models.items():
        try:
            outputs[setting] = simple_evaluate(
                model=model,
                tasks=[task if isinstance(task, str) else dict(task) for task in wanted],
                num_fewshot=num_fewshot,
                limit=limit,
                task_manager=manager,
                **options,
            )
        except ConnectionError as error:
            raise NetworkError(
                f"The data of {', '.join(map(str, wanted))} cannot be had: {error}",
                "Go online, unset HF_HUB_OFFLINE, or name tasks whose data is on this machine.",
            ) from error
    return {
        task: _compared(task, outputs, {**CHANCE, **(chance or {})})
        for task in next(iter(outputs.values()), {"results": {}})["results"]
    }


def _compared(
    task: str, outputs: Mapping[Setting, Mapping[str, Any]], chances: Mapping[str, float]
) -> dict[str, Any]:
    """One task's entry in what `evaluate_tasks` returns."""
    first = next(iter(outputs.values()))
    metrics = {
        setting: {
            name: _number(value)
            for name, value in output["results"][task].items()
            if "," in name  # "metric,filter"; the rest are names and counts
        }
        for setting, output in outputs.items()
    }
    chance = _chance(task, first, chances)
    mapped, target = metrics.get("mapped", {}), metrics.get("target_alone", {})
    more_is_better = first["higher_is_better"].get(task, {})
    compared = [
        name for name in mapped if name in target and more_is_better.get(name.split(",")[0]) is True
    ]
    samples = first["n-samples"].get(task)
    return {
        "samples": None if samples is None else int(samples["effective"]),
        "chance": chance,
        "settings": metrics,
        "retention": {name: _share(mapped[name], target[name], 0.0, 0.0) for name in compared},
        "floor_normalized_retention": {
            name: _share(mapped[name], target[name], chance, 1.96 * _stderr(target, name))
            for name in compared
        },
    }


def _chance(task: str, output: Mapping[str, Any], chances: Mapping[str, float]) -> float | None:
    """Accuracy of guessing in a task; in a group if all its tasks agree."""
    if task in chances:
        return chances[task]
    config = output["configs"].get(task, {})
    if config.get("dataset_path") == "cais/mmlu" and config["output_type"] == "multiple_choice":
        return chances["mmlu"]
    parts = output["group_subtasks"].get(task, [])
    found = {_chance(part, output, chances) for part in parts}
    return found.pop() if len(found) == 1 else None


def _share(
    mapped: float | None, target: float | None, floor: float | None, noise: float
) -> float | None:
    if mapped is None or target is None or floor is None or target - floor <= noise:
        return None
    return (mapped - floor) / (target - floor)


def _stderr(metrics: Mapping[str, float | None], name: str) -> float:
    """A metric's standard error, 0 where the harness has none."""
    metric, kind = name.split(",", 1)
    return metrics.get(f"{metric}_stderr,{kind}") or 0.0


def _number(value: Any) -> float | None:
    """A float for JSON; the harness writes "N/A" where it has no number."""
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None
