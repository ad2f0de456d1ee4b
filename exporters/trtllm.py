"""A mapper as a directory that TensorRT-LLM's containers serve from, with nothing to install.

kvhub_runtime/        the modules that engines load: copies of kvhub's own, under another name
weights.safetensors   the mapper's tensors
kvhub.json            what they are, and the two models, as `load_deployment` reads it
settings.json         the operator's choices, all of them with their defaults
source.yaml           for trtllm-serve, and target.yaml
selftest.py           to be run before serving
README.md             how to do all that
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
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
from kvhub.mapper_config import MapperConfig
from kvhub.spec import ModelSpec

__all__ = ["PACKAGE", "RUNTIME", "default_dtype", "export_trtllm", "runtime_source"]

PACKAGE = "kvhub_runtime"
# All that engines load, and all that those modules import: the standard library, torch, numpy,
# safetensors, Triton and each other.
RUNTIME = (
    *("kvhub.errors", "kvhub.products", "kvhub.rope"),
    *(
        f"kvhub.exporters.{name}"
        for name in (
            *("chain", "entry", "loader", "map_plan", "paged", "planner", "pool", "saver"),
            *("selftest", "selftest_map", "selftest_model", "serving", "staging", "status"),
            *("store", "store_files", "store_mooncake", "transfer", "triton_kernels"),
            *("triton_map", "trtllm_args", "trtllm_connector"),
        )
    ),
)
CORE, EXPORTERS = (
    "|".join(name.rpartition(".")[2] for name in RUNTIME if name.rpartition(".")[0] == package)
    for package in ("kvhub", "kvhub.exporters")
)
RENAMED = (
    (re.compile(rf"\bkvhub\.exporters\.({EXPORTERS})\b"), rf"{PACKAGE}.\1"),
    (re.compile(rf"\bkvhub\.({CORE})\b"), rf"{PACKAGE}.\1"),
    (re.compile(r"\bfrom kvhub\.exporters import\b"), f"from {PACKAGE} import"),
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EXPORTABLE = (torch.bfloat16, torch.float16, torch.float32)
TENSORS = ("key_weight", "value_weight", "key_bias", "value_bias")
TOKENS_PER_BLOCK = 32  # TensorRT-LLM's default
SELFTEST = f'''"""Test this directory where it will serve: python selftest.py --help."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from {PACKAGE}.selftest import main  # noqa: E402

