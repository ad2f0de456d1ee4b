"""A stand-in for TensorRT-LLM's PyTorch executor, as far as a KV cache connector sees it.

TensorRT-LLM does not run here. This does what its public sources say the executor does around the
two connector classes: `_torch/pyexecutor/py_executor.py` (both loops, `_do_terminate_request`,
`_handle_errors`, `_forward_step`), `resource_manager.py` (`prepare_resources`, `update_resources`),
llmRequest.h and kvCacheManager.cpp, each in a revision of the 1.2 line; trtllm_api.py names those
of the connector's own files. The order of calls and their counts are those of
tests/integration/defs/llmapi/test_llm_api_connector.py at 00e9b8a.

Left out: pipeline and context parallelism, attention DP, beams, speculation, CUDA graphs (their
replay skips the hooks), host cache, LoRA weights, disaggregation, block hashes, and what V2 does
under memory pressure (pausing, replay, offers honoured in part). All ranks live in one process, so
a rank that raises ends the others too instead of leaving them in a collective. There is no CUDA:
`stream` is a trtllm_api.Stream, whose work is always done.
"""

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import trtllm_api as api
from trtllm_api import V1_2_1, Version
from trtllm_blocks import Blocks
from trtllm_engine import Chunk, Engine
from trtllm_manager import Manager, Request


class EngineDeadError(RuntimeError):
    """The event loop has ended: nothing is served any more."""


