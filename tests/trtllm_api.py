"""Fake `tensorrt_llm` modules: what a KV cache connector can import from each version.

Written from the public sources of NVIDIA/TensorRT-LLM, none of it copied. `[a]` is
`_torch/pyexecutor/kv_cache_connector.py` at 00fdcbf (1.1/1.2), `[b]` is
`_torch/pyexecutor/connectors/kv_cache_connector.py` at 035ab91 (main with KVCacheManagerV2), `[c]`
is `connectors/kv_cache_layout.py` at 0972960 (the Mooncake branch), whose sibling on main has a
`dtype` and `as_single_pool_tensor` in place of `gpu_pool_mapping_bytes`.
"""

import hashlib
import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from trtllm_blocks import (
    KvCacheBufferRef,
    KvCacheLayerGroupLayout,
    KvCacheRegion,
    LayoutWithDtype,
    LayoutWithMapping,
)

BAD_PAGE_INDEX = -1
LEGACY = "tensorrt_llm._torch.pyexecutor"
# What nanobind binds on the C++ LlmRequest, which is all that a connector may read.
BASE_ATTRIBUTES = frozenset(
    {
        *("request_id", "get_tokens", "get_num_tokens", "prompt_len", "orig_prompt_len"),
        *("lora_task_id", "multimodal_hashes", "multimodal_positions", "multimodal_lengths"),
        *("prepopulated_prompt_len", "context_current_position", "state", "llm_request_type"),
        *("is_dummy_request", "is_context_only_request", "is_generation_only_request"),
        "cache_salt_id",
    }
)
REQUEST_FIELDS = (
    "request_id",
    "new_tokens",
    "new_block_ids",
    "computed_position",
    "num_scheduled_tokens",
)
REFUSED_SINCE_13577 = frozenset(
    {"pipeline", "context", "beams", "attention_dp", "host_cache", "windows"}
)
_local = threading.local()


@dataclass(frozen=True)
class Version:
    """How one version of TensorRT-LLM differs from the others, for a connector."""

    name: str
    connectors_package: bool = True  # pyexecutor.connectors.*; else pyexecutor.* (PR 12626)
    request_fields: tuple[str, ...] = ()  # of RequestData, beyond the five of 1.1
    request_attributes: frozenset[str] = frozenset()  # of LlmRequest, beyond BASE_ATTRIBUTES
    layout: str | None = None  # V2: "dtype" or "mapping", the last field of KvCacheLayout
    by_group: str | None = None  # V2: block ids per layer group as a "list" or a "dict"
    # What start-up refuses. 1.2 knows "pipeline" (py_executor.py) and, in C++, "windows".
    refused: frozenset[str] = frozenset({"pipeline", "windows"})
    presets: bool = True  # KvCacheConnectorConfig.connector and .server_url
    forward_callable: bool = True  # since PR 8275
    wait_for_initialization: bool = True
    batched_add: bool = True  # add_sequence_batch: all queries before any update_state_after_alloc
    defers_cancel: bool = False  # has_pending_transfers in [b]; before, blocks are freed at once
    # releaseBlocks of V1 stores all but the last token under its key, computed or not ("TODO: get
    # the caller to mark tokens as filled", kvCacheManager.cpp).
    stores_unfilled: bool = True
    manager_v2: Any = False  # kv_cache_config.use_kv_cache_manager_v2; None: no such field

    @property
    def connector_module(self) -> str:
        middle = ".connectors" if self.connectors_package else ""
        return f"{LEGACY}{middle}.kv_cache_connector"


_SALTED = frozenset({"cache_salt", "kv_cache_retention_config"})
_MAIN = {
    "request_fields": ("block_hashes", "priorities", "cache_salt", "new_block_ids_by_layer_group"),
    "request_attributes": _SALTED | {"num_connector_matched_tokens"},
    "refused": REFUSED_SINCE_13577,
    "manager_v2": "auto",
}
_V2 = {"stores_unfilled": False, "defers_cancel": True, "manager_v2": True}
V1_2_1 = Version(
    "1.2.1",
    connectors_package=False,
    presets=False,
    wait_for_initialization=False,
    batched_add=False,
    manager_v2=None,
)
V1_3_0RC12 = Version(
    "1.3.0rc12",
    request_fields=("block_hashes", "priorities", "cache_salt"),
    request_attributes=_SALTED,
)
# The rest of `refused` holds on V2 too, but sliding windows become layer groups.
V1_3_0RC28 = Version(
    "1.3.0rc28",
    **{**_MAIN, **_V2, "refused": REFUSED_SINCE_13577 - {"windows"}},
    layout="dtype",
    by_group="list",
)
V1_4_0RC1 = Version("1.4.0rc1", **_MAIN, defers_cancel=True)
V1_4_MOONCAKE = Version(
    "1.4 (Mooncake branch)",
    **{**_MAIN, **_V2, "refused": REFUSED_SINCE_13577 - {"windows"}},
    layout="mapping",
    by_group="dict",
)
PRESETS = (V1_2_1, V1_3_0RC12, V1_3_0RC28, V1_4_0RC1, V1_4_MOONCAKE)