sys.exit(main(sys.argv[1:], HERE))
'''
YAML = """# {title}
# For trtllm-serve: --extra_llm_api_options, or --config where it has that.
# What here is not free to choose is checked when the engine starts. See README.md.

# The same on 1.2.1, 1.3rc and 1.4rc. Newer ones also know presets, which are not for this.
kv_connector_config:
  connector_module: {package}.trtllm_connector
  connector_scheduler_class: {side}Scheduler
  connector_worker_class: {side}Worker

# {lower}_tp in settings.json must say the same.
tensor_parallel_size: 1

# The others order a block's numbers differently.
attn_backend: TRTLLM

kv_cache_config:
  enable_block_reuse: true # else the engine asks no connector
  enable_partial_reuse: false # a prefix must end where a block does
  host_cache_size: 0 # blocks must not move to the host; 1.3rc and newer refuse it themselves
  tokens_per_block: {tokens_per_block} # any power of two; both engines may differ
  dtype: {dtype} # {lower}_kv_dtype in settings.json, which must say the same; never auto
{memory}"""
MEMORY = """  # kvhub allocates once the pool is there, out of the memory that this leaves free:
  # about {needed:,} bytes on each rank, for the mapper and its workspace.
  free_gpu_memory_fraction: 0.8
"""


def default_dtype(config: MapperConfig) -> torch.dtype:
    """Of the weights: the target's pools', since Triton's kernels multiply in half precision."""
    return DTYPES[_pool_dtype(config.target)]


def export_trtllm(plan: ExportPlan, path: Path) -> Path:
    """Write a directory, read it back, and test it.

    Parameters
    ----------
    plan
        Its dtype is that of weights and products: bfloat16 or float16, or float32, which Triton's
        kernels do not take, so that plain torch maps.
    path
        The directory to make; after an error it is not there.

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
            f"TensorRT-LLM takes {', '.join(map(_name, EXPORTABLE))}; found {_name(plan.dtype)}.",
            "Choose one with --dtype, or for the plan with make_plan(mapper, dtype=...).",
        )
    sides = {side: _side(plan, side) for side in ("source", "target")}
    config = plan.config
    settings = Settings(
        source_kv_dtype=_pool_dtype(config.source), target_kv_dtype=_pool_dtype(config.target)
    )
    with new_directory(path) as directory:
        _write_runtime(directory / PACKAGE)
        save_file(
            {name: getattr(plan, name).cpu() for name in TENSORS},
            directory / WEIGHTS,
            metadata={"format": "pt"},
        )
        facts = _facts(plan, sides, directory / WEIGHTS)
        _write_json(directory / FACTS, facts)
        _write_json(directory / SETTINGS, asdict(settings))
        for side in sides:
            text = _yaml(plan, side, settings)
            (directory / f"{side}.yaml").write_text(text, encoding="utf-8")
        (directory / "selftest.py").write_text(SELFTEST, encoding="utf-8")
        (directory / "README.md").write_text(_readme(plan, facts, settings), encoding="utf-8")
        # Of the exported settings, whatever the environment of this process names.
        deployment = replace(load_deployment(directory), settings=settings)
        _require_equal(plan, deployment)
        check_weights(deployment)
        mapping = mapping_of(plan, settings.workspace_bytes, kernels=False)
        check_map(plan, settings, mapping)
    return path


def runtime_source(module: str) -> str:
    """The source of a module of `RUNTIME` as it is exported: its own kind imported as `PACKAGE`.

    Raises
    ------
    VerificationError
        It imports something of kvhub that is not exported.
    """
    package, _, name = module.rpartition(".")
    text = files(package).joinpath(f"{name}.py").read_text(encoding="utf-8")
    for pattern, replacement in RENAMED:
        text = pattern.sub(replacement, text)
    exported = {f"{PACKAGE}.{other.rpartition('.')[2]}" for other in RUNTIME}
    for imported in _imports(text):
        if imported.split(".")[0] in ("kvhub", PACKAGE) and imported not in exported:
            raise VerificationError(
                f"{module} imports {imported}; expected only what is exported with it.",
                "Add it to RUNTIME in kvhub/exporters/trtllm.py, or do without it.",
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


def _write_runtime(directory: Path) -> None:
    directory.mkdir()
    text = f'"""Of kvhub {__version__}: what an engine loads."""\n\n__version__ = "{__version__}"\n'
    (directory / "__init__.py").write_text(text, encoding="utf-8")
    for module in RUNTIME:
        file = directory / f"{module.rpartition('.')[2]}.py"
        file.write_text(runtime_source(module), encoding="utf-8")


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
    return {**facts, "digest": mapper_digest(facts)}


def _yaml(plan: ExportPlan, side: str, settings: Settings) -> str:
    spec: ModelSpec = getattr(plan.config, side)
    # The kernels hold the keys' weights twice, in another order.
    needed = plan.size_bytes * 3 // 2 + 2 * settings.workspace_bytes
    return YAML.format(
        title=f"The {side}, {spec.model_id}",
        side=side.capitalize(),
        lower=side,
        package=PACKAGE,
        tokens_per_block=TOKENS_PER_BLOCK,
        dtype=getattr(settings, f"{side}_kv_dtype"),
        memory=MEMORY.format(needed=needed) if side == "target" else "",
    )


def _readme(plan: ExportPlan, facts: dict[str, Any], settings: Settings) -> str:
    values = {
        "version": __version__,
        "digest": facts["digest"],
        "heads": plan.heads,
        "top_k": plan.top_k,
        "dtype": facts["dtype"],
        "size": f"{plan.size_bytes:,}",
        "kernels": "yes" if plan.dtype in DTYPES.values() else "no, only plain torch: float32",
        "source_kv_dtype": settings.source_kv_dtype,
        "target_kv_dtype": settings.target_kv_dtype,
    }
    for side in ("source", "target"):
        values |= {f"{side}_{name}": facts[side][name] for name in ("revision_from", "revision")}
        values[side] = facts[side]["model"]
        spec: ModelSpec = getattr(plan.config, side)
        values[f"{side}_dtype"] = spec.dtype
    template = files("kvhub.exporters").joinpath("trtllm_readme.md").read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), template)


def _require_equal(plan: ExportPlan, deployment: Deployment) -> None:
    """What was written is read back as it was."""
    found = load_plan(deployment, plan.device, 0)
    for item in fields(found):
        wanted, read = getattr(plan, item.name), getattr(found, item.name)
        pairs = [(wanted, read)]
        if isinstance(wanted, RopeTable):
            pairs = [(getattr(wanted, of), getattr(read, of)) for of in vars(wanted)]
        for first, second in pairs:
            equal = torch.equal(first, second) if isinstance(first, Tensor) else first == second
            if not equal:
                raise VerificationError(
                    f"Expected {item.name} to be read as it was written, found something else.",
                    "Export again, to another disk.",
                )


def _pool_dtype(spec: ModelSpec) -> str:
    """Of an engine's pool: the model's, where that is half precision."""
    return spec.dtype if spec.dtype in DTYPES else "bfloat16"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
