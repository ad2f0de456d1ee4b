"""The worker's half of a connector, whatever the engine: between its pool and the store."""

from collections.abc import Sequence

from kvhub.exporters.loader import Loader
from kvhub.exporters.planner import Load, Save
from kvhub.exporters.pool import Pool
from kvhub.exporters.saver import Saver
from kvhub.exporters.serving import DTYPES, Deployment, heads_of
from kvhub.exporters.status import APPLIED, Status
from kvhub.exporters.store import Store
from torch import Tensor

from kvhub.errors import IncompatiblePairError, UsageError, VerificationError

__all__ = ["Transfer"]


class Transfer:
    """Moves states for one rank of an engine.

    Parameters
    ----------
    deployment, store, status
        What was exported, where entries go, and where it is said what became of requests.
    maps
        Whether this engine is the target.
    states
        Its pool: `[blocks, layers, 2, kv_heads, tokens_per_block, head_dim]` of this rank's KV
        heads, in any strides with a head's dims side by side; keys rotated.
    rank
        Of the engine's tensor parallel ranks.

    Raises
    ------
    IncompatiblePairError
        The pool is not one of the model, or not of the dtype that the settings name.
    """

    def __init__(
        self,
        deployment: Deployment,
        store: Store,
        status: Status,
        *,
        maps: bool,
        states: Tensor,
        rank: int,
    ) -> None:
        settings = deployment.settings
        side, name, ranks = (
            (deployment.target, settings.target_kv_dtype, settings.target_tp)
            if maps
            else (deployment.source, settings.source_kv_dtype, settings.source_tp)
        )
        pool = Pool(states, heads_of(side.kv_heads, ranks, rank), settings.chunk_tokens)
        expected = [side.num_layers, 2, pool.heads[1] - pool.heads[0], side.head_dim]
        found = [*states.shape[1:4], states.shape[5]]
        if found != expected or states.dtype != DTYPES[name]:
            raise IncompatiblePairError(
                f"The pool of rank {rank} has [layers, 2, kv_heads, head_dim] = {found} as "
                f"{states.dtype}; expected {expected} as {name}, as {side.model} has on {ranks} "
                "ranks.",
                "Serve the model that the mapper was exported for, or correct settings.json.",
            )
        self.status, self.pool, self.rank = status, pool, rank
        self.saver = Saver(store, status, pool, settings.saving_bytes)
        self.loader = Loader(deployment, status, pool, rank) if maps else None
        self._outcomes: list[tuple[Load, Exception | None]] = []

    def load(self, loads: Sequence[Load]) -> None:
        """Write what was promised into the pool, on the current stream; `check` says how it went.

        Raises
        ------
        UsageError
            This engine is no target.
        """
        for load in loads:
            self._outcomes.append((load, self._loader().load(load)))

    def check(self) -> None:
        """Confirm the loads since the last check, once they are done.

        Raises
        ------
        VerificationError
            One of them failed twice. The engine must not answer its request: there are no states
            where it was promised some.
        """
        outcomes, self._outcomes = self._outcomes, []
        beyond = self._loader().beyond() if outcomes else None
        failed: list[tuple[Load, Exception]] = []
        for load, error in outcomes:
            mapped = sum(piece.mapped for piece in load.pieces)
            error = error or (beyond if mapped else None)
            if error is not None:
                failed.append((load, error))
            elif self.rank == 0:
                size = self.pool.chunk_tokens
                exact = len(load.pieces) - mapped
                self.status.request(
                    *(load.name, APPLIED, ""),
                    mapped_tokens=mapped * size,
                    exact_tokens=exact * size,
                )
        for load, error in failed:
            raise VerificationError(
                f"The states that request {load.name} was promised could not be loaded: {error}",
                "The request has failed; send it again.",
            ) from error

    def save(self, saves: Sequence[Save]) -> None:
        """Copy chunks out of the pool behind what the current stream has to do; do not wait."""
        for save in saves:
            self.saver.save(save)

    def saved(self, names: Sequence[int | str]) -> list[int | str]:
        """Those of the requests whose blocks are not read any more."""
        return [name for name in names if not self.saver.reading(name)]

    def close(self) -> None:
        """Finish what is being saved, and let go of the pool."""
        self.saver.close()

    def _loader(self) -> Loader:
        if self.loader is None:
            raise UsageError("Only a target loads.", "Use the target's classes in its YAML.")
        return self.loader
