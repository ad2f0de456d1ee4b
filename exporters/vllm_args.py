"""What of vLLM's configuration must be so that no states can be wrong."""

from collections.abc import Callable
from typing import Any

from kvhub.exporters.serving import DTYPES, Deployment

from kvhub.errors import UsageError

__all__ = ["REQUIRED", "Options", "check_config", "get", "read_options"]

# Attribute of VllmConfig, what it must be, and why. What a version does not have is not checked.
REQUIRED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("parallel_config.pipeline_parallel_size", lambda found: found in (None, 1), "layers"),
    ("parallel_config.decode_context_parallel_size", lambda found: found in (None, 1), "tokens"),
    ("parallel_config.prefill_context_parallel_size", lambda found: found in (None, 1), "tokens"),
    ("speculative_config", lambda found: found is None, "draft layers may share the pool"),
    ("model_config.is_encoder_decoder", lambda found: not found, "it has caches of two kinds"),
    ("model_config.use_mla", lambda found: not found, "its cache is compressed"),
    ("cache_config.kv_sharing_fast_prefill", lambda found: not found, "layers are left out"),
    ("kv_transfer_config.is_kv_producer", lambda found: found in (None, True), "states are saved"),
)
SIDES = ("source", "target")


class Options:
    """What `kv_connector_extra_config` says: where the directory is, and which of the two models.

    Raises
    ------
    UsageError
        Something else is said, or the side is not.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        unknown = sorted({*found} - {"directory", "role", "settings"})
        if unknown or found.get("role") not in SIDES:
            raise UsageError(
                "kv_connector_extra_config must have role = source or target and may have "
                f"directory and settings; found {found}.",
                "Start from source.json or target.json of the exported directory.",
            )
        self.directory: str | None = found.get("directory")
        self.maps = found["role"] == "target"
        self.settings: dict[str, Any] = found.get("settings") or {}


def read_options(config: Any) -> Options:
    """Those of an engine's `VllmConfig`."""
    return Options(dict(config.kv_transfer_config.kv_connector_extra_config or {}))


def check_config(config: Any, cache: Any, deployment: Deployment, *, maps: bool) -> int:
    """Refuse a configuration of the engine in which states could be wrong.

    Parameters
    ----------
    config, cache
        Its `VllmConfig` and `KVCacheConfig`.
    deployment
        What was exported.
    maps
        Whether it is the target.

    Returns
    -------
    tokens_per_block
        Of the engine's pool.

    Raises
    ------
    UsageError
        Something is set, or missing, that this connector cannot serve with.
    """
    for path, allowed, reason in REQUIRED:
        if not allowed(get(config, path)):
            _refuse(f"{path} = {get(config, path)!r}: {reason}")
    policy = get(config, "kv_transfer_config.kv_load_failure_policy")
    if maps and policy != "recompute":
        _refuse(f"kv_load_failure_policy = {policy!r}: a request whose states are lost would fail")
    settings = deployment.settings
    side, ranks, dtype = (
        ("target", settings.target_tp, settings.target_kv_dtype)
        if maps
        else ("source", settings.source_tp, settings.source_kv_dtype)
    )
    found = get(config, "parallel_config.tensor_parallel_size") or 1
    if found != ranks:
        _refuse(f"tensor_parallel_size = {found}: {side}_tp of both engines' settings is {ranks}")
    groups = cache.kv_cache_groups
    spec = groups[0].kv_cache_spec
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    if len(groups) != 1 or window or not hasattr(spec, "num_kv_heads"):
        _refuse(f"{len(groups)} kinds of layers, {spec}: all must be of full attention")
    if spec.dtype != DTYPES[dtype]:
        _refuse(
            f"a cache of {spec.dtype}: {side}_kv_dtype of both engines' settings is {dtype}, and "
            "--dtype or --kv-cache-dtype must be the same"
        )
    return int(spec.block_size)


def get(value: Any, path: str) -> Any:
    """An attribute of an attribute; None where a version does not have it."""
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _refuse(found: str) -> None:
    raise UsageError(
        f"kvhub cannot serve with {found}.", "Start from the commands in README.md there."
    )
