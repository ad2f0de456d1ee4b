"""The scheduler's half of a connector, whatever the engine: what is promised, loaded and saved.

Three rules keep wrong states out. Only what is staged and checked is promised. Mapped states are
promised to requests under a kvhub salt only, which has a prefix cache of its own in the engine.
And only what the target computed on top of exact states alone is saved, since it goes into the
store as exact.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvhub.exporters.chain import chunk_keys, shard_key
from kvhub.exporters.serving import SALT, Deployment, heads_of
from kvhub.exporters.staging import Part, Stage
from kvhub.exporters.status import FALLBACK, UNSUPPORTED, Status

__all__ = ["Arrival", "Load", "Orders", "Piece", "Planner", "Save"]

REMEMBERED = 1 << 16  # chunks of the engine's prefix cache: more than it holds
SAVED_AGAIN = 60.0  # seconds after which a chunk is offered to the store once more: it may be gone
RELEASED_AFTER = 3  # iterations: by then every rank has loaded what it was told to
EXACT, MAPPED = 0, 1  # versions of a chunk, in order of preference


@dataclass(frozen=True)
class Arrival:
    """A request as it comes.

    Attributes
    ----------
    name
        The engine's id.
    tokens
        Of the prompt.
    salt
        Its cache salt, or None.
    unsupported
        Why kvhub must not touch it, or empty.
    """

    name: int | str
    tokens: Sequence[int]
    salt: str | None
    unsupported: str = ""


@dataclass(frozen=True)
class Piece:
    """A staged chunk: where it begins in the prompt, its key's parts and their files."""

    start: int
    mapped: bool
    keys: list[str]
    files: list[str]


@dataclass
class Load:
    """What the workers write into a request's blocks before its forward pass.

    `chain` are the target's keys of its chunks.
    """

    name: int | str
    pieces: list[Piece]
    blocks: list[int]
    chain: list[str]


@dataclass(frozen=True)
class Save:
    """A chunk of a request that the workers read after the forward pass."""

    name: int | str
    key: str
    start: int
    blocks: list[int]