class Host:
    """An engine that serves `model`; `connector` is (module, scheduler class, worker class)."""

    def __init__(
        self,
        model: Any,
        version: Version = V1_2_1,
        connector: tuple[str, str, str] | None = None,
        *,
        tokens_per_block: int = 32,
        num_blocks: int = 128,
        tp_size: int = 1,
        max_num_tokens: int = 8192,
        max_batch_size: int = 256,
        chunked: bool = False,
        overlap: bool = False,
        dtype: torch.dtype = torch.float32,
        llm_args_overrides: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        values = {
            "kv_cache_config.tokens_per_block": tokens_per_block,
            "tensor_parallel_size": tp_size,
            "max_num_tokens": max_num_tokens,
            "max_batch_size": max_batch_size,
            "enable_chunked_prefill": chunked,
            "disable_overlap_scheduler": not overlap,
        } | (llm_args_overrides or {})
        self.version, self.size, self.overlap = version, tokens_per_block, overlap
        self.args = api.make_llm_args(version, connector, **values)
        self.reuse = self.args.kv_cache_config.enable_block_reuse
        self.dead: str | None = None
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self._previous: tuple[list[Request], dict[Request, int]] | None = None
        self._next_id = 1
        self._pinned: dict[int, list[int]] = {}
        shape = (tokens_per_block, tp_size, dtype, seed)
        self._imports = connector[0] if connector and connector[0] not in sys.modules else None
        self._closed = False
        api.install(version)
        try:
            if connector:
                self._check()
            self.manager = Manager(version, self.args, connector, tp_size)
            # How much memory a forward pass takes is measured without the connector.
            Engine(model, version, 2, *shape).forward([Chunk([1] * tokens_per_block, 0, [0, 1])])
            self.engine = Engine(model, version, num_blocks, *shape)
            self.manager.register(self.engine)
        except BaseException:
            self.close()
            raise
        self.calls = self.manager.calls  # (rank, name of the callback), in order
        partial = self.args.kv_cache_config.enable_partial_reuse
        self.blocks = Blocks(num_blocks, tokens_per_block, self.engine.copy_block, partial, seed)

    def _check(self) -> None:
        """What is refused by py_executor_creator.py, py_executor.py and, in C++, BlockManager."""
        args, cache = self.args, self.args.kv_cache_config
        if args.scheduler_config.capacity_scheduler_policy != "GUARANTEED_NO_EVICT":
            raise NotImplementedError("KV connector needs GUARANTEED_NO_EVICT")
        found = {
            "pipeline": args.pipeline_parallel_size > 1,
            "context": args.context_parallel_size > 1,
            "beams": args.max_beam_width > 1,
            "attention_dp": args.enable_attention_dp,
            "host_cache": bool(cache.host_cache_size),
            "windows": len(set(cache.max_attention_window or ())) > 1,
        }
        if refused := [name for name in found if found[name] and name in self.version.refused]:
            raise NotImplementedError(f"KV Cache Connector is not supported with {refused}")

    def close(self) -> None:
        """Take the fake modules away; a connector is imported anew by the next host."""
        if self._closed:
            return
        self._closed = True
        if self._imports:
            sys.modules.pop(self._imports, None)
        api.uninstall()

    def submit(
        self,
        tokens: Sequence[int],
        max_new_tokens: int,
        cache_salt: str | None = None,
        *,
        lora_task_id: int | None = None,
        eos: Sequence[int] = (),
    ) -> Request:
        if not tokens or max_new_tokens < 1:
            raise ValueError("give at least one token, and ask for one")
        if not self.args.enable_chunked_prefill and len(tokens) > self.args.max_num_tokens:
            raise ValueError("the prompt is longer than max_num_tokens")
        request = Request(self._next_id, tokens, max_new_tokens)
        if self._blocks_of(request) > len(self.blocks.refs):
            raise ValueError("the request needs more blocks than there are")
        self._next_id += 1
        request.cache_salt, request.lora_task_id = cache_salt, lora_task_id
        request.cache_salt_id = None if cache_salt is None else api.get_cache_salt_id(cache_salt)
        request.eos = frozenset(eos)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Seen after the next forward pass, as `_handle_canceled_requests` is."""
        if request in self.waiting:
            self.waiting.remove(request)
            request.finish_reason = "cancelled"
        request.cancelled = True

    def step(self) -> None:
        """Run one iteration of the event loop."""
        if self.dead:
            raise EngineDeadError(self.dead)
        try:
            self._iterate()
        except Exception as error:  # as _event_loop_wrapper: whatever it is, the loop has ended
            self.dead = f"{type(error).__name__}: {error}"
            for request in (*self.active, *self.waiting):
                request.finish_reason, request.error = "error", self.dead
            raise EngineDeadError(self.dead) from error

    def run_until_idle(self, drain: bool = True, limit: int = 10_000) -> None:
        """Step until nothing is left to do, with `drain` also until every transfer has ended.

        The real loop sleeps when it has no request, so that transfers end with the next request.
        """
        for _ in range(limit):
            busy = self.waiting or self.active or self._previous
            if not busy:
                if not (drain and self.manager.in_transfer()):
                    return
                time.sleep(0.001)  # threads of the connector end a transfer, not iterations
            self.step()
        raise TimeoutError(f"still busy after {limit} iterations")

    def count(self, name: str) -> int:
        """Return how often a callback was called, over all ranks."""
        return sum(called == name for _, called in self.manager.calls)

    def leaked_blocks(self) -> int:
        """Return how many blocks are referenced that no request and no pending save owns."""
        owned = [request.blocks or () for request in self.active] + list(self._pinned.values())
        return len(self.blocks.referenced.difference(*owned))

    # One iteration, in the order of _executor_loop and _executor_loop_overlap.

    def _iterate(self) -> None:
        batch = self._schedule()
        if batch:
            self._prepare_resources(batch)
            batch = self.manager.start_batch(batch)
        if not self.overlap:
            if batch:
                sampled = self._forward(batch)
                self._advance(batch)
                self._update(sampled or {})
                self._respond(batch)
        else:
            sampled, previous = self._forward(batch) if batch else {}, self._previous
            self._update(previous[1] if previous else {})
            if sampled is None:
                # `assert sample_state is not None`, outside of any try: one raising hook is fatal.
                raise RuntimeError("Sampling failed")
            self._advance(batch)
            if previous:
                self._respond(previous[0])
            self._previous = (batch, sampled) if batch else None
        self._get_finished()

    def _schedule(self) -> list[Request]:
        """Generation first, then prompts in order of arrival while tokens and blocks last."""
        while self.waiting and len(self.active) < self.args.max_batch_size:
            self.active.append(self.waiting.popleft())
        batch = [r for r in self.active if r.state == "GENERATION_IN_PROGRESS"]
        budget = self.args.max_num_tokens - len(batch)
        own = [request.blocks or () for request in self.active]
        room = len(self.blocks.refs) - len(self.blocks.referenced.difference(*own))
        room -= sum(request.reserved for request in self.active)
        for request in self.active:
            if request.state != "CONTEXT_INIT":
                continue
            need = 0 if request.reserved else self._blocks_of(request)
            remaining = chunk = request.prompt_len - request.context_current_position
            if self.args.enable_chunked_prefill and remaining > budget:
                chunk = budget // self.size * self.size
            if need > room or chunk > budget or not chunk:
                break
            room, budget = room - need, budget - chunk
            request.reserved, request.chunk = request.reserved or need, chunk
            batch.append(request)
        return batch

    def _blocks_of(self, request: Request) -> int:
        # The last token's states are never stored.
        return -(-(request.prompt_len + request.max_new_tokens - 1) // self.size)

    def _prepare_resources(self, batch: list[Request]) -> None:
        added = [request for request in batch if request.blocks is None]
        for request in added:
            self._add_sequence(request)
            if not self.version.batched_add:
                self.manager.on_blocks("update_state_after_alloc", request)
        if self.version.batched_add:
            for request in added:
                self.manager.on_blocks("update_state_after_alloc", request)
        for request in batch:
            if request.state == "GENERATION_IN_PROGRESS" or self.version.layout:
                self._extend(request)
        self.manager.build_output(batch)

    def _add_sequence(self, request: Request) -> None:
        request.blocks, local, external = [], 0, 0
        if self.reuse:
            request.blocks, local = self.blocks.match(request.all_tokens, request.key)
        if not self.version.layout:
            self.blocks.extend(request.blocks, request.prompt_len)
        if self.reuse:  # else the C++ side warns and does not ask
            external = self.manager.query(request, local)
        self._set_prepopulated(request, local + external)
        request.kv_tokens = request.prompt_len
        if self.version.layout:  # V2 allocates for each chunk
            self._extend(request)

    def _extend(self, request: Request) -> None:
        """Make room for what is scheduled."""
        if request.state == "CONTEXT_INIT":
            request.kv_tokens = request.context_current_position + request.chunk
        else:
            request.kv_tokens += 1
        self.blocks.extend(request.blocks, request.kv_tokens)

    def _set_prepopulated(self, request: Request, length: int) -> None:
        """LlmRequest::setPrepopulatedPromptLen of llmRequest.h, with its checks."""
        if not 0 <= length < request.prompt_len:
            raise RuntimeError(f"Assertion failed: {length} < promptLen {request.prompt_len}")
        request.prepopulated_prompt_len = request.context_current_position = length
        end = length + request.chunk
        if length and end < request.prompt_len:
            end = end // self.size * self.size
        request.chunk = min(end, request.prompt_len) - length
        if request.chunk <= 0:
            raise RuntimeError(f"Assertion failed: a chunk of {request.chunk} tokens")

    def _forward(self, batch: list[Request]) -> dict[Request, int] | None:
        """Return the sampled tokens, or fail every active request and return None."""
        chunks = []
        for request in batch:
            if request.state == "CONTEXT_INIT":
                start = request.context_current_position
                tokens = request.all_tokens[start : start + request.chunk]
            else:
                start, tokens = request.kv_tokens - 1, [request.device_token]
            chunks.append(Chunk(tokens, start, request.blocks))
        try:
            hooks = self.manager.before_layer, self.manager.after_layer
            sampled = self.engine.forward(chunks, *hooks)
            self.manager.end_forward()
        except Exception as error:  # _forward_step catches all and fails all, not the batch only
            self._handle_errors(f"{type(error).__name__}: {error}")
            return None
        for request, token in zip(batch, sampled, strict=True):
            request.device_token = token
        return {r: r.device_token for r in batch if _reaches_end(r)}

    def _handle_errors(self, message: str) -> None:
        failed, self.active = self.active, []
        for request in failed:
            request.error, request.finish_reason = message, "error"
            request.state = "GENERATION_COMPLETE"
            self._terminate(request)

    def _advance(self, batch: list[Request]) -> None:
        for request in batch:
            if request.state == "GENERATION_COMPLETE":
                continue
            produces = _reaches_end(request)
            if request.state == "CONTEXT_INIT":
                request.context_current_position += request.chunk
                request.filled = request.context_current_position
            else:
                request.filled = request.kv_tokens
            if produces:
                request.produced += 1
                left = request.produced < request.max_new_tokens
                request.state = f"GENERATION_{'IN_PROGRESS' if left else 'TO_COMPLETE'}"

    def _update(self, sampled: dict[Request, int]) -> None:
        for request, token in sampled.items():
            if request.state == "GENERATION_COMPLETE":
                continue
            request.all_tokens.append(token)
            stop = token in request.eos
            if stop or len(request.tokens) == request.max_new_tokens:
                request.finish_reason = "stop" if stop else "length"
                request.state = "GENERATION_COMPLETE"

    def _respond(self, batch: list[Request]) -> None:
        for request in self.active:
            if request.cancelled and not request.done:
                request.state, request.finish_reason = "GENERATION_COMPLETE", "cancelled"
        finished = [request for request in self.active if request.done]
        self.active = [request for request in self.active if not request.done]
        for request in finished:
            self._terminate(request)
        for request in batch:  # update_resources: prompts that are computed enter the reuse tree
            computed = request.filled >= request.prompt_len
            if self.reuse and request.blocks and computed and not request.stored:
                prompt = request.all_tokens[: request.prompt_len]
                self.blocks.store(prompt, request.key, request.blocks)
                request.stored = True

    def _terminate(self, request: Request) -> None:
        if request.blocks is None:  # never added
            return
        if self.version.defers_cancel and self.manager.in_transfer(request):
            request.state = "DRAINING"
            self._pinned[request.request_id] = request.blocks
            return
        if self.manager.on_blocks("request_finished", request):
            self.manager.new["saving"][request.request_id] = request
            self._pinned[request.request_id] = self._pin(request)
        # As releaseBlocks: with whatever the blocks hold by now.
        known = request.all_tokens[: -1 if self.version.stores_unfilled else request.filled]
        if self.reuse:
            self.blocks.store(known, request.key, request.blocks, partial=True)
        self.blocks.release(request.blocks)
        request.blocks, request.reserved = None, 0

    def _pin(self, request: Request) -> list[int]:
        if self.version.layout or not self.reuse:  # V2 keeps the request's cache open
            return self.blocks.pin(request.blocks)
        known = request.all_tokens[:-1]
        return self.blocks.store(known, request.key, request.blocks, partial=True, pin=True)

    def _get_finished(self) -> None:
        ended = self.manager.get_finished()
        for request in ended["saving"]:
            self.blocks.release(self._pinned.pop(request.request_id))
        for request in ended["loading"]:
            if request.state == "DRAINING":
                del self._pinned[request.request_id]
                self._terminate(request)
            elif request.state == "LOADING":
                request.state = "CONTEXT_INIT"


def _reaches_end(request: Request) -> bool:
    """Whether the scheduled tokens end where the next token is sampled."""
    if request.state != "CONTEXT_INIT":
        return True
    return request.context_current_position + request.chunk == request.prompt_len
