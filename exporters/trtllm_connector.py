"""The KV cache connector of TensorRT-LLM: what it calls, in the terms of planner and transfer.

Written against the public sources of 1.2.1, 1.3.0rc12 to rc28 and 1.4.0rc1 (PyTorch backend); it
has not run inside TensorRT-LLM. All that differs between these versions is in this file:

- where the base classes are, and what requests and their data show of a cache salt;
- `register_kv_caches` (one contiguous pool) or `register_kv_cache_layout` (strided regions);
- blocks as one list, or per layer group as a list or a dict.

A scheduler lives on rank 0, a worker on every rank; each is made on a thread that is not the
main one. An exception out of most of their methods would end the engine, so they contain it: the
request is then computed by the engine. Only `wait_for_save` raises, which fails the requests of
the iteration, where states that were promised are not there.
"""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from kvhub.exporters.planner import Arrival, Orders, Planner
from kvhub.exporters.pool import PagedPool
from kvhub.exporters.serving import DTYPES, load_deployment
from kvhub.exporters.staging import Stage
from kvhub.exporters.status import Status, contained
from kvhub.exporters.store import open_store
from kvhub.exporters.transfer import Transfer
from kvhub.exporters.trtllm_args import check_args, get

from kvhub.errors import IncompatiblePairError, UsageError

try:
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )
except ImportError:  # up to 1.3.0rc11
    from tensorrt_llm._torch.pyexecutor.kv_cache_connector import (
        KvCacheConnectorScheduler,
        KvCacheConnectorWorker,
    )

__all__ = ["SourceScheduler", "SourceWorker", "TargetScheduler", "TargetWorker"]

DIRECTORY_VARIABLE = "TLLM_KVHUB_CONFIG"
# As kv_cache_config.dtype has them.
NAMES = {
    torch.float32: ("float32",),
    torch.float16: ("float16",),
    torch.bfloat16: ("bfloat16",),
    torch.float8_e4m3fn: ("fp8",),
}


