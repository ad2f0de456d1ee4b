"""The worker's half of a connector, whatever the engine: between its pool and the store."""

from collections.abc import Sequence

from kvhub.exporters.loader import Loader
from kvhub.exporters.planner import Orders, Save
from kvhub.exporters.pool import Pool
from kvhub.exporters.saver import Saver
from kvhub.exporters.serving import DTYPES, Deployment, heads_of
from kvhub.exporters.status import APPLIED, Status
from kvhub.exporters.store import Store

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
    pool
        Its own, of this rank's KV heads.
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
        pool: Pool,
        rank: int,
    ) -> None:
        settings = deployment.settings
        side, name, ranks = (
            (deployment.target, settings.target_kv_dtype, settings.target_tp)
            if maps
            else (deployment.source, settings.source_kv_dtype, settings.source_tp)
        )
        start, stop = heads_of(side.kv_heads, ranks, rank)
        expected = (side.num_layers, stop - start, side.head_dim)
        if pool.geometry != expected or pool.dtype != DTYPES[name]:
            raise IncompatiblePairError(
                f"The pool of rank {rank} has (layers, kv_heads, head_dim) = {pool.geometry} as "
                f"{pool.dtype}; expected {expected} as {name}, as {side.model} has on {ranks} "
                "ranks.",
                "Serve the model that the mapper was exported for, or correct settings.json.",
            )
        self.status, self.pool, self.rank = status, pool, rank
        self.saver = Saver(store, status, pool, settings.saving_bytes)
        self.loader = Loader(deployment, status, pool, rank) if maps else None
        self._outcomes: dict[int | str, Exception | None] = {}
        # Keys of chunks that were promised and not loaded. Engines may keep their blocks, as if
        # they had been, for later requests of the same tokens.
        self._broken: set[str] = set()

    def load(self, orders: Orders) -> None:
        """Write what was promised into the pool, on the current stream; `check` says how it went.

        Raises
        ------
        UsageError
            This engine is no target.
        """
        self._outcomes = {}
        failed = {key for keys in orders.lost.values() for key in keys}
        self._broken |= failed
        for load in orders.loads:
            self._broken.update(load.chain)
        for load in orders.loads:
            error = self._outcomes[load.name] = self._loader().load(load)
            if error is not None:
                failed.update(load.chain)
        loaded = {key for load in orders.loads for key in load.chain}
        self._broken -= loaded - failed

    def failures(self, orders: Orders) -> dict[int | str, Exception]:
        """Confirm what `load` did, once it is done; of which requests something was not loaded.

        It was promised to them, or they found it in the engine. The engine must not answer them
        from what is there.
        """
        outcomes, self._outcomes = self._outcomes, {}
        beyond = self._loader().beyond() if outcomes else None
        lost = VerificationError("It could not be ordered.")
        failed: dict[int | str, Exception] = dict.fromkeys(orders.lost, lost)
        for load in orders.loads:
            mapped = sum(piece.mapped for piece in load.pieces)
            error = outcomes.get(load.name, lost) or (beyond if mapped else None)
            if error is not None:
                failed[load.name] = error
                self._broken.update(load.chain)
            elif self.rank == 0:
                size = self.pool.chunk_tokens
                exact = len(load.pieces) - mapped
                self.status.request(
                    *(load.name, APPLIED, ""),
                    mapped_tokens=mapped * size,
                    exact_tokens=exact * size,
                )
        for name, keys in orders.reused.items():
            if self._broken and (keys is None or self._broken.intersection(keys)):
                failed[name] = VerificationError("An earlier request had failed to load it.")
        return failed

    def check(self, orders: Orders) -> None:
        """Confirm what `load` did, where an engine can only fail requests.

        Raises
        ------
        VerificationError
            There are failures.
        """
        for name, error in self.failures(orders).items():
            self.status.count("error: promise not kept")
            raise VerificationError(
                f"The states that request {name} was promised could not be loaded: {error}",
                "The request has failed; send it again, if need be under another tenant's salt.",
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
