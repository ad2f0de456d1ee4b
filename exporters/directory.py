"""A mapper as a directory that an engine serves from, with nothing to install, whatever the engine.

kvhub_runtime/        the modules that engines load: copies of kvhub's own, under another name
weights.safetensors   the mapper's tensors
kvhub.json            what they are, and the two models, as `load_deployment` reads it
settings.json         the operator's choices, all of them with their defaults
selftest.py           to be run before serving
README.md             how to serve

and the engine's own files for the source and the target.
"""

import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from kvhub.exporters.map_plan import RopeTable
from kvhub.exporters.plan import ExportPlan
from kvhub.exporters.selftest import check_weights
from kvhub.exporters.selftest_map import check_map, mapping_of
from kvhub.exporters.selftest_model import files_digest
from kvhub.exporters.serving import (
    FACTS,
    SCHEMA,
    SETTINGS,
    WEIGHTS,
    Deployment,
    Settings,
    load_deployment,
    load_plan,
    mapper_digest,
)
from safetensors.torch import save_file
from torch import Tensor

from kvhub import __version__
from kvhub.atomic import new_directory
from kvhub.errors import UsageError, VerificationError
from kvhub.spec import ModelSpec

__all__ = [
    "HALF",
    "PACKAGE",
    "Engine",
    "half_dtype",
    "runtime_of",
    "runtime_source",
    "write_directory",
]

PACKAGE = "kvhub_runtime"
# What every engine loads, and all that those modules import: the standard library, torch, numpy,
# safetensors, Triton and each other.
CORE = ("kvhub.errors", "kvhub.networks", "kvhub.products", "kvhub.rope")
SHARED = (
    *("chain", "entry", "loader", "map_plan", "paged", "paged_cache", "planner", "pool", "saver"),
    *("selftest", "selftest_map", "selftest_model", "serving", "staging", "status", "store"),
    *("store_files", "store_mooncake", "transfer", "triton_kernels", "triton_map"),
)
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EXPORTABLE = (torch.bfloat16, torch.float16, torch.float32)
TENSORS = ("key_weight", "value_weight", "key_bias", "value_bias")
SELFTEST = f'''"""Test this directory where it will serve: python selftest.py --help."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from {PACKAGE}.selftest import main  # noqa: E402

sys.exit(main(sys.argv[1:], HERE))
'''


@dataclass(frozen=True)
class Engine:
    """What differs between engines in an exported directory.

    Attributes
    ----------
    name
        As its users call it.
    runtime
        The modules that it loads, whole names.
    readme
        The template's file, in `exporters/`.
    pool_dtype
        Of the pool of a model.
    files
        Its own files, of a plan and the settings: contents by name.
    """

    name: str
    runtime: tuple[str, ...]
    readme: str
    pool_dtype: Callable[[ModelSpec], str]
    files: Callable[[ExportPlan, Settings], dict[str, str]]


def runtime_of(modules: Sequence[str]) -> tuple[str, ...]:
    """All modules of a runtime, with an engine's own ones of `exporters/`."""
    return (*CORE, *(f"kvhub.exporters.{name}" for name in sorted([*SHARED, *modules])))


def half_dtype(spec: ModelSpec) -> str:
    """The model's dtype, where that is half precision."""
    return spec.dtype if spec.dtype in HALF else "bfloat16"


