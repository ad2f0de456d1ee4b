"""Who computed which tokens of a cache, and what of them may go into another model's cache.

A model's state of a token is of one of three kinds:

    exact    computed by the model, with nothing mapped before it: what a prefill would give
    own      computed by the model on top of mapped states, so it inherits their error
    mapped   mapped from the state of another model

A mapped state is never mapped again: the error of the first map would go through the second. It
is not needed either, since some model read every token first and holds its own state of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias

__all__ = [
    "Kind",
    "Piece",
    "Span",
    "append_span",
    "common_prefix",
    "count_kind",
    "crop_spans",
    "plan_pieces",
]

Kind: TypeAlias = Literal["exact", "own", "mapped"]


@dataclass(frozen=True)
class Span:
    """The tokens `start` to `stop` - 1 of a cache, all of one kind.

    Attributes
    ----------
    start, stop
        Positions, counted from the start of the text.
    kind
        See the module's description.
    origin
        The model that mapped states were mapped from; None for the other kinds.
    """

    start: int
    stop: int
    kind: Kind
    origin: str | None = None


@dataclass(frozen=True)
class Piece:
    """The tokens `start` to `stop` - 1 that a cache lacks, and how it gets them.

    Attributes
    ----------
    start, stop
        Positions, counted from the start of the text.
    origin
        The model to map from; None: computed by the model itself.
    read_elsewhere
        Whether another model has read these tokens, but has no state of them that can be mapped:
        its own are mapped, or no mapper leads from it.
    """

    start: int
    stop: int
    origin: str | None = None
    read_elsewhere: bool = False


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts share from the start."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def crop_spans(spans: Sequence[Span], stop: int) -> tuple[Span, ...]:
    """What lies before `stop`."""
    return tuple(replace(span, stop=min(span.stop, stop)) for span in spans if span.start < stop)


def append_span(spans: Sequence[Span], stop: int, origin: str | None) -> tuple[Span, ...]:
    """The spans, gone on up to `stop`: mapped from `origin`, or computed if that is None."""
    start = spans[-1].stop if spans else 0
    if stop <= start:
        return tuple(spans)
    kind: Kind = "exact"
    if origin is not None:
        kind = "mapped"
    elif any(span.kind != "exact" for span in spans):
        kind = "own"
    added = Span(start, stop, kind, origin)
    if spans and (spans[-1].kind, spans[-1].origin) == (kind, origin):
        return (*spans[:-1], replace(spans[-1], stop=stop))
    return (*spans, added)


def count_kind(spans: Sequence[Span], kind: Kind) -> int:
    """How many tokens are of a kind."""
    return sum(span.stop - span.start for span in spans if span.kind == kind)


def plan_pieces(
    kept: int,
    tokens: int,
    others: Mapping[str, Sequence[Span]],
    mappable: Sequence[str],
    exact_prefix: int,
) -> list[Piece]:
    """Divide the tokens that a cache lacks into what is mapped and what is computed.

    Parameters
    ----------
    kept
        How many tokens the cache has; fewer than `tokens`.
    tokens
        Of the whole prompt.
    others
        By model, the spans of its cache that belong to this very prompt.
    mappable
        The models in `others` from which a mapper leads here; the first one that has a state
        computed by itself is mapped from.
    exact_prefix
        So many tokens at the start are never mapped.

    Returns
    -------
    pieces
        From `kept` to `tokens` without a gap. The last one is computed, and has at least the last
        token of the prompt: the model needs one to predict from.
    """
    # Nobody's states matter outside the region that may be mapped.
    first, last = min(max(kept, exact_prefix), tokens - 1), tokens - 1
    edges = {kept, first, last, tokens}
    for spans in others.values():
        edges.update(edge for span in spans for edge in (span.start, span.stop))
    inside = sorted(edge for edge in edges if kept <= edge <= tokens)
    pieces: list[Piece] = []
    for start, stop in pairwise(inside):
        piece = Piece(start, stop)
        if first <= start < last:
            holders = dict(_holders(start, others))
            origin = next(
                (name for name in mappable if holders.get(name, "mapped") != "mapped"), None
            )
            piece = Piece(start, stop, origin, origin is None and bool(holders))
        if pieces and _alike(pieces[-1], piece):
            pieces[-1] = replace(pieces[-1], stop=stop)
        else:
            pieces.append(piece)
    return pieces


def _holders(position: int, others: Mapping[str, Sequence[Span]]) -> Iterator[tuple[str, Kind]]:
    """Which models have a state of this token, and of which kind."""
    for name, spans in others.items():
        for span in spans:
            if span.start <= position < span.stop:
                yield name, span.kind


def _alike(a: Piece, b: Piece) -> bool:
    return (a.origin, a.read_elsewhere) == (b.origin, b.read_elsewhere)