class Stream:
    """Stands for torch.cuda.Stream, which cannot be made without CUDA: everything is in order."""

    cuda_stream = 0
    device = torch.device("cpu")

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class LlmRequest:
    """A view on a request of the host that has the attributes of the version and no other.

    `python` is the subclass that the Python side of the executor holds. There,
    `is_generation_only_request` is a method (a comment in [b] says so); on the base class, which
    C++ hands to `get_num_new_matched_tokens` on V1, it is a property.
    """

    def __init__(self, request: Any, version: Version, python: bool) -> None:
        self._request, self._python = request, python
        self._names = BASE_ATTRIBUTES | version.request_attributes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._names:
            raise AttributeError(f"'LlmRequest' object has no attribute {name!r}")
        if name == "is_generation_only_request" and self._python:
            return lambda: False
        return getattr(self._request, name)


def get_cache_salt_id(cache_salt: str) -> int:
    """As tensorrt_llm.inputs.utils, which takes 8 bytes of BLAKE3; the stdlib has BLAKE2 only."""
    return int.from_bytes(hashlib.blake2b(cache_salt.encode(), digest_size=8).digest(), "little")


def layout_class(version: Version) -> type:
    return LayoutWithDtype if version.layout == "dtype" else LayoutWithMapping


def _data_classes(version: Version) -> tuple[type, type]:
    defaults: dict[str, Any] = {
        "block_hashes": list,
        "priorities": lambda: None,
        "cache_salt": lambda: None,
        "new_block_ids_by_layer_group": dict if version.by_group == "dict" else list,
    }
    fields: list[Any] = [(name, Any) for name in REQUEST_FIELDS]
    fields += [(n, Any, field(default_factory=defaults[n])) for n in version.request_fields]
    lists = [(n, list, field(default_factory=list)) for n in ("new_requests", "cached_requests")]
    module = {"namespace": {"__module__": version.connector_module}}  # so that they pickle
    return make_dataclass("RequestData", fields, **module), make_dataclass(
        "SchedulerOutput", lists, **module
    )


