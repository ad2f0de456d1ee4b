"""A stand-in for TensorRT-LLM's KvCacheConnectorManager: whom the executor asks for the connector.

After the class of that name at the commits that trtllm_api.py names. It makes the two halves of a
connector, calls them (the scheduler on rank 0, a worker on each rank, every call logged), turns
what is scheduled into a SchedulerOutput, and knows which transfers run in the background.
"""

import copy
import importlib
import pickle
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import trtllm_api as api
from trtllm_api import LlmRequest, Stream, Version
from trtllm_engine import Engine

KINDS = ("saving", "loading")


class Request:
    """One request; for tests the handle on it, for the connector hidden behind LlmRequest."""

    is_dummy_request = is_context_only_request = is_generation_only_request = False
    multimodal_hashes = multimodal_positions = multimodal_lengths = None
    kv_cache_retention_config = None
    llm_request_type = "CONTEXT_AND_GENERATION"

    def __init__(self, request_id: int, prompt: Sequence[int], max_new_tokens: int) -> None:
        self.request_id = request_id
        self.all_tokens = list(prompt)
        self.prompt_len = self.orig_prompt_len = len(prompt)
        self.max_new_tokens = max_new_tokens
        self.eos: frozenset[int] = frozenset()
        self.cache_salt: str | None = None
        self.cache_salt_id: int | None = None
        self.lora_task_id: int | None = None
        self.state = "CONTEXT_INIT"  # LOADING, GENERATION_IN_PROGRESS, _TO_COMPLETE, _COMPLETE
        self.context_current_position = 0
        self.prepopulated_prompt_len = 0
        self.num_connector_matched_tokens = 0
        self.finish_reason: str | None = None  # length, stop, cancelled, error
        self.error: str | None = None
        self.blocks: list[int] | None = None
        self.reserved = 0  # blocks it may need; 0 before it is admitted
        self.chunk = 0  # tokens of the prompt scheduled in this iteration
        self.kv_tokens = 0  # tokens that the KV manager has room for
        self.filled = 0  # tokens whose states a forward pass has computed
        self.produced = 0  # tokens sampled, the host may not know the last one yet
        self.device_token = -1
        self.cancelled = False
        self.stored = False  # the prompt is in the reuse tree

    def get_tokens(self, beam: int) -> list[int]:
        return list(self.all_tokens)

    def get_num_tokens(self, beam: int) -> int:
        return len(self.all_tokens)

    @property
    def tokens(self) -> list[int]:
        """What was generated."""
        return self.all_tokens[self.prompt_len :]

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed: matched locally or by the connector."""
        return self.prepopulated_prompt_len

    @property
    def external_tokens(self) -> int:
        return self.num_connector_matched_tokens

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def key(self) -> tuple[int | None, int | None]:
        return self.cache_salt_id, self.lora_task_id


class Manager:
    """The connector of a host, or of none: then nothing is called and nothing matches."""

    def __init__(self, version: Version, args: Any, connector: Any, ranks: int) -> None:
        self.version, self.ranks = version, range(ranks)
        self.calls: deque[tuple[int, str]] = deque(maxlen=100_000)
        self.streams = [Stream() for _ in self.ranks]
        self.scheduler: Any = None
        self.workers: list[Any] = []
        self.imported: str | None = None
        # What get_finished is to hear of, what it may return, what it has returned.
        self.new: dict[str, dict[int, Request]] = {kind: {} for kind in KINDS}
        self.pending = [{kind: {} for kind in KINDS} for _ in self.ranks]
        self.finished: list[dict[str, dict[int, Request]]] = copy.deepcopy(self.pending)
        self._seen: dict[int, list[int]] = {}  # tokens and blocks that the connector was told of
        self._external: dict[int, int] = {}
        self._output: Any = None
        if connector:
            self._construct(args, *connector)

    def _construct(self, args: Any, module: str, scheduler_name: str, worker_name: str) -> None:
        """Both classes at the same time, off the main thread, as in py_executor_creator.py."""
        self.imported = None if module in sys.modules else module
        loaded = importlib.import_module(module)
        scheduler, worker = getattr(loaded, scheduler_name), getattr(loaded, worker_name)

        def build(rank: int, kind: Any) -> Any:
            api.set_rank(rank)
            return kind(copy.deepcopy(args))

        with ThreadPoolExecutor(len(self.ranks) + 1) as threads:
            workers = [threads.submit(build, rank, worker) for rank in self.ranks]
            self.scheduler = threads.submit(build, 0, scheduler).result()
            self.workers = [future.result() for future in workers]
        if self.version.forward_callable:
            self._after_forward = self.on_workers("register_forward_pass_callable")
        else:
            self._after_forward = []

    def register(self, engine: Engine) -> None:
        """_maybe_init_kv_connector_manager of py_executor.py, after the checks."""
        self.engine = engine
        if not self.workers:
            return
        if self.version.layout and len(engine.groups) > 1:  # reject_flat_only_scheduler
            base = sys.modules[self.version.connector_module].KvCacheConnectorScheduler
            for name in ("request_finished", "update_state_after_alloc"):
                method = f"{name}_by_layer_group"
                if getattr(type(self.scheduler), method) is getattr(base, method):
                    raise NotImplementedError(f"several layer groups need {method}")
        for rank in self.ranks:
            if self.version.layout:
                layout = engine.layout(rank, self.version)
                self._call(rank, self.workers[rank], "register_kv_cache_layout", layout)
            else:
                pool = engine.unique_pool(rank)
                self._call(rank, self.workers[rank], "register_kv_caches", pool)
        if self.version.wait_for_initialization:
            self._on_scheduler("wait_for_initialization")

    def query(self, request: Request, local: int) -> int:
        """Return how many tokens the connector promises; they may be loaded in the background."""
        if not self.workers:
            return 0
        view = LlmRequest(request, self.version, python=bool(self.version.layout))
        count, in_background = self._on_scheduler("get_num_new_matched_tokens", view, local)
        if in_background and not count:
            raise RuntimeError("load_kv_async must be False when num_tokens is 0!")
        if in_background:
            self.new["loading"][request.request_id] = request
        self._external[request.request_id] = request.num_connector_matched_tokens = count
        return count

    def on_blocks(self, name: str, request: Request) -> Any:
        """Call a scheduler method that takes block ids, in the form that the version has."""
        if not self.workers:
            return False
        view, ids = LlmRequest(request, self.version, python=True), self._block_ids(request)
        if name == "request_finished":
            self._seen.pop(request.request_id, None)
        if self.version.layout:
            return self._on_scheduler(f"{name}_by_layer_group", view, self._by_group(ids))
        return self._on_scheduler(name, view, ids[0])

    def build_output(self, batch: Sequence[Request]) -> None:
        if not self.workers:
            return
        module = sys.modules[self.version.connector_module]
        self._output = module.SchedulerOutput()
        # A stable sort: prompts first.
        for request in sorted(batch, key=lambda request: request.state != "CONTEXT_INIT"):
            if request.request_id in self.new["loading"]:
                continue
            new = request.request_id not in self._seen
            data = module.RequestData(**self._data(request))
            requests = self._output.new_requests if new else self._output.cached_requests
            requests.append(data)
        self._external = {}

    def _data(self, request: Request) -> dict[str, Any]:
        tokens, blocks = self._seen.get(request.request_id, (0, 0))
        ids = [group[blocks:] for group in self._block_ids(request)]
        self._seen[request.request_id] = [len(request.all_tokens), len(request.blocks)]
        position, count = len(request.all_tokens) - 1, 1
        if request.state == "CONTEXT_INIT":
            position, count = request.context_current_position, request.chunk
            position -= self._external.get(request.request_id, 0)
        extra = {"cache_salt": request.cache_salt}
        if self.version.layout:
            extra["new_block_ids_by_layer_group"] = self._by_group(ids)
        return {
            "request_id": request.request_id,
            "new_tokens": request.all_tokens[tokens:],
            "new_block_ids": ids[0] if len(ids) == 1 else [],
            "computed_position": position,
            "num_scheduled_tokens": count,
        } | {name: extra[name] for name in self.version.request_fields if name in extra}

    def _block_ids(self, request: Request) -> list[list[int]]:
        """Per layer group, -1 where the window has passed a block (BAD_PAGE_INDEX)."""
        history = request.kv_tokens - 1
        if request.state == "CONTEXT_INIT":
            history = request.context_current_position
        ids = []
        for group in self.engine.groups:
            stale = max(0, (history + 1 - group.window) // self.engine.size) if group.window else 0
            slots = group.slots[request.blocks].tolist()
            ids.append([api.BAD_PAGE_INDEX] * len(slots[:stale]) + slots[stale:])
        return ids

    def _by_group(self, ids: list[list[int]]) -> Any:
        return dict(enumerate(ids)) if self.version.by_group == "dict" else ids

    def start_batch(self, batch: list[Request]) -> list[Request]:
        """Begin an iteration; return the batch without what is loaded in the background."""
        if not self.workers:
            return batch
        for request in self.new["loading"].values():
            request.state = "LOADING"  # DISAGG_GENERATION_TRANS_IN_PROGRESS
        metadata = self._on_scheduler("build_connector_meta", self._output)
        sent = pickle.dumps(metadata)
        for rank, worker in enumerate(self.workers):
            # A broadcast leaves the root with the object itself.
            received = pickle.loads(sent) if rank else metadata
            self._call(rank, worker, "bind_connector_meta", received)
            self._call(rank, worker, "start_load_kv", self.streams[rank])
        return [request for request in batch if request.state != "LOADING"]

    def before_layer(self, layer: int) -> None:
        self.on_workers("wait_for_layer_load", layer, streams=True)

    def after_layer(self, layer: int) -> None:
        self.on_workers("save_kv_layer", layer, streams=True)

    def end_forward(self) -> None:
        if not self.workers:
            return
        for function in filter(None, self._after_forward):
            function()
        self.on_workers("wait_for_save", streams=True)

    def in_transfer(self, request: Request | None = None) -> bool:
        """Whether anything, or `request`, is being saved or loaded in the background."""
        running = [
            other
            for stage in (self.new, *self.pending, *self.finished)
            for requests in stage.values()
            for other in requests.values()
        ]
        return bool(running) if request is None else request in running

    def get_finished(self) -> dict[str, list[Request]]:
        """Poll the workers; return the requests that every rank has reported."""
        if not self.workers:
            return {kind: [] for kind in KINDS}
        for rank, worker in enumerate(self.workers):
            for kind in KINDS:
                self.pending[rank][kind].update(self.new[kind])
            done = self._call(rank, worker, "get_finished", *(list(self.new[k]) for k in KINDS))
            for kind, ids in zip(KINDS, done, strict=True):
                for number in ids:  # KeyError for an id never handed out, or returned before
                    self.finished[rank][kind][number] = self.pending[rank][kind].pop(number)
        self.new = {kind: {} for kind in KINDS}
        return {
            kind: [
                [ended[kind].pop(number) for ended in self.finished][-1]
                for number in set.intersection(*(set(ended[kind]) for ended in self.finished))
            ]
            for kind in KINDS
        }

    def on_workers(self, name: str, *args: Any, streams: bool = False) -> list[Any]:
        return [
            self._call(rank, worker, name, *args, *([self.streams[rank]] if streams else ()))
            for rank, worker in enumerate(self.workers)
        ]

    def _on_scheduler(self, name: str, *args: Any) -> Any:
        return self._call(0, self.scheduler, name, *args)

    def _call(self, rank: int, target: Any, name: str, *args: Any) -> Any:
        self.calls.append((rank, name))
        api.set_rank(rank)
        return getattr(target, name)(*args)
