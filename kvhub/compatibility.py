"""Deciding whether one model's cache can be mapped into another's, as data with reasons."""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from kvhub.architectures import SUPPORTED_ROPE_TYPES
from kvhub.errors import IncompatiblePairError, UsageError
from kvhub.spec import ModelSpec, RopeSpec

logger = logging.getLogger(__name__)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
Heads: TypeAlias = Literal["all", "matched"]
Verdict: TypeAlias = Literal["ok", "warn", "refuse"]


@dataclass(frozen=True)
class Decision:
    """One thing that was compared.

    Attributes
    ----------
    field
        What was compared, e.g. "head_dim".
    source, target
        The value of each model, as JSON values.
    verdict
        "ok"; "warn" if a mapper can be fitted but may disappoint; "refuse" if none can be fitted.
    reason
        Why, in one sentence.
    """

    field: str
    source: object
    target: object
    verdict: Verdict
    reason: str


def compare_pair(source: ModelSpec, target: ModelSpec, heads: Heads = "all") -> list[Decision]:
    """Compare everything that matters for a mapper from `source` to `target`.

    Parameters
    ----------
    source, target
        The model whose cache is read and the model that continues from it.
    heads
        "all" maps all KV heads of the source to each of the target; "matched" maps head i to
        head i, which needs as many on both sides.

    Returns
    -------
    list of Decision
        One for each field, whatever its verdict, always in the same order.

    Raises
    ------
    UsageError
        If `heads` is neither "all" nor "matched".
    """
    if heads not in ("all", "matched"):
        raise UsageError(f"Expected heads to be 'all' or 'matched', found {heads!r}.")
    return list(_decisions(source, target, heads))


def check_pair(source: ModelSpec, target: ModelSpec, heads: Heads = "all") -> list[Decision]:
    """Return the decisions of `compare_pair` that refuse the pair; empty means compatible."""
    return [d for d in compare_pair(source, target, heads) if d.verdict == "refuse"]


def require_pair(source: ModelSpec, target: ModelSpec, heads: Heads = "all") -> None:
    """Raise unless a mapper from `source` to `target` can be fitted.

    Raises
    ------
    IncompatiblePairError
        If anything refuses the pair; the message lists all that does.
    """
    refusals = check_pair(source, target, heads)
    if not refusals:
        return
    details = "; ".join(
        f"{d.field} is {d.source} in the source and {d.target} in the target: {d.reason}"
        for d in refusals
    )
    if [d.field for d in refusals] == ["kv_heads"]:
        hint = 'Use heads="all" (--heads all).'
    else:
        hint = f"See every decision: kvhub check {source.model_id} {target.model_id}"
    raise IncompatiblePairError(
        f"{_name(source)} cannot be mapped to {_name(target)}: {details}.", hint
    )


@dataclass(frozen=True)
class Match:
    """One thing about a model at hand beside what was stored when a mapper was fitted.

    Attributes
    ----------
    field
        What was compared.
    expected, found
        The stored value and the model's, as JSON values or text.
    verdict
        "ok"; "warn" if the caches should be the same but that cannot be told from here; "refuse"
        if a mapped cache would be wrong.
    reason
        Why, in one sentence.
    """

    field: str
    expected: object
    found: object
    verdict: Verdict
    reason: str


