"""What engines that serve with a connector should have computed, by transformers and `KVMapper`.

Next to each block of a stand-in engine goes a cell: what the block should hold. A request begins
with the cells of the blocks that the engine's own prefix cache gave it, whatever they were made
of; then come the pieces that its connector loaded, here mapped by `KVMapper` from the source
model's own prefill, or taken from the target's; the model computes the rest on top of these, here
in one forward pass over the tokens that the engine answered. So the reference is defined for every
request, also where an answer stands on blocks that were mapped for another one, many turns ago.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kvhub.exporters.planner import Orders, Piece
from torch import Tensor
from trtllm_host import Host
from trtllm_manager import Request

from kvhub import KVMapper
from kvhub.cache import build_cache, cache_argument, cache_of, read_cache

# Of logits, in their own standard deviation, and of states, in their largest number. What float32
# leaves of a map and some layers is a hundredth of that.
NOISE = 1e-3


@dataclass(eq=False)
class Cell:
    """What a block should hold, `[layers, 2, kv_heads, tokens, head_dim]`, once it is known."""

    states: Tensor | None = None


@dataclass(eq=False)
class Served:
    """A request that was given blocks.

    Attributes
    ----------
    request
        The engine's.
    local, external
        Tokens that the engine had, and that the connector promised.
    inherited, cells
        Of the blocks that it began with, the last one perhaps in part, and of all its own.
    pieces
        What the connector loaded.
    tokens, found
        At its end: prompt and answer, and what its blocks held.
    """

    request: Request
    local: int
    external: int
    inherited: list[Cell]
    cells: list[Cell]
    pieces: list[Piece] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    found: Tensor | None = None


class ShadowHost(Host):
    """A stand-in engine that remembers what each request was made of."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cells: dict[int, Cell] = {}
        self.served: dict[int, Served] = {}
        self.ended: list[Served] = []
        copy = self.blocks.copy

        def copied(source: int, target: int) -> None:
            copy(source, target)
            self.cells[target] = self.cells[source]

        self.blocks.copy = copied
        if self.manager.scheduler is not None:
            build = self.manager.scheduler.build_connector_meta
            self.manager.scheduler.build_connector_meta = lambda output: self._noted(build(output))

    def _noted(self, orders: Orders) -> Orders:
        for load in orders.loads:
            self.served[load.name].pieces = list(load.pieces)
        return orders

    def _set_prepopulated(self, request: Request, length: int) -> None:
        super()._set_prepopulated(request, length)
        external = request.num_connector_matched_tokens
        local = length - external
        inherited = [self.cells[block] for block in request.blocks[: -(-local // self.size)]]
        served = Served(request, local, external, inherited, inherited[: local // self.size])
        self.served[request.request_id] = served
        self._cover(served)

    def _extend(self, request: Request) -> None:
        super()._extend(request)
        self._cover(self.served[request.request_id])

    def _cover(self, served: Served) -> None:
        for block in served.request.blocks[len(served.cells) :]:
            self.cells[block] = Cell()
            served.cells.append(self.cells[block])

    def _terminate(self, request: Request) -> None:
        served = self.served.pop(request.request_id, None)
        if served is not None:
            served.tokens = list(request.all_tokens)
            (group,) = self.engine.groups
            blocks = group.pools[0][group.slots[request.blocks]]
            states = blocks.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
            served.found = states[:, :, :, : min(request.filled, len(served.tokens) - 1)]
            self.ended.append(served)
        super()._terminate(request)


class Checker:
    """Compares one engine with the reference.

    Parameters
    ----------
    host
        The engine.
    model, source, mapper
        What it serves, and what its connector maps from and with.
    salts
        Under which it may.
    status_file
        Of its connector.
    """

    def __init__(
        self,
        host: ShadowHost,
        model: Any,
        source: Any,
        mapper: KVMapper,
        salts: Iterable[str],
        status_file: Path,
    ) -> None:
        self.host, self.model, self.source, self.mapper = host, model, source, mapper
        self.salts = frozenset(salts)
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.largest = {"tie": 0.0, "states": 0.0}
        self.examples: list[str] = []
        self._waiting: list[Served] = []
        self._said: dict[int, list[dict[str, Any]]] = {}
        self._status_file, self._read = status_file, 0

    def check(self, done: Callable[[], bool] = lambda: False) -> None:
        """Look at the requests that have ended and whose blocks' origin is known, until `done`."""
        self._waiting += self.host.ended
        self.host.ended.clear()
        self._read_status()
        progress = True
        while progress and self._waiting:
            progress, left = False, []
            for served in self._waiting:
                if done() or any(cell.states is None for cell in served.inherited):
                    left.append(served)
                    continue
                progress = True
                self._check_status(served)
                self._check_states(served)
            self._waiting = left
            if done():
                return

    @property
    def unchecked(self) -> int:
        """Requests that wait."""
        return len(self._waiting) + len(self.host.ended)

    def _read_status(self) -> None:
        if not self._status_file.exists():
            return
        with self._status_file.open() as file:
            file.seek(self._read)
            while (line := file.readline()).endswith("\n"):
                said = json.loads(line)
                self._said.setdefault(said["request"], []).append(said)
                self._read = file.tell()

    def _check_status(self, served: Served) -> None:
        """Exactly one state for each request under a salt of ours, with the numbers that it had."""
        request, size = served.request, self.host.manager.scheduler.planner.chunk
        said = self._said.pop(request.request_id, [])
        for one in said:
            self.reasons[": ".join(filter(None, (one["state"], one["reason"])))] += 1
        mapped = size * sum(piece.mapped for piece in served.pieces)
        exact = size * len(served.pieces) - mapped
        self.counts["mapped tokens"] += mapped
        self.counts["exact tokens"] += exact
        self.counts["tokens of the engine's own cache"] += served.local
        expected = request.cache_salt in self.salts
        if not expected and served.external:
            self._wrong("wrong state", served, "it was served without a salt")
        if request.error or not (expected or said):
            return
        if not said:
            self.counts["no state"] += 1
        elif len(said) > 1:
            self._wrong("wrong state", served, f"several states: {said}")
        elif said[0]["state"] == "applied":
            numbers = said[0]["mapped_tokens"], said[0]["exact_tokens"]
            if numbers != (mapped, exact) or mapped + exact != served.external:
                self._wrong("wrong state", served, f"{said[0]} for {mapped} + {exact} tokens")
        elif served.external:
            self._wrong("wrong state", served, f"{said[0]} for {served.external} tokens")

    @torch.no_grad()
    def _check_states(self, served: Served) -> None:
        request, tokens = served.request, served.tokens
        if request.error:
            self.counts["failed"] += 1
            self.examples.append(f"request {request.request_id} failed: {request.error}")
            return
        past = self._past(served)
        start, end = past.shape[3], len(tokens) - 1
        states = past
        if start < end:
            cache = build_cache(past[:, 0, None], past[:, 1, None]) if start else None
            ids = torch.tensor([tokens[start:end]])
            output = self.model(ids, use_cache=True, **{cache_argument(self.model): cache})
            states = stacked(cache_of(output))
            first = request.prompt_len - 1 - start
            self._compare_tokens(served, output.logits[0, first:], tokens[request.prompt_len :])
        self._compare_states(served, states)
        for number, cell in enumerate(served.cells):
            if cell.states is None:
                size = self.host.size
                cell.states = states[:, :, :, number * size : (number + 1) * size].clone()

    def _past(self, served: Served) -> Tensor:
        """The states below what the engine computed for this request."""
        layers = self.model.config.num_hidden_layers
        parts = [torch.empty(layers, 2, self.host.engine.kv_heads, 0, self.host.engine.head_dim)]
        parts += [cell.states for cell in served.inherited]
        past = torch.cat(parts, 3)[:, :, :, : served.local]
        if not served.external:
            return past
        # Prefilled to the same token by either model, by itself.
        ids = torch.tensor([served.tokens[: served.local + served.external]])
        whole: dict[bool, Tensor] = {}
        if any(piece.mapped for piece in served.pieces):
            source = self.source(ids, use_cache=True)
            whole[True] = stacked(self.mapper(cache_of(source)))
        if not all(piece.mapped for piece in served.pieces):
            whole[False] = stacked(cache_of(self.model(ids, use_cache=True)))
        size = self.host.manager.scheduler.planner.chunk
        spans = [
            whole[piece.mapped][:, :, :, piece.start : piece.start + size]
            for piece in served.pieces
        ]
        return torch.cat([past, *spans], 3)

    def _compare_tokens(self, served: Served, logits: Tensor, answer: Sequence[int]) -> None:
        self.counts["tokens"] += len(answer)
        for place, (row, token) in enumerate(zip(logits, answer, strict=True)):
            margin = float((row.max() - row[token]) / row.std())
            if margin > NOISE:
                what = f"token {place} of {len(answer)}, by {margin:.2g} of the logits' deviation"
                self._wrong("wrong token", served, what)
            elif int(row.argmax()) != token:
                self.counts["ties"] += 1
                self.largest["tie"] = max(self.largest["tie"], margin)

    def _compare_states(self, served: Served, states: Tensor) -> None:
        found = served.found
        if found is None or not found.shape[3]:
            return
        expected = states[:, :, :, : found.shape[3]]
        difference = float((found - expected).abs().max() / expected.abs().max())
        # Written so that NaN is wrong as well.
        if not difference <= NOISE:
            self._wrong("wrong states", served, f"states, by {difference:.2g} of the largest")
        else:
            self.largest["states"] = max(self.largest["states"], difference)
        self.counts["requests"] += 1

    def _wrong(self, what: str, served: Served, how: str) -> None:
        self.counts[what] += 1
        if len(self.examples) < 20:
            mapped = sum(piece.mapped for piece in served.pieces)
            self.examples.append(
                f"request {served.request.request_id} with {served.request.prompt_len} tokens, "
                f"{served.local} the engine's, {mapped} of {len(served.pieces)} pieces mapped, "
                f"salt {served.request.cache_salt}: {how}"
            )


def stacked(cache: Any) -> Tensor:
    """A cache of one row as `[layers, 2, kv_heads, tokens, head_dim]`."""
    keys, values = read_cache(cache)
    return torch.stack((torch.cat(keys), torch.cat(values)), 1)