def write_directory(plan: ExportPlan, path: Path, engine: Engine) -> Path:
    """Write a directory, read it back, and test it.

    Parameters
    ----------
    plan
        Its dtype is that of weights and products: bfloat16 or float16, or float32, which Triton's
        kernels do not take, so that plain torch maps.
    path
        The directory to make; after an error it is not there.
    engine
        Whose.

    Returns
    -------
    path
        Of the directory. Equal plans give equal bytes.

    Raises
    ------
    UsageError
        The plan is float64, or it is unknown which weights or tokenizer a model has.
    ConflictError
        Something is at `path` already.
    VerificationError
        What was written is not the mapper, or does not map as it.
    """
    if plan.dtype not in EXPORTABLE:
        raise UsageError(
            f"{engine.name} takes {', '.join(map(_name, EXPORTABLE))}; found {_name(plan.dtype)}.",
            "Choose one with --dtype, or for the plan with make_plan(mapper, dtype=...).",
        )
    sides = {side: _side(plan, side) for side in ("source", "target")}
    settings = Settings(
        source_kv_dtype=engine.pool_dtype(plan.config.source),
        target_kv_dtype=engine.pool_dtype(plan.config.target),
    )
    with new_directory(path) as directory:
        _write_runtime(directory / PACKAGE, engine.runtime)
        save_file(
            {name: getattr(plan, name).cpu() for name in TENSORS}
            | {name: tensor.cpu() for name, tensor in plan.repair.items()},
            directory / WEIGHTS,
            metadata={"format": "pt"},
        )
        facts = _facts(plan, sides, directory / WEIGHTS)
        written = {
            FACTS: _json(facts),
            SETTINGS: _json(asdict(settings)),
            **engine.files(plan, settings),
            "selftest.py": SELFTEST,
            "README.md": _readme(plan, facts, settings, engine.readme),
        }
        for name, text in written.items():
            (directory / name).write_text(text, encoding="utf-8")
        # Of the exported settings, whatever the environment of this process names.
        deployment = replace(load_deployment(directory), settings=settings)
        _require_equal(plan, deployment)
        check_weights(deployment)
        mapping = mapping_of(plan, settings.workspace_bytes, kernels=False)
        check_map(plan, settings, mapping)
    return path


def runtime_source(module: str, runtime: Sequence[str]) -> str:
    """The source of a module of a runtime as it is exported: its own kind imported as `PACKAGE`.

    Raises
    ------
    VerificationError
        It imports something of kvhub that is not exported.
    """
    package, _, name = module.rpartition(".")
    text = files(package).joinpath(f"{name}.py").read_text(encoding="utf-8")
    for of in ("kvhub.exporters", "kvhub"):
        names = "|".join(
            name for found, _, name in (item.rpartition(".") for item in runtime) if found == of
        )
        text = re.sub(rf"\b{re.escape(of)}\.({names})\b", rf"{PACKAGE}.\1", text)
    text = re.sub(r"\bfrom kvhub\.exporters import\b", f"from {PACKAGE} import", text)
    exported = {f"{PACKAGE}.{other.rpartition('.')[2]}" for other in runtime}
    for imported in _imports(text):
        if imported.split(".")[0] in ("kvhub", PACKAGE) and imported not in exported:
            raise VerificationError(
                f"{module} imports {imported}; expected only what is exported with it.",
                "Add it to what the engine's runtime_of(...) is given, or do without it.",
            )
    return text