@dataclass
class Orders:
    """Of one iteration, for every worker. Pickled between processes.

    `reused` are the target's keys of what the engine had of each new request under a salt, None
    where it ends inside of a chunk; `lost` those of what was promised and could not be ordered.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    reused: dict[int | str, list[str] | None] = field(default_factory=dict)
    lost: dict[int | str, list[str]] = field(default_factory=dict)


@dataclass
class _Request:
    tokens: list[int]
    salted: bool
    tenant: str | None
    exact: bool  # so is all that the engine has of it
    blocks: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    saved: int = 0  # chunks
    saving: bool = False
    offered: int = 0  # tokens
    pieces: list[Piece] = field(default_factory=list)


class Planner:
    """Decides for one engine.

    Parameters
    ----------
    deployment
        What was exported, and the operator's settings.
    maps
        Whether this engine is the target: then it also loads. Both kinds save their own states.
    tokens_per_block
        Of the engine's pool.
    stage, status
        Where promised entries are held, and where it is said what became of requests.
    """

    def __init__(
        self,
        deployment: Deployment,
        stage: Stage,
        status: Status,
        *,
        maps: bool,
        tokens_per_block: int,
    ) -> None:
        settings = deployment.settings
        self.deployment, self.stage, self.status = deployment, stage, status
        self.maps, self.tokens_per_block = maps, tokens_per_block
        self.chunk = settings.chunk_tokens
        self.unit = max(self.chunk, tokens_per_block)
        self.source = deployment.source.namespace(
            settings.source_kv_dtype, self.chunk, settings.source_kv_scales
        )
        self.target = deployment.target.namespace(
            settings.target_kv_dtype, self.chunk, settings.target_kv_scales
        )
        self.own = self.target if maps else self.source
        self._requests: dict[int | str, _Request] = {}
        # When each was last saved.
        self._exact: OrderedDict[tuple[bool, str], float] = OrderedDict()
        # Of these the engine may hold other blocks too, which then are the ones that it reuses.
        self._doubtful: OrderedDict[tuple[bool, str], float] = OrderedDict()
        self._iteration = 0
        self._loaded: list[tuple[int, str]] = []
        self._owners: dict[int | str, str] = {}
        self._serial = 0

    def offer(self, arrival: Arrival, computed: int) -> int:
        """How many tokens behind the first `computed` ones the workers will load.

        Whole blocks, and never the prompt's last token. What is offered is staged.
        """
        self.forget(arrival.name)
        salted, tenant = self._tenant(arrival.salt)
        if arrival.unsupported:
            if salted:
                self.status.request(arrival.name, UNSUPPORTED, arrival.unsupported)
            return 0
        tokens = list(arrival.tokens)
        request = _Request(tokens, salted, tenant, exact=True)
        self._extend_keys(request)
        self._requests[arrival.name] = request
        request.exact = self._is_exact(request, computed)
        if not (self.maps and salted):
            return 0
        try:
            pieces, reason = self._stage(arrival.name, request, computed)
        except Exception as error:  # whatever it is, the engine can do without
            self.status.failure("offer", error)
            pieces, reason = [], "an error"
        if not pieces:
            self.status.request(arrival.name, FALLBACK, reason)
            return 0
        request.pieces = pieces
        request.offered = len(pieces) * self.chunk
        for piece in pieces:
            key = request.keys[piece.start // self.chunk]
            if piece.mapped:
                request.exact = False
                _remember(self._doubtful, salted, key)
            elif request.exact:
                _remember(self._exact, salted, key)
        return request.offered

    def scheduled(
        self,
        name: int | str,
        *,
        new: bool,
        new_tokens: Sequence[int],
        new_blocks: Sequence[int],
        computed: int,
        scheduled: int,
        orders: Orders,
    ) -> None:
        """Add to the orders what follows from a request's part in an iteration.

        Parameters
        ----------
        name, new_tokens, new_blocks
            Of the request: tokens and blocks that the engine has not told of before; the whole
            prompt and all blocks where it is `new`.
        computed
            Tokens in front of those that are scheduled, without those that were offered.
        scheduled
            Tokens that this iteration computes.
        orders
            Of the iteration.
        """
        request = self._requests.get(name)
        if request is None:
            return
        if new and request.blocks:  # begun anew, without asking: its old blocks are not its own
            self.forget(name)
            return
        first = not request.blocks
        request.blocks += new_blocks
        if first:
            if request.salted and computed:
                whole, rest = divmod(computed, self.chunk)
                orders.reused[name] = None if rest else request.keys[:whole]
            self._load(name, request, orders)
        else:
            request.tokens += new_tokens
            self._extend_keys(request)
        # How much of an offer was taken is not told with it; then the next iteration tells more.
        known = computed if first and request.offered else computed + scheduled
        self._save(name, request, min(known, len(request.tokens)), orders)

    def finished(self, name: int | str) -> bool:
        """Forget a request; whether its blocks may still be read by a save."""
        request = self._requests.get(name)
        saving = request is not None and request.saving
        self.forget(name)
        return saving

    def forget(self, name: int | str) -> None:
        """Drop all that is known of a request, as when it is asked about once more."""
        request = self._requests.pop(name, None)
        if request is not None and request.blocks:
            # The engine may keep blocks that it never filled, and those of an earlier request
            # before the same ones of a later.
            for key in request.keys[request.saved :]:
                _remember(self._doubtful, request.salted, key)
        owner = self._owners.pop(name, None)
        if owner is not None:
            self.stage.release(owner)

    def lose(self, orders: Orders) -> None:
        """Order that what is promised and not ordered yet fails: it cannot be loaded in time."""
        for name, request in self._requests.items():
            if request.pieces:
                orders.lost[name] = self._chain(request)
                request.pieces, request.exact = [], False

    def next_iteration(self) -> None:
        """Release what has been loaded by now."""
        self._iteration += 1
        while self._loaded and self._loaded[0][0] <= self._iteration - RELEASED_AFTER:
            self.stage.release(self._loaded.pop(0)[1])

    def _tenant(self, salt: str | None) -> tuple[bool, str | None]:
        """Whether a salt is one of this mapper's, and whose states may be found under it."""
        own = self.deployment.salt()
        if salt is None or not self.maps:
            return False, salt
        if salt == own:
            return True, None
        if salt.startswith(f"{own}:"):
            return True, salt[len(own) + 1 :]
        if salt.startswith(f"{SALT}:"):
            self.status.count("salts of another mapper")
        return False, salt

    def _extend_keys(self, request: _Request) -> None:
        complete = len(request.tokens) // self.chunk
        if request.exact and complete > len(request.keys):  # others are not saved
            request.keys = chunk_keys(
                self.own, request.tokens, salt=request.tenant, lora=None, exact=True
            )

    def _is_exact(self, request: _Request, computed: int) -> bool:
        """Whether the first `computed` tokens, which the engine has, are known to be exact."""
        keys = request.keys[: -(-computed // self.chunk)]
        for key in keys:
            if (request.salted, key) in self._doubtful:
                _remember(self._doubtful, request.salted, key)
                return False
            if (request.salted, key) not in self._exact:
                return False
        return bool(len(keys) * self.chunk >= computed)

    def _stage(self, name: int | str, request: _Request, computed: int) -> tuple[list[Piece], str]:
        """Staged pieces from `computed` on, or why there are none."""
        last = (len(request.tokens) - 1) // self.unit * self.unit
        if computed % self.unit:
            return [], "the engine's own prefix ends inside of a chunk"
        if computed >= last:
            return [], "the prompt is too short"
        settings = self.deployment.settings
        source_keys = chunk_keys(
            self.source, request.tokens[:last], salt=request.tenant, lora=None, exact=True
        )
        starts = range(computed, last, self.chunk)
        wanted = []
        for start in starts:
            number = start // self.chunk
            versions = [self._parts(request.keys[number], target=True)]
            if start >= settings.exact_prefix:
                versions.append(self._parts(source_keys[number], target=False))
            wanted.append(versions)
        self._serial += 1
        owner = self._owners[name] = f"{name}/{self._serial}"
        deadline = time.monotonic() + settings.lookup_seconds
        staged = self.stage.take(owner, wanted, deadline)
        whole = len(staged) * self.chunk // self.unit * self.unit // self.chunk
        pieces = []
        for (version, files), versions, start in zip(staged[:whole], wanted, starts, strict=False):
            keys = [part.key for part in versions[version]]
            pieces.append(Piece(start, version == MAPPED, keys, files))
        pieces = self._uniform(pieces)
        if not pieces:
            self.stage.release(self._owners.pop(name))
            return [], "nothing in the store" if not staged else "too little in the store"
        return pieces, ""

    def _uniform(self, pieces: list[Piece]) -> list[Piece]:
        """End before the first block that is partly exact and partly mapped.

        A map writes whole blocks. Chunks of a size that is no smaller have none of these.
        """
        size = self.unit // self.chunk
        for start in range(0, len(pieces), size):
            if len({piece.mapped for piece in pieces[start : start + size]}) > 1:
                return pieces[:start]
        return pieces

    def _parts(self, key: str, *, target: bool) -> list[Part]:
        settings = self.deployment.settings
        side = self.deployment.target if target else self.deployment.source
        dtype = settings.target_kv_dtype if target else settings.source_kv_dtype
        ranks = settings.target_tp if target else settings.source_tp
        parts = []
        for rank in range(ranks):
            start, stop = heads_of(side.kv_heads, ranks, rank)
            shape = (side.num_layers, 2, stop - start, self.chunk, side.head_dim)
            parts.append(Part(shard_key(key, start, stop), dtype, shape))
        return parts

    def _load(self, name: int | str, request: _Request, orders: Orders) -> None:
        if not request.pieces:
            return
        chain = self._chain(request)
        orders.loads.append(Load(name, request.pieces, list(request.blocks), chain))
        request.pieces = []
        owner = self._owners.pop(name)
        self._loaded.append((self._iteration, owner))

    def _save(self, name: int | str, request: _Request, computed: int, orders: Orders) -> None:
        """Order to save the complete chunks up to `computed`, and remember that they are exact."""
        if not request.exact:
            return
        complete = min(computed, len(request.blocks) * self.tokens_per_block) // self.chunk
        for number in range(request.saved, min(complete, len(request.keys))):
            key, start = request.keys[number], number * self.chunk
            stop = start + self.chunk
            blocks = request.blocks[
                start // self.tokens_per_block : -(-stop // self.tokens_per_block)
            ]
            if min(blocks) < 0:  # no page: an attention window has passed it
                request.exact = False
                return
            request.saved = number + 1
            saved = self._exact.get((request.salted, key))
            if saved is None or time.monotonic() - saved > SAVED_AGAIN:
                _remember(self._exact, request.salted, key)
                orders.saves.append(Save(name, key, start, blocks))
                request.saving = True

    def _chain(self, request: _Request) -> list[str]:
        return [request.keys[piece.start // self.chunk] for piece in request.pieces]


def _remember(chunks: OrderedDict[tuple[bool, str], float], salted: bool, key: str) -> None:
    chunks[salted, key] = time.monotonic()
    chunks.move_to_end((salted, key))
    while len(chunks) > REMEMBERED:
        chunks.popitem(last=False)
