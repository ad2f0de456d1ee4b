"""A mapper as a directory that TensorRT-LLM's containers serve from, with nothing to install.

What `write_directory` writes, and source.yaml and target.yaml for trtllm-serve.
"""

from pathlib import Path

import torch
from kvhub.exporters.directory import (
    HALF,
    PACKAGE,
    Engine,
    half_dtype,
    runtime_of,
    write_directory,
)
from kvhub.exporters.plan import ExportPlan
from kvhub.exporters.serving import Settings

from kvhub.mapper_config import MapperConfig
from kvhub.spec import ModelSpec

__all__ = ["RUNTIME", "default_dtype", "export_trtllm"]

RUNTIME = runtime_of(["trtllm_args", "trtllm_connector"])
TOKENS_PER_BLOCK = 32  # TensorRT-LLM's default
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
{target_only}"""
TARGET_ONLY = """  # kvhub allocates once the pool is there, out of the memory that this leaves:
  # about {needed:,} bytes on each rank, for the mapper and its workspace.
  free_gpu_memory_fraction: 0.8

# A load that fails twice fails the requests of its iteration. With the overlap scheduler any such
# error ends the engine, and wrong answers would be the only other way out.
disable_overlap_scheduler: true
"""


def default_dtype(config: MapperConfig) -> torch.dtype:
    """Of the weights: the target's pools', since Triton's kernels multiply in half precision."""
    dtype: torch.dtype = HALF[half_dtype(config.target)]
    return dtype


def export_trtllm(plan: ExportPlan, path: Path) -> Path:
    """Write a directory for TensorRT-LLM: see `write_directory`."""
    engine = Engine("TensorRT-LLM", RUNTIME, "trtllm_readme.md", half_dtype, _files)
    written: Path = write_directory(plan, path, engine)
    return written


def _files(plan: ExportPlan, settings: Settings) -> dict[str, str]:
    return {f"{side}.yaml": _yaml(plan, side, settings) for side in ("source", "target")}


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
        target_only=TARGET_ONLY.format(needed=needed) if side == "target" else "",
    )
