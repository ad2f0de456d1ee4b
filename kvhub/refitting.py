"""`kvhub refit`: a mapper fitted again on a user's own text, kept only if it is better there."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvhub.atomic import recover
from kvhub.errors import ConflictError, UsageError
from kvhub.pairs import Track, load_mapper_pair
from kvhub.store import find_local, find_mapper, mapper_path

if TYPE_CHECKING:
    from kvhub.data import TokenBatch
    from kvhub.mapper import KVMapper
    from kvhub.mapper_config import MapperConfig
    from kvhub.pairs import LoadedPair
    from kvhub.stats import Statistics

__all__ = ["Candidate", "RefitPlan", "Refitted", "refit_mapper", "try_strengths"]

HELD_OUT_EVERY = 4  # of few sequences enough must be left to choose a strength by
ROWS_PER_BATCH = 1024
# Strengths that are tried, in tokens of the prior per token of the text. Weights say less than
# statistics of as many tokens: they pull alike in directions that matter and in those that do not.
SHARES_OF_WEIGHTS = (0.001, 0.01, 0.1, 1.0)
SHARES_OF_STATISTICS = (0.1, 0.5, 2.0, 8.0)


@dataclass(frozen=True)
class RefitPlan:
    """Everything that decides what `kvhub refit` makes; see the command's options."""

    mapper: str
    data: str
    name: str | None = None
    sequences: int = 64
    length: int | None = None
    stride: int = 1
    strength: float | None = None
    statistics: Path | None = None
    source: str | None = None
    target: str | None = None
    dtype: str = "auto"
    device: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Candidate:
    """How one strength does on the held-out sequences of the text.

    Attributes
    ----------
    strength
        In tokens; None is the mapper as it is.
    kl
        Of the mapped setting from target-alone, in nats per token: what decides.
    agreement, key_r2, value_r2, attention_output_cosine
        As in a report.
    """

    strength: float | None
    kl: float
    agreement: float
    key_r2: float
    value_r2: float
    attention_output_cosine: float


@dataclass(frozen=True)
class Refitted:
    """What came of a refit.

    Attributes
    ----------
    mapper
        The one that was refitted, with its version where it has one.
    name, path
        The new one; None where nothing was gained and none was written.
    candidates
        Every strength that was tried, the mapper as it is first.
    best
        The one with the least KL.
    """

    mapper: str
    name: str | None
    path: str | None
    method: str
    sequences: int
    held_out_sequences: int
    candidates: tuple[Candidate, ...]
    best: Candidate

    @property
    def gained(self) -> bool:
        """Whether a strength is better than the mapper as it is."""
        return self.best.strength is not None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"gained": self.gained, **asdict(self)}


def refit_mapper(plan: RefitPlan, track: Track, say: Callable[[str], None]) -> Refitted:
    """Calibrate on the text, fit with several strengths, keep the best if it beats the mapper.

    Every fourth sequence is kept apart. On those the mapped hand-off of each candidate is compared
    with the target alone, and the least KL decides: an error in the cache may be large where no
    query looks, so its size alone does not say which mapper is better.

    Raises
    ------
    ConflictError
        The new mapper exists and `overwrite` is not set.
    UsageError
        The mapper has seen this text already, cannot be fitted again (see `kvhub.prior`), or has
        no statistics like those that were given.
    NotFoundError, IncompatiblePairError, VerificationError
        Mapper, models, text or statistics are missing or do not belong together.
    """
    from kvhub.data import calibrated_on
    from kvhub.package import Manifest, read_config
    from kvhub.prior import require_linear, require_original

    reference, base = _pinned(plan.mapper)
    name = plan.name or f"{base}-refit"
    path = mapper_path(name)
    recover(path)
    if path.exists() and not plan.overwrite:
        raise ConflictError(
            f"There is a mapper {name!r} already: {path}.",
            "Choose another --name, or pass --overwrite to replace it.",
        )
    package = find_mapper(reference)
    if package.resolve() == path.resolve():
        raise UsageError(
            f"The refit would replace the mapper {name!r} that it starts from.",
            "Choose another --name.",
        )
    config = read_config(package)[0]
    require_linear(config)
    _require_strength(plan.strength)
    if calibrated_on(config.calibration, plan.data):
        raise UsageError(
            f"{reference} was fitted on {plan.data} already; expected text that it has not seen.",
            "For more of the same text: kvhub fit with more --sequences.",
        )
    length = plan.length or config.calibration.get("length")
    if not isinstance(length, int):
        raise UsageError("Calibration had no one length.", "Choose one: --length 512.")
    original = None
    if plan.statistics is not None:
        from kvhub.stats import Statistics

        original = Statistics.load(plan.statistics)
        require_original(original, config)

    mapper, pair = load_mapper_pair(reference, plan.source, plan.target, plan.dtype, plan.device)
    statistics, held_out = _calibrate(plan, config, pair, length, track)
    strengths = (plan.strength,) if plan.strength is not None else None
    with track("Try strengths") as progress:
        refits, candidates = try_strengths(
            mapper, pair, statistics, held_out, strengths, original, progress
        )
    best = min(range(len(candidates)), key=lambda index: candidates[index].kl)
    found = Refitted(
        mapper=reference if find_local(reference) is None else package.name,
        name=name if best > 0 else None,
        path=str(path) if best > 0 else None,
        method="weights" if original is None else "statistics",
        sequences=statistics.provenance["sequences"],
        held_out_sequences=statistics.provenance["held_out_sequences"],
        candidates=tuple(candidates),
        best=candidates[best],
    )
    if not found.gained:
        say("Nothing gained: no strength is better than the mapper as it is. Nothing was written.")
        return found
    refitted = refits[best]
    calibration = dict(refitted.config.calibration)
    calibration["refit"] = {
        **calibration["refit"],
        "mapper": found.mapper,
        "mapper_digest": Manifest.read(package).digest,
        "held_out": {"before": asdict(candidates[0]), "after": asdict(candidates[best])},
    }
    refitted.config = replace(refitted.config, calibration=calibration)
    refitted.save_pretrained(path, overwrite=plan.overwrite)
    return found


