"""The commands that make and try mappers: parse, call, print."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvhub import console, tables
from kvhub.cli_options import (
    Device,
    Dtype,
    ExactPrefix,
    Heads,
    Json,
    LambdaScale,
    MapperArgument,
    Method,
    PolicyName,
    SourceModel,
    TargetModel,
    Weighting,
)
from kvhub.errors import QualityGateError, UsageError

__all__ = ["bench", "check", "env", "evaluate", "fit", "handoff", "recipes"]

EXACT_BUDGETS = (0, 1, 4, 16, 64)  # of the report's curve, in tokens


def recipes(as_json: Json = False) -> None:
    """List the built-in pairs.

    Example: kvhub recipes
    """
    from dataclasses import asdict

    from kvhub.recipe import list_recipes

    found = list_recipes()
    console.emit(
        {"recipes": [asdict(recipe) for recipe in found]},
        as_json,
        lambda: tables.show_recipes(found),
    )


def check(
    source: Annotated[str, typer.Argument(help="Model id or directory; or a recipe's name.")],
    target: Annotated[str | None, typer.Argument(help="Model id or directory.")] = None,
    heads: Annotated[
        Heads, typer.Option(help="Which source heads a target head reads.")
    ] = Heads.all,
    top_k: Annotated[int, typer.Option(help="Source layers per target layer.")] = 8,
    as_json: Json = False,
) -> None:
    """Say whether a pair can be mapped and what a mapper would weigh; loads no weights.

    Example: kvhub check Qwen/Qwen3-8B Qwen/Qwen3-32B
    """
    from dataclasses import asdict

    from kvhub.compatibility import compare_pair, require_pair
    from kvhub.estimates import estimate
    from kvhub.models import count_parameters
    from kvhub.pairs import read_spec
    from kvhub.recipe import load_recipe, locate_model

    if target is None:
        recipe = load_recipe(source)
        source, target = recipe.source, recipe.target
        top_k, heads = recipe.top_k, Heads(recipe.heads)
    specs = (read_spec(source), read_spec(target))
    decisions = compare_pair(*specs, heads.value)
    compatible = all(decision.verdict != "refuse" for decision in decisions)
    result: dict[str, Any] = {
        "source": source,
        "target": target,
        "compatible": compatible,
        "decisions": [asdict(decision) for decision in decisions],
    }
    found = None
    if compatible:
        parameters = count_parameters(locate_model(target))
        found = estimate(*specs, heads.value, top_k, parameters)
        result["estimate"] = found.to_dict()
    console.emit(result, as_json, lambda: tables.show_check(source, str(target), decisions, found))
    if not compatible:
        require_pair(*specs, heads.value)


def fit(
    recipe: Annotated[str | None, typer.Argument(help="A built-in recipe: kvhub recipes.")] = None,
    source: Annotated[str | None, typer.Option(help="Model id or directory.")] = None,
    target: Annotated[str | None, typer.Option(help="Model id or directory.")] = None,
    name: Annotated[str | None, typer.Option(help="The mapper's name in the local store.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="stdlib, english, a file or folder, or a dataset id ORG/NAME[:CONFIG]."),
    ] = None,
    sequences: Annotated[int | None, typer.Option(help="Calibration sequences.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    stride: Annotated[int | None, typer.Option(help="Use every n-th token.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Source layers per target layer.")] = None,
    heads: Annotated[Heads | None, typer.Option(help="Source heads a target head reads.")] = None,
    ridge_lambda: Annotated[float | None, typer.Option(help="Ridge penalty.")] = None,
    lambda_scale: Annotated[LambdaScale | None, typer.Option(help="Unit of the penalty.")] = None,
    weighting: Annotated[Weighting | None, typer.Option(help="How tokens count.")] = None,
    selection: Annotated[Method | None, typer.Option(help="How layers are selected.")] = None,
    align: Annotated[
        bool | None,
        typer.Option(
            help="Fit to what the target reads from its cache; default, if there are no statistics."
        ),
    ] = None,
    statistics: Annotated[
        Path | None, typer.Option(help="Save them here, or fit from them with no model loaded.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a mapper of this name.")] = False,
    as_json: Json = False,
) -> None:
    """Calibrate, select layers, fit, and save a mapper in the local store.

    Example: kvhub fit tiny-middle-to-large

    Example: kvhub fit --source Qwen/Qwen3-0.6B --target Qwen/Qwen3-1.7B --name mine --data my.jsonl
    """
    from dataclasses import fields

    from kvhub.fitting import FitPlan, fit_mapper
    from kvhub.recipe import load_recipe
    from kvhub.store import mapper_path

    settings: dict[str, Any] = {}
    if recipe is not None:
        known = load_recipe(recipe)
        known.locate_models()
        decided = {field.name for field in fields(FitPlan)}
        settings = {key: value for key, value in vars(known).items() if key in decided}
    given = {
        "name": name,
        "source": source,
        "target": target,
        "top_k": top_k,
        "heads": heads,
        "ridge_lambda": ridge_lambda,
        "lambda_scale": lambda_scale,
        "weighting": weighting,
        "selection": selection,
        "align": align,
        "data": data,
        "sequences": sequences,
        "length": length,
        "stride": stride,
    }
    explicit = {key: value for key, value in given.items() if value is not None}
    for key, value in explicit.items():
        settings[key] = value.value if isinstance(value, Enum) else value
    missing = [f"--{key}" for key in ("source", "target", "name") if key not in settings]
    if missing:
        raise UsageError(
            f"Expected a recipe, or --source, --target and --name; missing: {', '.join(missing)}.",
            "See the recipes with: kvhub recipes",
        )
    plan = FitPlan(
        **settings,
        statistics=statistics,
        dtype=dtype,
        device=device,
        overwrite=overwrite,
        explicit=frozenset(explicit),
    )
    mapper = fit_mapper(plan, console.track, console.say)
    if mapper is None:
        return
    result = {
        "name": plan.name,
        "path": str(mapper_path(plan.name)),
        "parameters": mapper.num_parameters,
        "size_bytes": mapper.size_bytes,
        "tokens": mapper.config.ridge["tokens"],
        "held_out_r2": mapper.config.quality["held_out_r2"],
        "selection": [list(layers) for layers in mapper.config.selection],
    }
    console.emit(result, as_json, lambda: tables.show_fit(plan.name, mapper))
    console.say(f"Saved in {result['path']}. Next: kvhub evaluate {plan.name}")


def evaluate(
    mapper: MapperArgument,
    data: Annotated[
        str | None, typer.Option(help="Text; default: what calibration has not seen of its own.")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Sequences to score.")] = 32,
    length: Annotated[int | None, typer.Option(help="Tokens each; default as calibrated.")] = None,
    exact_prefix: ExactPrefix = 4,
    exact_curve: Annotated[
        bool,
        typer.Option(
            "--exact-curve", help="Also with 0 to 64 tokens computed by the target; takes longer."
        ),
    ] = False,
    gate: Annotated[
        bool, typer.Option("--gate", help="Exit with 9 unless the mapper meets its gate.")
    ] = False,
    source: SourceModel = None,
    target: TargetModel = None,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Report how good a mapper is, beside target alone, source alone and no context.

    Example: kvhub evaluate tiny-middle-to-large

    Example: kvhub evaluate tiny-middle-to-large --data my-text.txt --gate
    """
    from kvhub.pipeline import evaluate_mapper

    report, path = evaluate_mapper(
        mapper,
        console.track,
        data=data,
        sequences=sequences,
        length=length,
        exact_prefix=exact_prefix,
        exact_budgets=EXACT_BUDGETS if exact_curve else (),
        dtype=dtype,
        device=device,
        source=source,
        target=target,
    )

    console.emit(report.to_dict(), as_json, lambda: tables.show_report(mapper, report))
    console.say(f"Report and plots are in {path}.")
    if gate and report.gate is not None and not report.gate.passed:
        failed = ", ".join(c.name for c in report.gate.failures)
        error = QualityGateError(
            f"{mapper} does not meet its gate: {failed}.",
            "Hand off with --policy gate, which lets the target read again, or fit on such text.",
        )
        # With --json the report is the one object on stdout.
        console.show_error(error, as_json=False)
        raise typer.Exit(error.exit_code)


