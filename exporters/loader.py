"""What was promised, written into a target's pool: exact states as they are, others mapped."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from kvhub.exporters.map_plan import MapPlan
from kvhub.exporters.paged import map_paged
from kvhub.exporters.paged_cache import PagedCache
from kvhub.exporters.planner import Load, Piece
from kvhub.exporters.pool import FLOAT8, Pool, as_bytes
from kvhub.exporters.serving import DTYPES, Deployment, load_plan
from kvhub.exporters.staging import open_entry
from kvhub.exporters.status import Status
from kvhub.exporters.triton_map import TritonMap
from torch import Tensor

from kvhub.errors import UsageError, VerificationError

__all__ = ["Loader"]


class Loader:
    """Loads for one rank. All memory is allocated and every kernel compiled when it is made.

    Parameters
    ----------
    deployment, status
        What was exported, and where failures are counted.
    pool
        The target's.
    rank
        Of the target's tensor parallel ranks.
    """

    def __init__(self, deployment: Deployment, status: Status, pool: Pool, rank: int) -> None:
        settings, source = deployment.settings, deployment.source
        self.settings, self.status, self.pool = settings, status, pool
        self.plan = load_plan(deployment, pool.device, rank)
        self.source_dtype = DTYPES[settings.source_kv_dtype]
        matched = deployment.facts["heads"] == "matched"
        self.source_heads = pool.heads if matched else (0, source.kv_heads)
        shape = torch.Size(
            (
                *(source.num_layers, 2, self.source_heads[1] - self.source_heads[0]),
                *(pool.chunk_tokens, source.head_dim),
            )
        )
        # As many chunks as fit, in whole blocks of the target.
        whole = max(pool.chunk_tokens, pool.tokens_per_block) // pool.chunk_tokens
        self.chunks = max(settings.workspace_bytes // (4 * shape.numel()) // whole, 1) * whole
        on_gpu, device = pool.device.type == "cuda", pool.device
        dtype = self.plan.dtype if self.source_dtype == FLOAT8 else self.source_dtype
        self.host = torch.empty((self.chunks, *shape), dtype=self.source_dtype, pin_memory=on_gpu)
        self.scratch = torch.zeros((self.chunks, *shape), dtype=dtype, device=device)
        self.copied: Any = None
        if on_gpu:
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Where the pool cannot be mapped into, the map writes chunks beside it.
        self.into = pool.paged
        if self.into is None:
            layers, kv_heads, head_dim = pool.geometry
            self.beside = torch.zeros(
                (self.chunks, layers, 2, kv_heads, pool.chunk_tokens, head_dim),
                dtype=self.plan.dtype if pool.dtype == FLOAT8 else pool.dtype,
                device=device,
            )
        # Here, for a wrong number of scales is to be refused before there are requests.
        self.source_factors = self.target_factors = torch.ones((), device=device)
        if self.source_dtype == FLOAT8:
            self.source_factors = _as_factors(settings.source_kv_scales, self.scratch)
        if pool.dtype == FLOAT8:
            self.target_factors = _as_factors(settings.target_kv_scales, self.beside)
        self.kernels = _kernels(self.plan, settings.workspace_bytes, status)
        self._warm_up(whole)

    def load(self, load: Load) -> Exception | None:
        """Load a request's pieces, on the current stream; or what went wrong, and again in torch.

        Nothing is raised: an engine may call this where that would end it.
        """
        last: Exception | None = None
        for kernels in (self.kernels, None):
            try:
                self._load(load, kernels)
            except Exception as error:  # raised, it could end the engine; `Transfer.check` tells
                self.status.failure("load", error)
                last = error
            else:
                return None
        return last

    def beyond(self) -> Exception | None:
        """Whether the kernels met what is not finite since the last call; waits for them."""
        if self.kernels is None or not int(self.kernels.flag):
            return None
        self.kernels.flag.zero_()
        return VerificationError(f"Mapped states are not finite as {self.pool.dtype}.")

    def _load(self, load: Load, kernels: TritonMap | None) -> None:
        size, available = self.pool.tokens_per_block, self.pool.num_blocks
        first, last = load.pieces[0].start, load.pieces[-1].start + self.pool.chunk_tokens
        blocks = load.blocks[first // size : last // size]
        fits = last <= len(load.blocks) * size
        if not fits or min(blocks) < 0 or max(blocks) >= available:
            raise VerificationError(
                f"Tokens {first} to {last} of request {load.name} need blocks from 0 to "
                f"{available - 1}; found {load.blocks}."
            )
        for mapped, group in groupby(load.pieces, key=lambda piece: piece.mapped):
            pieces = list(group)
            if mapped:
                for start in range(0, len(pieces), self.chunks):
                    self._map(pieces[start : start + self.chunks], load.blocks, kernels)
                continue
            for piece in pieces:
                states = _heads(piece, self.pool.heads, self.pool.dtype)
                self.pool.write(piece.start, load.blocks[piece.start // size :], states)

    def _map(
        self, pieces: Sequence[Piece], blocks: Sequence[int], kernels: TritonMap | None
    ) -> None:
        if self.copied is not None:
            self.copied.synchronize()  # what was copied out of this memory last
        for number, piece in enumerate(pieces):
            self.host[number] = _heads(piece, self.source_heads, self.source_dtype)
        self._to_device(len(pieces))
        size, start = self.pool.tokens_per_block, pieces[0].start
        tokens = len(pieces) * self.pool.chunk_tokens
        source = _paged(self.scratch, range(len(pieces)), tokens, start)
        if self.into is not None:
            own = blocks[start // size : (start + tokens) // size]
            self._run(source, _paged(self.into, own, tokens, start), kernels)
            return
        self._run(source, _paged(self.beside, range(len(pieces)), tokens, start), kernels)
        stored = self.beside[: len(pieces)]
        if self.pool.dtype == FLOAT8:
            limit = torch.finfo(FLOAT8).max
            stored = (stored / self.target_factors).clamp(-limit, limit).to(FLOAT8)
        for piece, states in zip(pieces, stored, strict=True):
            self.pool.write(piece.start, blocks[piece.start // size :], states)

    def _run(self, source: PagedCache, target: PagedCache, kernels: TritonMap | None) -> None:
        if kernels is None:
            map_paged(self.plan, source, target, workspace_bytes=self.settings.workspace_bytes)
        else:
            kernels.enqueue(source, target, source.block_table.shape[1] * source.tokens_per_block)

    def _to_device(self, count: int) -> None:
        host, scratch = self.host[:count], self.scratch[:count]
        if self.source_dtype == FLOAT8:
            moved = host.to(scratch.device, non_blocking=True).to(scratch.dtype)
            scratch.copy_(moved * self.source_factors)
        else:
            scratch.copy_(host, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def _warm_up(self, count: int) -> None:
        """Map once into the first blocks and put back what was there: no request compiles."""
        tokens = count * self.pool.chunk_tokens
        states = self.beside if self.into is None else self.into
        blocks = range(tokens // states.shape[4])
        before = states[: len(blocks)].clone()
        source, target = (
            _paged(pool, table, tokens, 0)
            for pool, table in ((self.scratch, range(count)), (states, blocks))
        )
        if self.kernels is None:
            self._run(source, target, None)
        else:
            self.kernels(source, target)  # with every check
        states[: len(blocks)] = before


def _kernels(plan: MapPlan, workspace_bytes: int, status: Status) -> TritonMap | None:
    """The Triton kernels where they run, else None: then plain torch maps, more slowly."""
    if not plan.key_weight.is_cuda:
        return None
    try:
        return TritonMap(plan, workspace_bytes=workspace_bytes)
    except UsageError as error:
        status.failure("kernels", error)
        return None


def _heads(piece: Piece, heads: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Some KV heads of a staged chunk, `[layers, 2, kv_heads, tokens, head_dim]`."""
    found = []
    for key, file in zip(piece.keys, piece.files, strict=True):
        first, stop = (int(number) for number in key.split("-")[1:])
        low, high = max(first, heads[0]), min(stop, heads[1])
        if low < high:
            states = open_entry(file, key, checked=True)
            found.append(states[:, :, low - first : high - first])
    joined = torch.cat([as_bytes(part) for part in found], 2) if len(found) > 1 else found[0]
    joined = joined.view(found[0].dtype)
    if joined.dtype != dtype or joined.shape[2] != heads[1] - heads[0]:
        raise VerificationError(
            f"Entries {piece.keys} have {joined.shape[2]} heads as {joined.dtype}; expected "
            f"heads {heads} as {dtype}."
        )
    return joined


def _paged(pool: Tensor, blocks: Sequence[int], tokens: int, start: int) -> PagedCache:
    device = pool.device
    return PagedCache(
        pool=pool,
        block_table=torch.tensor([list(blocks)], dtype=torch.int32, device=device),
        lengths=torch.tensor([tokens], device=device),
        start_positions=torch.tensor([start], device=device),
    )


def _as_factors(scales: tuple[float, ...] | None, like: Tensor) -> Tensor:
    """`[1, layers, 1, 1, 1, 1]`."""
    if scales is None or len(scales) != like.shape[1]:
        raise UsageError(f"Expected a scale for each of {like.shape[1]} layers, found {scales}.")
    return torch.tensor(scales, dtype=like.dtype, device=like.device).view(1, -1, 1, 1, 1, 1)