def try_strengths(
    mapper: "KVMapper",
    pair: "LoadedPair",
    statistics: "Statistics",
    held_out: "list[TokenBatch]",
    strengths: Iterable[float] | None = None,
    original: "Statistics | None" = None,
    progress: Callable[[int, int], None] | None = None,
) -> "tuple[list[KVMapper], list[Candidate]]":
    """Refit with each strength and evaluate; both lists begin with the mapper as it is.

    Parameters
    ----------
    mapper, statistics, original
        As for `kvhub.prior.refit`.
    pair
        The two models.
    held_out
        Sequences of the text that `statistics` was not fitted on.
    strengths
        In tokens; None takes a grid relative to the tokens of `statistics`.
    progress
        Called with (mappers evaluated, mappers in all).
    """
    from kvhub.evaluation import evaluate
    from kvhub.prior import refit

    if strengths is None:
        shares = SHARES_OF_WEIGHTS if original is None else SHARES_OF_STATISTICS
        strengths = [share * statistics.tokens for share in shares]
    tried = [math.inf, *strengths]
    refits, candidates = [], []
    for done, strength in enumerate(tried, start=1):
        one = refit(mapper, statistics, strength=strength, original=original)
        report = evaluate(one.to(pair.target.device), pair.source, pair.target, held_out)
        mapped = report.settings["mapped"]
        refits.append(one)
        candidates.append(
            Candidate(
                strength=None if strength == math.inf else strength,
                kl=mapped.kl.value,
                agreement=mapped.agreement.value,
                key_r2=report.key_r2,
                value_r2=report.value_r2,
                attention_output_cosine=report.attention_output_cosine.value,
            )
        )
        if progress is not None:
            progress(done, len(tried))
    return refits, candidates


def _calibrate(
    plan: RefitPlan, config: "MapperConfig", pair: "LoadedPair", length: int, track: Track
) -> "tuple[Statistics, list[TokenBatch]]":
    """Statistics of the text, and the sequences that they hold out."""
    from kvhub.calibration import calibrate
    from kvhub.data import describe, token_batches

    def batches() -> "Iterator[TokenBatch]":
        return token_batches(
            pair.tokenizer,
            plan.data,
            sequences=plan.sequences,
            length=length,
            batch_size=max(1, ROWS_PER_BATCH // length),
        )

    with track("Calibrate") as progress:
        statistics = calibrate(
            pair.source,
            pair.target,
            batches(),
            source_spec=config.source,
            target_spec=config.target,
            heads=config.heads,
            weighting=config.weighting,
            stride=plan.stride,
            held_out_every=HELD_OUT_EVERY,
            provenance={**describe(plan.data), "length": length},
            progress=progress,
        )
    return statistics, list(held_out_part(batches(), HELD_OUT_EVERY))


def held_out_part(batches: "Iterable[TokenBatch]", every: int) -> "Iterator[TokenBatch]":
    """The sequences that `calibrate` keeps apart with `held_out_every=every`."""
    from kvhub.data import TokenBatch

    for batch in batches:
        rows = [row for row, index in enumerate(batch.sequence_ids) if index % every == every - 1]
        if rows:
            ids = tuple(batch.sequence_ids[row] for row in rows)
            yield TokenBatch(batch.input_ids[rows], batch.attention_mask[rows], ids)


def _pinned(mapper: str) -> tuple[str, str]:
    """A mapper's name, on the Hub with the version that it means now; and its bare name."""
    local = find_local(mapper)
    if local is not None:
        return mapper, local.resolve().name
    from kvhub.versions import is_reference, parse_reference

    if not is_reference(mapper):
        return mapper, mapper  # `find_mapper` says what there is
    from kvhub.hub import resolve

    resolved = resolve(parse_reference(mapper))
    return str(resolved), resolved.repo_id.rpartition("/")[2]


def _require_strength(strength: float | None) -> None:
    if strength is not None and not 0 <= strength < math.inf:
        raise UsageError(
            f"The strength must be at least 0 and finite, in tokens; found {strength}.",
            "Leave --strength out to have several tried.",
        )