def compare_model(expected: ModelSpec, found: ModelSpec) -> list[Match]:
    """Compare a model at hand with the stored spec of the one that a mapper was fitted for.

    Dtypes and vocabulary padding may differ. Frequencies may differ by rounding, because they
    depend on the machine that computed them. Local models have no commit to compare.
    """
    result = []
    names = ["model_type", "num_layers", "attention_heads", "kv_heads", "head_dim", "hidden_size"]
    names += ["qk_norm", "layer_types", "sliding_window"]
    if expected.tokenizer_digest is not None and found.tokenizer_digest is not None:
        names.append("tokenizer_digest")
    for name in names:
        a, b = getattr(expected, name), getattr(found, name)
        verdict: Verdict = "ok" if a == b else "refuse"
        reason = "equal" if a == b else "such a model writes another cache"
        result.append(Match(name, a, b, verdict, reason))
    same = _same_rope(expected.rope, found.rope)
    result.append(
        Match(
            "RoPE",
            _rope_text(expected.rope, full=True),
            _rope_text(found.rope, full=True),
            "ok" if same else "refuse",
            "equal" if same else "its keys are rotated otherwise",
        )
    )
    if HUB_ID.fullmatch(expected.model_id) and HUB_ID.fullmatch(found.model_id):
        for name in ("model_id", "revision"):
            a, b = getattr(expected, name), getattr(found, name)
            if name == "revision" and (a is None or b is None):
                continue
            verdict = "ok" if a == b else "warn"
            reason = "equal" if a == b else "other weights write another cache, if they differ"
            result.append(Match(name, a, b, verdict, reason))
    return result


def require_same(expected: ModelSpec, found: ModelSpec, role: str) -> None:
    """Raise unless a live model writes the cache that a stored spec describes.

    A model of another name or commit is reported once to the log, as a warning.

    Parameters
    ----------
    expected
        The spec stored in a mapper or in statistics.
    found
        The spec of the model at hand.
    role
        "source" or "target", for the message.

    Raises
    ------
    IncompatiblePairError
        If geometry, layer types, RoPE, or two known tokenizers differ.
    """
    matches = compare_model(expected, found)
    refused = [match for match in matches if match.verdict == "refuse"]
    if refused:
        differences = "; ".join(f"{m.field} {m.expected} but found {m.found}" for m in refused)
        raise IncompatiblePairError(
            f"The {role} model {_name(found)} is not the one that was fitted: "
            f"expected {differences}.",
            f"Load {_name(expected)}, or fit a mapper for this model.",
        )
    for match in matches:
        if match.verdict == "warn":
            _warn_once(
                f"The mapper was fitted for the {role} {match.field} {match.expected}; found "
                f"{match.found}: {match.reason}."
            )


@lru_cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def _decisions(source: ModelSpec, target: ModelSpec, heads: Heads) -> Iterator[Decision]:
    def decide(field: str, a: object, b: object, verdict: Verdict, reason: str) -> Decision:
        return Decision(field, a, b, verdict, reason)

    unsupported = source.unsupported + target.unsupported
    yield decide(
        "support",
        "; ".join(source.unsupported) or "supported",
        "; ".join(target.unsupported) or "supported",
        "refuse" if unsupported else "ok",
        "kvhub cannot map such a cache" if unsupported else "both write a cache that can be mapped",
    )
    yield decide(
        "model_type",
        source.model_type,
        target.model_type,
        "ok" if source.model_type == target.model_type else "warn",
        "the same architecture"
        if source.model_type == target.model_type
        else "caches of different architectures are less alike, expect a worse mapper",
    )
    yield decide(
        "num_layers",
        source.num_layers,
        target.num_layers,
        "ok",
        "each target layer selects its own source layers",
    )
    yield _kv_heads(source, target, heads)
    yield decide(
        "head_dim",
        source.head_dim,
        target.head_dim,
        "ok",
        "equal"
        if source.head_dim == target.head_dim
        else "the map is linear between any two sizes",
    )
    yield _rope(source, target)
    yield _layer_types(source, target)
    sliding = source.sliding_window is not None or target.sliding_window is not None
    yield decide(
        "sliding_window",
        source.sliding_window,
        target.sliding_window,
        "refuse" if sliding else "ok",
        "a cache behind a window has lost the earlier tokens" if sliding else "none is active",
    )
    yield _tokenizer(source, target)
    yield _vocab_size(source, target)
    shorter = target.max_positions < source.max_positions
    yield decide(
        "max_positions",
        source.max_positions,
        target.max_positions,
        "warn" if shorter else "ok",
        f"contexts over {target.max_positions} tokens fit the source only"
        if shorter
        else "the target takes every context of the source",
    )
    yield decide("dtype", source.dtype, target.dtype, "ok", "the map computes in float32 and casts")


