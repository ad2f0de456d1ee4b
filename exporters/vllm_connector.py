"""The KV connector of vLLM: what it calls, in the terms of planner and transfer.

Written against and run inside vLLM 0.32.0 on CPUs (V1 engine, `KVConnectorBase_V1`). It differs
from TensorRT-LLM's in this:

- one class, made once with the scheduler's role and once per rank with the worker's;
- request ids are strings, and the question what a request may be promised is repeated as long as
  it waits, so the first answer is kept;
- a promise can be taken back: blocks whose load failed are named, and the engine computes them;
- a request that was preempted comes again, with its output as a part of its prompt;
- the pool is a tensor per layer.

What each role does is in `vllm_scheduler` and `vllm_worker`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kvhub.exporters.planner import Orders
from kvhub.exporters.serving import load_deployment
from kvhub.exporters.vllm_args import check_config, read_options
from kvhub.exporters.vllm_scheduler import Scheduler
from kvhub.exporters.vllm_worker import Worker
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvhub.errors import UsageError

__all__ = ["KVHubConnector"]


@dataclass
class Message(KVConnectorMetadata):
    """From the scheduler to the workers, of one iteration.

    Attributes
    ----------
    orders
        What the planner ordered.
    lost
        Blocks that were promised and could not be ordered.
    """

    orders: Orders = field(default_factory=Orders)
    lost: set[int] = field(default_factory=set)


class KVHubConnector(KVConnectorBase_V1):
    """Saves an engine's states and, in the target's, loads mapped ones.

    Named in `--kv-transfer-config`, as source.json and target.json of an exported directory do.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        options = read_options(vllm_config)
        path = Path(options.directory or Path(__file__).resolve().parents[1])
        deployment = load_deployment(path, options.settings)
        size = check_config(vllm_config, kv_cache_config, deployment, maps=options.maps)
        self.scheduler: Scheduler | None = None
        self.worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = Scheduler(deployment, maps=options.maps, tokens_per_block=size)
        else:
            self.worker = Worker(deployment, maps=options.maps, tokens_per_block=size)

    @property
    def requires_kv_delivery(self) -> bool:
        """Not so: what is not saved is computed once more."""
        return False

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler().match(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler().accept(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Message:
        return Message(*self._scheduler().order(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler().hear(set(connector_output.invalid_block_ids or ()))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler().finish(request)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker().register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """All of it here: under CUDA graphs the hooks of the layers are not called."""
        message = self._message()
        self._worker().load(message.orders, message.lost)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: every layer was loaded in front of the first."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole chunks are saved after the last layer."""

    def wait_for_save(self) -> None:
        self._worker().save(self._message().orders)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed: set[int] = self._worker().take_failed()
        return failed

    def shutdown(self) -> None:
        for part in (self.scheduler, self.worker):
            if part is not None:
                part.close()

    def _message(self) -> Message:
        found = self._get_connector_metadata() if self.has_connector_metadata() else None
        return found if isinstance(found, Message) else Message()

    def _scheduler(self) -> Scheduler:
        if self.scheduler is None:
            raise UsageError("This is a worker's connector.")
        return self.scheduler

    def _worker(self) -> Worker:
        if self.worker is None:
            raise UsageError("This is the scheduler's connector.")
        return self.worker
