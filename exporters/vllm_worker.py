"""A worker's role of the connector in vLLM: loads in front of a forward pass, saves behind it."""

from typing import Any

import torch
from kvhub.exporters.planner import Orders
from kvhub.exporters.serving import Deployment, heads_of
from kvhub.exporters.status import Status, contained
from kvhub.exporters.store import open_store
from kvhub.exporters.transfer import Transfer
from kvhub.exporters.vllm_pool import open_pool, require_packing

from kvhub.errors import UsageError

__all__ = ["Worker"]

QUIET = 2  # iterations that are on their way when an engine hears of a failed load


class Worker:
    """The connector in the worker's role, of one rank."""

    def __init__(self, deployment: Deployment, *, maps: bool, tokens_per_block: int) -> None:
        self.deployment, self.maps, self.size = deployment, maps, tokens_per_block
        self.status = Status(deployment.settings.status_file)
        self.transfer: Transfer | None = None
        self._failed: set[int] = set()
        self._quiet = 0

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's pool.

        Raises
        ------
        IncompatiblePairError
            It is none that is known.
        """
        settings, rank = self.deployment.settings, _rank()
        side, ranks = (
            (self.deployment.target, settings.target_tp)
            if self.maps
            else (self.deployment.source, settings.source_tp)
        )
        pool = open_pool(
            caches,
            heads=heads_of(side.kv_heads, ranks, rank),
            head_dim=side.head_dim,
            tokens_per_block=self.size,
            chunk_tokens=settings.chunk_tokens,
        )
        if pool.device.type == "cpu":
            require_packing(_isa(pool.dtype, self.size, side.head_dim))
        self.close()  # registered again: the pool was made anew
        self.transfer = Transfer(
            *(self.deployment, open_store(settings.store), self.status),
            maps=self.maps,
            pool=pool,
            rank=rank,
        )

    def load(self, orders: Orders, lost: set[int]) -> None:
        """Write what was promised; `lost` are blocks for which there is nothing to write."""
        self._failed |= lost
        if orders.loads and not self._load(orders):
            self._fail(orders, {load.name for load in orders.loads})

    def save(self, orders: Orders) -> None:
        """Find what could not be loaded; begin to save what this iteration completed."""
        if orders.loads:
            self._fail(orders, self._failures(orders))
        if self._failed:  # what was computed on top of these blocks is wrong until it is told
            self._quiet = QUIET + 1
        if self._quiet:
            self._quiet -= 1
            if orders.saves:
                self.status.count("not saved: a load failed", len(orders.saves))
        elif orders.saves:
            self._save(orders)

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        if self.transfer is not None:
            self.transfer.close()

    @contained(lambda: False)
    def _load(self, orders: Orders) -> bool:
        self._transfer().load(orders)
        return True

    def _failures(self, orders: Orders) -> set[int | str]:
        try:
            return {*self._transfer().failures(orders)}
        except Exception as error:  # whatever it was, nothing is known to be loaded
            self.status.failure("load", error)
            return {load.name for load in orders.loads}

    @contained(lambda: None)
    def _save(self, orders: Orders) -> None:
        transfer = self._transfer()
        transfer.save(orders.saves)
        stream = transfer.saver.stream
        if stream is not None:  # the engine may give the blocks away in the next iteration
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _fail(self, orders: Orders, names: set[Any]) -> None:
        for load in orders.loads:
            if load.name in names:
                first = load.pieces[0].start // self.size
                last = load.pieces[-1].start + self.deployment.settings.chunk_tokens
                self._failed.update(load.blocks[first : -(-last // self.size)])

    def _transfer(self) -> Transfer:
        if self.transfer is None:
            raise UsageError("The engine has not registered its KV cache.")
        return self.transfer


def _rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _isa(dtype: torch.dtype, tokens_per_block: int, head_dim: int) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, tokens_per_block, head_dim))