def _kv_heads(source: ModelSpec, target: ModelSpec, heads: Heads) -> Decision:
    verdict: Verdict = "ok"
    if source.kv_heads == target.kv_heads:
        reason = "equal, so heads can also be matched one to one"
    elif heads == "all":
        reason = "each target head reads all source heads"
    else:
        verdict = "refuse"
        reason = "matched heads need as many KV heads on both sides"
    return Decision("kv_heads", source.kv_heads, target.kv_heads, verdict, reason)


def _rope(source: ModelSpec, target: ModelSpec) -> Decision:
    ropes = (source.rope, target.rope)
    verdict: Verdict = "ok"
    if any(rope is None or rope.rope_type not in SUPPORTED_ROPE_TYPES for rope in ropes):
        verdict = "refuse"
        reason = f"keys must be rotated by RoPE of type {', '.join(SUPPORTED_ROPE_TYPES)}"
    elif _same_rope(*ropes):
        reason = "equal"
    else:
        reason = "removed from source keys and applied anew with the target's own frequencies"
    return Decision("rope", _rope_text(source.rope), _rope_text(target.rope), verdict, reason)


def _layer_types(source: ModelSpec, target: ModelSpec) -> Decision:
    full = set(source.layer_types + target.layer_types) <= {"full_attention"}
    return Decision(
        "layer_types",
        _counts(source.layer_types),
        _counts(target.layer_types),
        "ok" if full else "refuse",
        "every layer caches every token" if full else "every layer must be full_attention",
    )


def _tokenizer(source: ModelSpec, target: ModelSpec) -> Decision:
    digests = (source.tokenizer_digest, target.tokenizer_digest)
    verdict: Verdict = "ok"
    if None in digests:
        verdict = "warn"
        reason = "not known for both; a mapper is wrong unless every text gives the same ids"
    elif digests[0] == digests[1]:
        reason = "the same ids for every text"
    else:
        verdict = "refuse"
        reason = "a cached token must mean the same token to both models"
    return Decision("tokenizer", *digests, verdict, reason)


def _vocab_size(source: ModelSpec, target: ModelSpec) -> Decision:
    verdict: Verdict = "ok"
    if source.vocab_size == target.vocab_size:
        reason = "equal"
    elif source.tokenizer_digest is not None and source.tokenizer_digest == target.tokenizer_digest:
        reason = "the same tokenizer, embeddings padded to another size"
    else:
        verdict = "warn"
        reason = "the tokenizers may differ"
    return Decision("vocab_size", source.vocab_size, target.vocab_size, verdict, reason)


def _same_rope(first: RopeSpec | None, second: RopeSpec | None) -> bool:
    """Whether two models rotate alike; the parameters behind the frequencies do not matter."""
    if first is None or second is None:
        return first is second
    return (
        first.rope_type == second.rope_type
        and first.rotary_dim == second.rotary_dim
        and first.interleaved == second.interleaved
        and math.isclose(first.attention_scaling, second.attention_scaling, rel_tol=1e-6)
        and all(
            math.isclose(a, b, rel_tol=1e-6)
            for a, b in zip(first.inv_freq, second.inv_freq, strict=True)
        )
    )


def _rope_text(rope: RopeSpec | None, full: bool = False) -> str:
    if rope is None:
        return "none"
    text = f"{rope.rope_type}, theta {rope.rope_theta:g}, {rope.rotary_dim} dims"
    if rope.interleaved:
        text += ", interleaved"
    for name, value in rope.parameters:
        if full or name == "factor":
            text += f", {name} {value}"
    if full:
        text += f", attention scaling {rope.attention_scaling:g}"
    return text


def _counts(layer_types: tuple[str, ...]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(layer_types).items()))


def _name(spec: ModelSpec) -> str:
    return spec.model_id or f"a {spec.model_type} model"
