"""vLLM as far as the connector sees it, made of tests/vllm_interface.json: no more is there."""

import json
import sys
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

RECORD = json.loads(Path(__file__).with_name("vllm_interface.json").read_text())
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
BACKEND = "vllm.v1.attention.backends.cpu_attn"


def _body(name):
    """What the base class does there, as far as the connector relies on it."""
    if name == "__init__":

        def init(self, vllm_config, role, kv_cache_config):
            self._connector_metadata = None

        return init
    if name == "bind_connector_metadata":
        return lambda self, connector_metadata: setattr(
            self, "_connector_metadata", connector_metadata
        )
    if name == "clear_connector_metadata":
        return lambda self: setattr(self, "_connector_metadata", None)
    if name == "has_connector_metadata":
        return lambda self: self._connector_metadata is not None
    if name == "_get_connector_metadata":
        return lambda self: self._connector_metadata
    if RECORD["methods"][name] == "property":
        return property(lambda self: True)
    return lambda self, *arguments, **options: None


def _connector():
    members = {name: _body(name) for name in RECORD["methods"]}
    for name in RECORD["abstract"]:
        members[name] = abstractmethod(members[name])
    return type("KVConnectorBase_V1", (ABC,), members)


def record(kind, **values):
    """An object of one of the recorded dataclasses; what is not given is None."""
    fields = [(name, Any, field(default=None)) for name in RECORD["fields"][kind]]
    return make_dataclass(kind, fields)(**values)


def request(name, tokens, salt=None, **values):
    """A request with the recorded attributes only; `tokens` may grow."""
    known = {
        "request_id": name,
        "prompt_token_ids": list(tokens),
        "all_token_ids": tokens,
        "num_tokens": len(tokens),
        "cache_salt": salt,
        "mm_features": [],
        "skip_reading_prefix_cache": False,
        **values,
    }
    assert {*known} <= {*RECORD["request"]}
    return SimpleNamespace(**{**dict.fromkeys(RECORD["request"]), **known})


def output(new=(), cached=(), scheduled=None):
    """A `SchedulerOutput`.

    `new` are (name, blocks, computed); `cached` are (name, blocks, computed, resumed).
    """
    return record(
        "SchedulerOutput",
        scheduled_new_reqs=[
            record("NewRequestData", req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, blocks, computed in new
        ],
        scheduled_cached_reqs=record(
            "CachedRequestData",
            req_ids=[name for name, *_ in cached],
            new_block_ids=[blocks and (blocks,) for _, blocks, _, _ in cached],
            num_computed_tokens=[computed for _, _, computed, _ in cached],
            resumed_req_ids={name for name, _, _, resumed in cached if resumed},
        ),
        num_scheduled_tokens=scheduled,
    )


def config(directory, role, *, dtype=torch.float32, block=8, **changes):
    """A `VllmConfig` and a `KVCacheConfig`; changes of the former by dotted names."""
    found = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"directory": str(directory), "role": role},
            kv_load_failure_policy="recompute",
            is_kv_producer=True,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(),
        model_config=SimpleNamespace(use_mla=False, is_encoder_decoder=False),
        speculative_config=None,
    )
    for path, value in changes.items():
        *owners, name = path.split(".")
        owner = found
        for step in owners:
            owner = getattr(owner, step)
        setattr(owner, name, value)
    spec = SimpleNamespace(block_size=block, dtype=dtype, num_kv_heads=2, sliding_window=None)
    group = SimpleNamespace(kv_cache_spec=spec)
    return found, SimpleNamespace(kv_cache_groups=[group])


@contextmanager
def installed():
    """Make these modules importable, and give the connector's class."""
    base = ModuleType(BASE)
    base.KVConnectorBase_V1 = _connector()
    base.KVConnectorMetadata = type("KVConnectorMetadata", (ABC,), {})
    base.KVConnectorRole = Enum("KVConnectorRole", RECORD["roles"])
    backend = ModuleType(BACKEND)
    backend._get_attn_isa = lambda dtype, block_size, head_size=None, kv_cache_dtype=None: "vec"
    modules = {BASE: base, BACKEND: backend}
    for name in [*modules]:
        while name := name.rpartition(".")[0]:
            modules.setdefault(name, ModuleType(name))
    modules["vllm.distributed"].get_tensor_model_parallel_rank = lambda: 0
    own = "kvhub.exporters.vllm_connector"
    before = {name: sys.modules.get(name) for name in (*modules, own)}
    sys.modules.update(modules)
    sys.modules.pop(own, None)
    try:
        import kvhub.exporters.vllm_connector as connector

        yield SimpleNamespace(connector=connector, roles=base.KVConnectorRole, backend=backend)
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def pack(states):
    """A layer's cache as the CPU backend packs it, of `[2, blocks, heads, tokens, dim]`."""
    keys, values = states
    blocks, heads, tokens, dim = keys.shape
    memory = torch.stack([keys.transpose(2, 3).reshape(blocks, heads, -1), values.flatten(2)], 2)
    return memory.reshape(blocks, heads, tokens, 2 * dim).contiguous()
