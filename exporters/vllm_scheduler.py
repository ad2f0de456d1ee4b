"""The scheduler's role of the connector in vLLM: requests as it has them, for the planner.

An exception out of here would leave a request in vLLM's queue for ever, so all are contained: the
request is then computed by the engine.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvhub.exporters.planner import Arrival, Orders, Planner
from kvhub.exporters.serving import Deployment
from kvhub.exporters.staging import Stage
from kvhub.exporters.status import APPLIED, FALLBACK, UNSUPPORTED, Status, contained
from kvhub.exporters.store import open_store

__all__ = ["Scheduler"]

REMEMBERED = 1 << 16  # chunks of the engine's prefix cache: more than it holds


@dataclass
class _Known:
    """A request between its first question and its end.

    Attributes
    ----------
    request
        vLLM's, which has its tokens.
    computed, tokens, offered
        Of the last question: what the engine had, how many tokens there were, and the answer;
        `computed` is -1 once the request was scheduled.
    accepted
        How many of the offered tokens the engine counts on.
    told
        Tokens that the planner knows.
    blocks, chain
        Those that are loaded, and the keys of their chunks.
    outcome
        What is said of it at its end; None where kvhub is not concerned.
    """

    request: Any
    computed: int = -1
    tokens: int = 0
    offered: int = 0
    accepted: int = 0
    told: int = 0
    blocks: set[int] = field(default_factory=set)
    chain: list[str] = field(default_factory=list)
    outcome: dict[str, Any] | None = None


class Scheduler:
    """The connector in the scheduler's role."""

    def __init__(self, deployment: Deployment, *, maps: bool, tokens_per_block: int) -> None:
        settings = deployment.settings
        self.deployment, self.maps, self.size = deployment, maps, tokens_per_block
        self.status = Status(settings.status_file)
        self.store = open_store(settings.store)
        self.stage = Stage(self.store, settings.staging_path, settings.staging_bytes, self.status)
        self.planner = Planner(
            *(deployment, self.stage, self.status), maps=maps, tokens_per_block=tokens_per_block
        )
        self._known: dict[str, _Known] = {}
        self._loaded: OrderedDict[str, bool] = OrderedDict()  # chunks, and whether they are mapped

    @contained(lambda: 0)
    def match(self, request: Any, computed: int) -> int:
        """How many tokens behind the computed ones are promised: asked again, the same answer."""
        name, count = request.request_id, request.num_tokens
        known = self._known.setdefault(name, _Known(request))
        if (known.computed, known.tokens) != (computed, count):
            reason = self._unsupported(request)
            tokens = [] if reason else list(request.all_token_ids)
            known.computed, known.tokens, known.told, known.offered = computed, count, count, 0
            refused = reason or self._contradiction(request)
            known.outcome = self._outcome(request, UNSUPPORTED if refused else FALLBACK)
            known.offered = self.planner.offer(
                Arrival(name, tokens, request.cache_salt, reason), computed
            )
        return known.offered

    @contained(lambda: None)
    def accept(self, request: Any, external: int) -> None:
        """The engine has blocks for the request, and counts on so many of the promised tokens."""
        known = self._known.get(request.request_id)
        if known is None:
            return
        known.accepted = external
        if external != known.offered:  # then not even the others may be written
            self.planner.forget(request.request_id)

    def order(self, output: Any) -> tuple[Orders, set[int]]:
        """What the workers have to do in this iteration, and blocks that they cannot load.

        Those are blocks of tokens that were promised and could not be ordered.
        """
        orders, lost = Orders(), set[int]()
        self._next_iteration()
        for data in output.scheduled_new_reqs:
            scheduled = output.num_scheduled_tokens[data.req_id]
            self._begin(
                data.req_id, data.block_ids, data.num_computed_tokens, scheduled, orders, lost
            )
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            scheduled = output.num_scheduled_tokens[name]
            if name in cached.resumed_req_ids:
                self._begin(name, blocks, computed, scheduled, orders, lost)
            else:
                self._go_on(name, blocks, computed, scheduled, orders)
        return orders, lost

    def hear(self, failed: set[int]) -> None:
        """Blocks could not be loaded: their requests are computed by the engine."""
        for name, known in self._known.items():
            if known.blocks & failed:
                known.blocks = set()
                for key in known.chain:
                    self._loaded.pop(key, None)
                known.outcome = self._outcome(known.request, FALLBACK)
                self.status.request(name, FALLBACK, "its states could not be loaded")
                self._forget(name)

    def finish(self, request: Any) -> dict[str, Any] | None:
        """Forget a request; what its answer says of it."""
        self._forget(request.request_id)
        known = self._known.pop(request.request_id, None)
        return None if known is None or known.outcome is None else {"kvhub": known.outcome}

    def close(self) -> None:
        self.stage.close()
        self.store.close()

    def _begin(
        self,
        name: str,
        blocks: Sequence[Sequence[int]],
        computed: int,
        scheduled: int,
        orders: Orders,
        lost: set[int],
    ) -> None:
        known = self._known.get(name)
        if known is None:
            return
        own, accepted = computed - known.accepted, known.accepted
        (ids,) = blocks
        self._plan(name, True, [], list(ids), own, scheduled, orders)
        known.computed, known.accepted = -1, 0
        # What the engine has from an earlier load. If one fails, the engine computes its blocks
        # anew, for whoever reuses them too: nobody has to be failed for it.
        reused = orders.reused.pop(name, None) or []
        kinds = [self._loaded[key] for key in reused if key in self._loaded]
        if accepted:
            known.blocks = {*ids[own // self.size : -(-computed // self.size)]}
            loads = [load for load in orders.loads if load.name == name]
            if not loads:
                lost |= known.blocks
                return
            known.chain = loads[0].chain
            for key, piece in zip(known.chain, loads[0].pieces, strict=True):
                self._remember(key, piece.mapped)
                kinds.append(piece.mapped)
        if kinds:
            mapped = sum(kinds) * self.planner.chunk
            exact = len(kinds) * self.planner.chunk - mapped
            known.outcome = self._outcome(known.request, APPLIED, mapped, exact)

    def _remember(self, key: str, mapped: bool) -> None:
        self._loaded[key] = mapped
        self._loaded.move_to_end(key)
        while len(self._loaded) > REMEMBERED:
            self._loaded.popitem(last=False)

    def _go_on(self, name: str, blocks: Any, computed: int, scheduled: int, orders: Orders) -> None:
        known = self._known.get(name)
        if known is not None:
            tokens = list(known.request.all_token_ids[known.told :])
            known.told += len(tokens)
            (ids,) = blocks or ([],)
            self._plan(name, False, tokens, list(ids), computed, scheduled, orders)

    @contained(lambda: None)
    def _plan(
        self,
        name: str,
        new: bool,
        tokens: list[int],
        blocks: list[int],
        computed: int,
        scheduled: int,
        orders: Orders,
    ) -> None:
        self.planner.scheduled(
            *(name,),
            new=new,
            new_tokens=tokens,
            new_blocks=blocks,
            computed=computed,
            scheduled=scheduled,
            orders=orders,
        )

    @contained(lambda: None)
    def _next_iteration(self) -> None:
        self.planner.next_iteration()

    @contained(lambda: None)
    def _forget(self, name: str) -> None:
        self.planner.forget(name)

    def _salted(self, request: Any) -> bool:
        own, salt = self.deployment.salt(), request.cache_salt or ""
        return self.maps and (salt == own or salt.startswith(f"{own}:"))

    def _outcome(
        self, request: Any, status: str, mapped: int = 0, exact: int = 0
    ) -> dict[str, Any] | None:
        if not self._salted(request) and self._asked(request) is None:
            return None
        return {
            "mapper": self.deployment.digest,
            "status": status,
            "mapped_tokens": mapped,
            "exact_tokens": exact,
        }

    def _asked(self, request: Any) -> str | None:
        """The mapper that a request names in its own `kv_transfer_params`."""
        asked = (request.kv_transfer_params or {}).get("kvhub")
        return asked.get("mapper") if isinstance(asked, dict) else None

    def _contradiction(self, request: Any) -> str:
        """Why a request cannot have the mapper that it names, or empty."""
        asked = self._asked(request)
        if asked not in (None, self.deployment.digest):
            return "another mapper"
        return "no salt of this mapper" if asked and not self._salted(request) else ""

    def _unsupported(self, request: Any) -> str:
        """Why kvhub must not touch a request, or empty."""
        if self._salted(request) and (reason := self._contradiction(request)):
            return reason
        if request.lora_request is not None:
            return "LoRA"
        if request.mm_features:
            return "multimodal"
        if request.prompt_embeds is not None or request.prompt_token_ids is None:
            return "embeddings"
        if request.pooling_params is not None or request.skip_reading_prefix_cache:
            return "its whole prompt must be computed"
        return ""