def handoff(
    mapper: MapperArgument,
    prompt: Annotated[str | None, typer.Option(help="Text that the source has read.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="The same, from a file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="How much to write.")] = 48,
    exact_prefix: ExactPrefix = 4,
    exact_budget: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens that the target computes itself, chosen by what the source foretells; "
            "in place of --exact-prefix.",
        ),
    ] = None,
    policy: Annotated[
        PolicyName,
        typer.Option(
            help="Map always, if the gate is met, or if a probe of the prompt agrees too."
        ),
    ] = PolicyName.always,
    source: SourceModel = None,
    target: TargetModel = None,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt with the mapped cache, beside target alone and source alone.

    Example: kvhub handoff tiny-middle-to-large --prompt-file code.py

    Example: kvhub handoff tiny-middle-to-large --prompt-file code.py --policy probe
    """
    from dataclasses import asdict

    from kvhub.pipeline import compare_on_text

    if (prompt is None) == (prompt_file is None):
        raise UsageError("Give either --prompt or --prompt-file.")
    if prompt is None and prompt_file is not None:
        prompt = _read_text(prompt_file)
    found, texts = compare_on_text(
        mapper,
        prompt or "",
        max_new_tokens=max_new_tokens,
        exact_prefix=exact_prefix,
        exact_budget=exact_budget,
        source=source,
        target=target,
        dtype=dtype,
        device=device,
        policy=policy.value,
    )
    console.emit(
        {**asdict(found), "texts": texts},
        as_json,
        lambda: tables.show_comparison(found, texts),
    )


def bench(
    mapper: MapperArgument,
    lengths: Annotated[str, typer.Option(help="Context lengths in tokens.")] = "256,512,1024",
    repeats: Annotated[int, typer.Option(help="Timed rounds; the median counts.")] = 5,
    source: SourceModel = None,
    target: TargetModel = None,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Time the map against the target's prefill on this machine.

    Example: kvhub bench tiny-middle-to-large --lengths 256,1024
    """
    from kvhub.pipeline import bench_mapper

    try:
        tokens = [int(part) for part in lengths.split(",")]
    except ValueError as error:
        raise UsageError(
            f"--lengths must be whole numbers with commas between; found {lengths!r}.",
            "For example --lengths 256,1024",
        ) from error
    timings, predictions = bench_mapper(
        mapper,
        tokens,
        repeats,
        console.track,
        source=source,
        target=target,
        dtype=dtype,
        device=device,
    )
    console.emit(
        {
            "timings": [timing.to_dict() for timing in timings],
            "predictions": [prediction.to_dict() for prediction in predictions],
        },
        as_json,
        lambda: tables.show_timings(mapper, timings, predictions, repeats),
    )


def env(as_json: Json = False) -> None:
    """Show versions and hardware, for bug reports.

    Example: kvhub env --json
    """
    from kvhub.pipeline import environment

    found = environment()
    console.emit(found, as_json, lambda: console.table("", ("", "value"), list(found.items())))


def _read_text(path: Path) -> str:
    from kvhub.errors import NotFoundError

    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"No file {path}.", "Check --prompt-file.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text.", "Convert it first.") from error
