"""What of TensorRT-LLM's configuration must be so that no states can be wrong."""

from collections.abc import Callable
from typing import Any

from kvhub.exporters.serving import Deployment

from kvhub.errors import UsageError

__all__ = ["check_args", "get"]

# Attribute of llm_args, what it must be, and why. Not every version checks these itself.
REQUIRED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("pipeline_parallel_size", lambda found: found in (None, 1), "a rank has all layers"),
    ("context_parallel_size", lambda found: found in (None, 1), "a rank has all tokens"),
    ("max_beam_width", lambda found: found in (None, 1), "beams share blocks"),
    ("enable_attention_dp", lambda found: not found, "ranks have requests of their own"),
    ("speculative_config", lambda found: found is None, "draft layers may share the pool"),
    ("sparse_attention_config", lambda found: found is None, "blocks hold other things"),
    ("cache_transceiver_config", lambda found: found is None, "blocks come from elsewhere"),
    ("attn_backend", lambda found: found in (None, "TRTLLM"), "others order blocks differently"),
    ("backend", lambda found: found in (None, "pytorch"), "only it has connectors"),
    ("kv_cache_config.enable_block_reuse", lambda found: found is True, "else nobody asks us"),
    ("kv_cache_config.enable_partial_reuse", lambda found: not found, "prefixes end in blocks"),
    ("kv_cache_config.host_cache_size", lambda found: not found, "blocks move to the host"),
    (
        "kv_cache_config.max_attention_window",
        lambda found: not found,
        "states behind a window are others",
    ),
    (
        "scheduler_config.capacity_scheduler_policy",
        lambda found: found is None or str(found).endswith("GUARANTEED_NO_EVICT"),
        "a request may lose its blocks",
    ),
)


def check_args(args: Any, deployment: Deployment, *, maps: bool) -> None:
    """Refuse a configuration of the engine in which states could be wrong.

    Raises
    ------
    UsageError
        Something is set, or missing, that this connector cannot serve with.
    """
    for path, allowed, reason in REQUIRED:
        found = get(args, path)
        if not allowed(found):
            raise UsageError(
                f"kvhub cannot serve with {path} = {found!r}: {reason}.",
                "Start from the YAML of the exported directory.",
            )
    settings = deployment.settings
    ranks = settings.target_tp if maps else settings.source_tp
    found = get(args, "tensor_parallel_size") or 1
    if found != ranks:
        side = "target" if maps else "source"
        raise UsageError(
            f"The engine has tensor_parallel_size = {found}, settings.json says {ranks}.",
            f"Set {side}_tp in the settings of both engines.",
        )


def get(value: Any, path: str) -> Any:
    """An attribute of an attribute; None where a version does not have it."""
    for name in path.split("."):
        value = getattr(value, name, None)
    return value