def _imports(source: str) -> Iterator[str]:
    """The modules that a source imports, a module named by its package included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if module in ("kvhub", "kvhub.exporters", PACKAGE):
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def _write_runtime(directory: Path, runtime: Sequence[str]) -> None:
    directory.mkdir()
    text = f'"""Of kvhub {__version__}: what an engine loads."""\n\n__version__ = "{__version__}"\n'
    (directory / "__init__.py").write_text(text, encoding="utf-8")
    for module in runtime:
        file = directory / f"{module.rpartition('.')[2]}.py"
        file.write_text(runtime_source(module, runtime), encoding="utf-8")


def _side(plan: ExportPlan, side: str) -> dict[str, Any]:
    """One of the models, as `Side` has it, and where its revision is from."""
    spec: ModelSpec = getattr(plan.config, side)
    rope: RopeTable = getattr(plan, f"{side}_rope")
    if not spec.model_id or spec.tokenizer_digest is None:
        missing = "tokenizer" if spec.model_id else "name"
        raise UsageError(
            f"The mapper does not say the {side}'s {missing}, which its cache entries depend on.",
            "Fit it with specs that were read from the models: ModelSpec.from_pretrained(...).",
        )
    revision, origin = _revision(spec, side)
    return {
        "model": spec.model_id,
        "revision": revision,
        "revision_from": origin,
        "tokenizer_digest": spec.tokenizer_digest,
        "num_layers": spec.num_layers,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rope": {
            "inv_freq": rope.inv_freq.tolist(),
            "attention_scaling": rope.attention_scaling,
            "rotary_dim": rope.rotary_dim,
            "interleaved": rope.interleaved,
        },
    }


def _revision(spec: ModelSpec, side: str) -> tuple[str, str]:
    """A name of exactly a model's weights, and where it is from."""
    if spec.revision:
        return spec.revision, "the mapper, or who exported it"
    model = Path(spec.model_id)
    if model.is_dir():
        return files_digest(model), "the files that lay there when this was exported"
    raise UsageError(
        f"The mapper does not say which weights of {spec.model_id} its {side} is: expected a "
        "commit, or the model's directory of that name here, to digest its files.",
        f"Run from where {spec.model_id} lies, or say it: --{side}-revision COMMIT.",
    )


def _facts(plan: ExportPlan, sides: dict[str, Any], weights: Path) -> dict[str, Any]:
    config = plan.config.to_dict()
    kept = ("selection_method", "ridge", "weighting", "calibration")
    with weights.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(2**24):
            digest.update(block)
    facts = {
        "schema": SCHEMA,
        "kvhub_version": __version__,
        "mapper": {name: config[name] for name in kept},
        "heads": plan.heads,
        "groups": plan.groups,
        "top_k": plan.top_k,
        "gather": plan.gather.tolist(),
        "dtype": _name(plan.dtype),
        "weights_sha256": digest.hexdigest(),
        **sides,
    }
    if plan.repaired:
        facts["repaired"] = {kind: list(layers) for kind, layers in plan.repaired.items()}
    return {**facts, "digest": mapper_digest(facts)}


def _readme(plan: ExportPlan, facts: dict[str, Any], settings: Settings, template: str) -> str:
    values = {
        "version": __version__,
        "digest": facts["digest"],
        "heads": plan.heads,
        "top_k": plan.top_k,
        "dtype": facts["dtype"],
        "size": f"{plan.size_bytes:,}",
        "kernels": _kernels(plan),
        "source_kv_dtype": settings.source_kv_dtype,
        "target_kv_dtype": settings.target_kv_dtype,
    }
    for side in ("source", "target"):
        values |= {f"{side}_{name}": facts[side][name] for name in ("revision_from", "revision")}
        values[side] = facts[side]["model"]
        spec: ModelSpec = getattr(plan.config, side)
        values[f"{side}_dtype"] = spec.dtype
    text = files("kvhub.exporters").joinpath(template).read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), text)


def _kernels(plan: ExportPlan) -> str:
    if plan.repair:
        return "no, only plain torch: the mapper has networks beside its linear map"
    return "yes" if plan.dtype in HALF.values() else "no, only plain torch: float32"


def _require_equal(plan: ExportPlan, deployment: Deployment) -> None:
    """What was written is read back as it was."""
    found = load_plan(deployment, plan.device, 0)
    for item in fields(found):
        wanted, read = getattr(plan, item.name), getattr(found, item.name)
        pairs = [(wanted, read)]
        if item.name == "repair":
            pairs = [(sorted(wanted), sorted(read)), *((wanted[name], read[name]) for name in read)]
        if isinstance(wanted, RopeTable):
            pairs = [(getattr(wanted, of), getattr(read, of)) for of in vars(wanted)]
        for first, second in pairs:
            equal = torch.equal(first, second) if isinstance(first, Tensor) else first == second
            if not equal:
                raise VerificationError(
                    f"Expected {item.name} to be read as it was written, found something else.",
                    "Export again, to another disk.",
                )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