class _Scheduler(KvCacheConnectorScheduler):
    maps = False

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        deployment = load_deployment(_directory())
        check_args(llm_args, deployment, maps=self.maps)
        settings = deployment.settings
        self.status = Status(settings.status_file)
        self.store = open_store(settings.store)
        stage = Stage(self.store, settings.staging_path, settings.staging_bytes, self.status)
        self.planner = Planner(
            deployment,
            stage,
            self.status,
            maps=self.maps,
            tokens_per_block=int(get(llm_args, "kv_cache_config.tokens_per_block") or 32),
        )
        # Where a request shows a hash of its salt only, these are the ones that it can be.
        plain = [tenant for tenant in settings.tenants if tenant is not None]
        salted = [deployment.salt(tenant) for tenant in settings.tenants] if self.maps else []
        self.salts = _salt_ids([*plain, *salted])

    @contained(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        tokens = list(request.get_tokens(0))
        salt, unsupported = self._salt(request)
        arrival = Arrival(request.request_id, tokens, salt, unsupported or _unsupported(request))
        return self.planner.offer(arrival, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Nothing: the scheduler's output names all blocks, on every version."""

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids: Any) -> None:
        """Nothing, as above."""

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        orders = Orders()
        if not self._fill(orders, scheduler_output):
            # Promised states that are not loaded must fail their request, whatever went wrong.
            self.planner.lose(orders)
        return orders

    @contained(lambda: False)
    def _fill(self, orders: Orders, scheduler_output: Any) -> bool:
        if scheduler_output is None:
            return True
        self.planner.next_iteration()
        done = [self._schedule(data, orders, True) for data in scheduler_output.new_requests]
        done += [self._schedule(data, orders, False) for data in scheduler_output.cached_requests]
        return all(done)

    @contained(lambda: False)
    def _schedule(self, data: Any, orders: Orders, new: bool) -> bool:
        self.planner.scheduled(
            data.request_id,
            new=new,
            new_tokens=data.new_tokens,
            new_blocks=_blocks(data),
            computed=data.computed_position,
            scheduled=data.num_scheduled_tokens,
            orders=orders,
        )
        return True

    # True is the safe answer: the workers say when they do not read a request's blocks any more.
    @contained(lambda: True)
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        finished: bool = self.planner.finished(request.request_id)
        return finished

    def request_finished_by_layer_group(self, request: Any, cache_block_ids: Any) -> bool:
        finished: bool = self.request_finished(request, [])
        return finished

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Nothing: what the engine computes after all, it writes over what was loaded."""

    @contained(lambda: None)
    def request_reset(self, request: Any) -> None:
        self.planner.forget(request.request_id)

    def _salt(self, request: Any) -> tuple[str | None, str]:
        """A request's salt, or why it cannot be known."""
        salt = getattr(request, "cache_salt", None)
        if salt is not None:
            return str(salt), ""
        number = getattr(request, "cache_salt_id", None)
        if number is None:
            shown = hasattr(request, "cache_salt") or hasattr(request, "cache_salt_id")
            return None, "" if shown else "this version does not show its salt"
        if number in self.salts:
            return self.salts[number], ""
        return None, "its salt is none of the settings' tenants"


class _Worker(KvCacheConnectorWorker):
    maps = False

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.deployment = load_deployment(_directory())
        check_args(llm_args, self.deployment, maps=self.maps)
        self.tokens_per_block = int(get(llm_args, "kv_cache_config.tokens_per_block") or 32)
        self.status = Status(self.deployment.settings.status_file)
        self.rank = _rank()
        self.transfer: Transfer | None = None

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Of V1: `[blocks, layers, 2, kv_heads * tokens_per_block * head_dim]`, contiguous."""
        self._register(kv_cache_tensor)

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Of V2: one layer group in one strided region, or it is refused.

        Raises
        ------
        IncompatiblePairError
            The model has several kinds of layers, or its blocks lie in several places.
        """
        regions = [region for group in layout.groups for region in group.regions]
        if len(layout.groups) != 1 or len(regions) != 1 or layout.groups[0].window_size:
            raise IncompatiblePairError(
                f"Expected one layer group without a window in one region, found "
                f"{len(layout.groups)} groups, {len(regions)} regions.",
                "Serve a model whose layers are all of full attention.",
            )
        found = getattr(layout, "dtype", None) or get(self._llm_args, "kv_cache_config.dtype")
        if found not in (self._dtype(), *NAMES.get(self._dtype(), ())):
            raise IncompatiblePairError(
                f"The pool's dtype is {found!r}; settings.json says {self._dtype()}.",
                "Set kv_cache_config.dtype to that: this version does not tell what auto means.",
            )
        self._register(_region(layout, regions[0], self._dtype()))

    def _register(self, pool: torch.Tensor) -> None:
        side = self.deployment.target if self.maps else self.deployment.source
        settings = self.deployment.settings
        heads = side.kv_heads // (settings.target_tp if self.maps else settings.source_tp)
        per_token = heads * side.head_dim
        found = pool.shape[3] // per_token if pool.dim() == 4 else 0
        if pool.dim() != 4 or pool.shape[2] != 2 or found * per_token != pool.shape[3]:
            raise IncompatiblePairError(
                f"The engine's pool is {list(pool.shape)}; expected [blocks, {side.num_layers}, 2, "
                f"{heads} heads * tokens per block * {side.head_dim}].",
                "Serve the model that the mapper was exported for.",
            )
        if found != self.tokens_per_block:
            raise IncompatiblePairError(
                f"The pool has {found} tokens per block, kv_cache_config.tokens_per_block is "
                f"{self.tokens_per_block}.",
                f"Set kv_cache_config.tokens_per_block to {found}.",
            )
        if self._dtype() == torch.float8_e4m3fn and pool.element_size() == 1:
            pool = pool.view(torch.float8_e4m3fn)
        if self.transfer is not None:  # registered again: the pool was made anew
            self.transfer.close()
        self.transfer = Transfer(
            self.deployment,
            open_store(settings.store),
            self.status,
            maps=self.maps,
            pool=PagedPool(
                # A view also where blocks are strided: only their numbers are divided up.
                pool.view(*pool.shape[:3], heads, found, side.head_dim),
                (self.rank * heads, (self.rank + 1) * heads),
                settings.chunk_tokens,
            ),
            rank=self.rank,
        )

    def _dtype(self) -> torch.dtype:
        settings = self.deployment.settings
        name = settings.target_kv_dtype if self.maps else settings.source_kv_dtype
        dtype: torch.dtype = DTYPES[name]
        return dtype

    def start_load_kv(self, stream: Any) -> None:
        """All of it here: under CUDA graphs the hooks of the layers are not called."""
        orders = self._orders()
        if orders.loads or orders.lost:
            self._load(orders, stream)

    @contained(lambda: None)  # wait_for_save fails what has not been loaded
    def _load(self, orders: Orders, stream: Any) -> None:
        with self._on(stream):
            self._transfer().load(orders)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: every layer was loaded in front of the first."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: whole blocks are saved after the last."""

    def wait_for_save(self, stream: Any) -> None:
        """Fail if what this iteration promised is not there; begin to save what it completed."""
        orders = self._orders()
        if orders.loads or orders.lost or orders.reused:
            self._transfer().check(orders)  # first: nothing of a failed request is to be saved
        if orders.saves:
            self._save(orders, stream)

    @contained(lambda: None)
    def _save(self, orders: Orders, stream: Any) -> None:
        with self._on(stream):
            self._transfer().save(orders.saves)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        self._waiting: list[int] = [*getattr(self, "_waiting", []), *finished_gen_req_ids]
        done = self._done()
        self._waiting = [name for name in self._waiting if name not in done]
        return done, []

    @contained(list)
    def _done(self) -> list[int]:
        waiting = self._waiting
        return [int(name) for name in self._transfer().saved(waiting)] if waiting else []

    def _orders(self) -> Orders:
        found = self.get_connector_meta()
        return found if isinstance(found, Orders) else Orders()

    def _on(self, stream: Any) -> Any:
        """Make an engine's stream the current one; there is none without CUDA."""
        on_gpu = self._transfer().pool.states.is_cuda
        return torch.cuda.stream(stream) if on_gpu else nullcontext()

    def _transfer(self) -> Transfer:
        if self.transfer is None:
            raise UsageError("The engine has not registered its KV cache.")
        return self.transfer


class SourceScheduler(_Scheduler):
    """Decides what the source's engine saves."""


class SourceWorker(_Worker):
    """Saves the source's states."""


class TargetScheduler(_Scheduler):
    """Decides what the target's engine is promised, and what it saves."""

    maps = True


class TargetWorker(_Worker):
    """Maps the source's states into the target's pool, and saves the target's own."""

    maps = True


def _directory() -> Path:
    named = os.environ.get(DIRECTORY_VARIABLE)
    return Path(named) if named else Path(__file__).resolve().parents[1]


def _rank() -> int:
    import tensorrt_llm

    return int(tensorrt_llm.mpi_rank())


def _salt_ids(salts: list[str]) -> dict[int, str]:
    """What 1.2 shows of a request's salt, for each that it may have."""
    try:
        from tensorrt_llm.inputs.utils import get_cache_salt_id
    except ImportError:
        return {}
    return {get_cache_salt_id(salt): salt for salt in salts}


def _unsupported(request: Any) -> str:
    """Why a request's states cannot be told by its tokens, or empty."""
    if getattr(request, "lora_task_id", None) is not None:
        return "LoRA"
    media = ("multimodal_hashes", "multimodal_positions", "multimodal_lengths")
    if any(getattr(request, name, None) for name in media):
        return "multimodal"
    for name in ("is_dummy_request", "is_generation_only_request"):
        found = getattr(request, name, False)
        if found() if callable(found) else found:
            return name
    return ""


def _blocks(data: Any) -> list[int]:
    """The new blocks of a request's data, in one list."""
    groups = getattr(data, "new_block_ids_by_layer_group", None)
    if not groups:
        return list(data.new_block_ids)
    (blocks,) = groups.values() if isinstance(groups, dict) else groups
    return list(blocks)


def _region(layout: Any, region: Any, dtype: torch.dtype) -> torch.Tensor:
    """A region as `[slots, layers, 2, numbers]`, checked: it may be strided.

    Raises
    ------
    IncompatiblePairError
        Its buffers are not key and value of one layer after the other.
    """
    layers = layout.groups[0].layer_ids
    found = [(buffer.layer_id, str(buffer.role)) for buffer in region.buffers]
    expected = [(layer, role) for layer in layers for role in ("key", "value")]
    if found != expected or list(layers) != list(range(len(layers))):
        raise IncompatiblePairError(
            f"A block holds {found[:4]}...; expected key and value of each layer in turn."
        )
    slots: torch.Tensor = region.as_tensor(dtype)
    return slots.view(len(slots), len(layers), 2, -1)