class _Worker(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object = None
        super().__init__()

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    def register_forward_pass_callable(self) -> Any:
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None: ...
    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...
    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...
    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...
    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...
    @abstractmethod
    def get_finished(self, finished_gen_req_ids: list, started_loading_req_ids: list) -> Any: ...


class _Scheduler(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        super().__init__()

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> object: ...
    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any: ...
    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...
    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...


def _register_layout(self: Any, layout: Any) -> None:
    tensor = getattr(layout, "as_single_pool_tensor", lambda: None)()
    if tensor is None:
        raise NotImplementedError("register_kv_cache_layout")
    self.register_kv_caches(tensor)


def _one_group(name: str) -> Any:
    def folded(self: Any, request: Any, groups: Any) -> Any:
        groups = list(groups.values()) if isinstance(groups, dict) else groups
        if len(groups) != 1:
            raise NotImplementedError(f"{name}_by_layer_group")
        return getattr(self, name)(request, groups[0])

    return folded


def _connector_classes(version: Version) -> tuple[type, type]:
    worker: dict[str, Any] = {}
    scheduler: dict[str, Any] = {}
    if version.wait_for_initialization:
        scheduler["wait_for_initialization"] = lambda self: None
    if "new_block_ids_by_layer_group" in version.request_fields:  # since PR 18762
        worker["register_kv_cache_layout"] = _register_layout
        for name in ("request_finished", "update_state_after_alloc"):
            scheduler[f"{name}_by_layer_group"] = _one_group(name)
    if version.by_group == "dict":
        scheduler["cancel_load"] = lambda self, request, start, end: None
        scheduler["request_reset"] = lambda self, request: None
    return type("KvCacheConnectorWorker", (_Worker,), worker), type(
        "KvCacheConnectorScheduler", (_Scheduler,), scheduler
    )


def make_llm_args(version: Version, connector: tuple[str, str, str] | None, **values: Any) -> Any:
    """Return TorchLlmArgs as `version` has them. A dot in a name leads into a nested config."""
    module, scheduler, worker = connector or (None, None, None)
    config = {
        "connector_module": module,
        "connector_scheduler_class": scheduler,
        "connector_worker_class": worker,
    }
    if version.presets:
        config |= {"connector": None, "server_url": None}
    cache = {
        "enable_block_reuse": True,
        "enable_partial_reuse": True,
        "copy_on_partial_reuse": True,
        "tokens_per_block": 32,
        "dtype": "auto",
        "host_cache_size": None,
        "max_attention_window": None,
        "free_gpu_memory_fraction": 0.9,
        "max_tokens": None,
    }
    if version.manager_v2 is not None:
        cache["use_kv_cache_manager_v2"] = version.manager_v2
    args = SimpleNamespace(
        model=None,
        tokenizer=None,
        revision=None,
        dtype="auto",
        backend="pytorch",
        attn_backend="TRTLLM",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        context_parallel_size=1,
        enable_attention_dp=False,
        max_beam_width=1,
        max_batch_size=2048,
        max_num_tokens=8192,
        max_seq_len=None,
        enable_chunked_prefill=False,
        disable_overlap_scheduler=False,
        cuda_graph_config=SimpleNamespace(max_batch_size=0),
        torch_compile_config=None,
        speculative_config=None,
        sparse_attention_config=None,
        cache_transceiver_config=None,
        enable_lora=False,
        lora_config=None,
        quant_config=SimpleNamespace(quant_algo=None, kv_cache_quant_algo=None),
        scheduler_config=SimpleNamespace(capacity_scheduler_policy="GUARANTEED_NO_EVICT"),
        kv_cache_config=SimpleNamespace(**cache),
        kv_connector_config=SimpleNamespace(**config) if connector else None,
    )
    for name, value in values.items():
        *parents, last = name.split(".")
        owner = args
        for parent in parents:
            owner = getattr(owner, parent)
        if not hasattr(owner, last):
            raise AttributeError(f"{version.name} has no {name}")  # StrictBaseModel
        setattr(owner, last, value)
    return args


def set_rank(rank: int) -> None:
    """Let `tensorrt_llm.mpi_rank` of this thread be `rank`: in truth each rank is a process."""
    _local.rank = rank


class _Installed:
    version: Version | None = None
    hosts = 0
    connector_class: type | None = None
    modules: dict[str, ModuleType | None]


def install(version: Version) -> None:
    """Put the modules of `version` into sys.modules; `uninstall` once for each `install`."""
    if _Installed.hosts and _Installed.version != version:
        raise RuntimeError(f"{_Installed.version} is installed, not {version}")
    _Installed.hosts += 1
    if _Installed.hosts > 1:
        return
    data, output = _data_classes(version)
    worker, scheduler = _connector_classes(version)
    contents: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {
            "__version__": version.name,
            "mpi_rank": lambda: getattr(_local, "rank", 0),
        },
        "tensorrt_llm.inputs.utils": {"get_cache_salt_id": get_cache_salt_id},
        "tensorrt_llm.bindings.internal.batch_manager": {"LlmRequest": LlmRequest},
        "tensorrt_llm.llmapi.llm_args": {"TorchLlmArgs": SimpleNamespace},
        version.connector_module: {
            "KvCacheConnectorWorker": worker,
            "KvCacheConnectorScheduler": scheduler,
            "RequestData": data,
            "SchedulerOutput": output,
        },
    }
    if version.layout:
        contents["tensorrt_llm.runtime.kv_cache_manager_v2"] = {"BAD_PAGE_INDEX": BAD_PAGE_INDEX}
        contents[f"{LEGACY}.connectors.kv_cache_layout"] = {
            "KvCacheBufferRef": KvCacheBufferRef,
            "KvCacheLayerGroupLayout": KvCacheLayerGroupLayout,
            "KvCacheLayout": layout_class(version),
            "KvCacheRegion": KvCacheRegion,
        }
    for name in list(contents):
        for end in range(1, name.count(".") + 1):
            contents.setdefault(".".join(name.split(".")[:end]), {})
    _Installed.version = version
    _Installed.modules = {name: sys.modules.get(name) for name in contents}
    for name in sorted(contents):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(contents[name], __path__=[])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])


def uninstall() -> None:
    _Installed.hosts -= 1
    if _Installed.hosts:
        return
    for name, module in _Installed.modules.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module
