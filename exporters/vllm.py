"""A mapper as a directory that vLLM serves from, with nothing to install.

What `write_directory` writes, and source.json and target.json for `--kv-transfer-config`.
"""

import json
from pathlib import Path

import torch
from kvhub.exporters.directory import PACKAGE, Engine, half_dtype, runtime_of, write_directory
from kvhub.exporters.plan import ExportPlan
from kvhub.exporters.serving import DTYPES, Settings

from kvhub.mapper_config import MapperConfig
from kvhub.spec import ModelSpec

__all__ = ["RUNTIME", "default_dtype", "export_vllm"]

RUNTIME = runtime_of(["vllm_args", "vllm_connector", "vllm_pool", "vllm_scheduler", "vllm_worker"])


def default_dtype(config: MapperConfig) -> torch.dtype:
    """Of the weights: the target's pools'."""
    dtype: torch.dtype = DTYPES[_pool_dtype(config.target)]
    return dtype


def export_vllm(plan: ExportPlan, path: Path) -> Path:
    """Write a directory for vLLM: see `write_directory`."""
    engine = Engine("vLLM", RUNTIME, "vllm_readme.md", _pool_dtype, _files)
    written: Path = write_directory(plan, path, engine)
    return written


def _files(plan: ExportPlan, settings: Settings) -> dict[str, str]:
    return {f"{side}.json": _transfer_config(side) for side in ("source", "target")}


def _transfer_config(side: str) -> str:
    content = {
        "kv_connector": "KVHubConnector",
        "kv_connector_module_path": f"{PACKAGE}.vllm_connector",
        "kv_role": "kv_both",
        # Else a request whose states are lost at the last moment would fail.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"role": side},
    }
    return json.dumps(content, indent=2) + "\n"


def _pool_dtype(spec: ModelSpec) -> str:
    """The model's, where vLLM's backends have pools of it."""
    if spec.dtype == "float32":  # a model for CPUs, where vLLM serves it as it is
        return spec.dtype
    half: str = half_dtype(spec)
    return half
