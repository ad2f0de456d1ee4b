"""Telling whether two tokenizers give the same ids for the same text."""

import hashlib
import json
from pathlib import Path
from typing import Any

from kvhub.errors import VerificationError


def tokenizer_digest(tokenizer: Any) -> str | None:
    """Return a sha256 of everything that decides which ids a text becomes.

    That is the model (vocabulary, merges and flags), the added tokens, the normalizer and the
    pre-tokenizer. The post-processor, padding, truncation and the chat template are left out: they
    add tokens around a text, but do not change its own.

    Parameters
    ----------
    tokenizer
        A fast transformers tokenizer or a `tokenizers.Tokenizer`.

    Returns
    -------
    str or None
        None for a tokenizer that is not built on the `tokenizers` library, which cannot be
        compared with one that is.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        return None
    state = json.loads(backend.to_str())
    canonical = {
        "model": _canonical_model(state["model"]),
        "added_tokens": _canonical_added_tokens(state["added_tokens"]),
        "normalizer": _without(state["normalizer"], (None,)),
        "pre_tokenizer": _without(state["pre_tokenizer"], (None,)),
    }
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str | None:
    """Return the `tokenizer_digest` of a tokenizer.json file.

    Raises
    ------
    VerificationError
        If the installed `tokenizers` library cannot read the file.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise VerificationError(
            f"Expected a tokenizer in {path}, found a file that cannot be read: {error}.",
            "Download the model again, or upgrade the tokenizers library.",
        ) from error
    return tokenizer_digest(tokenizer)


def token_differences(
    source_tokenizer: Any, target_tokenizer: Any, limit: int = 10
) -> list[tuple[int, str | None, str | None]]:
    """List the ids that mean different tokens in two tokenizers, lowest first.

    Parameters
    ----------
    source_tokenizer, target_tokenizer
        Tokenizers with ``get_vocab()``.
    limit
        How many to list at most.

    Returns
    -------
    list of (id, source token, target token)
        None where a tokenizer has no token of that id. Empty if the vocabularies agree, which
        does not rule out that merges, normalizer or pre-tokenizer differ.
    """
    source, target = _tokens_by_id(source_tokenizer), _tokens_by_id(target_tokenizer)
    different = sorted(i for i in source.keys() | target.keys() if source.get(i) != target.get(i))
    return [(i, source.get(i), target.get(i)) for i in different[:limit]]


def _tokens_by_id(tokenizer: Any) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _canonical_model(model: dict[str, Any]) -> dict[str, Any]:
    """Drop what does not change ids; give old and new serialised forms of merges one form."""
    canonical = {
        # An absent flag and a false one, an absent affix and an empty one, behave alike.
        name: value
        for name, value in model.items()
        if value not in (None, False, "")
    }
    if "merges" in model:
        canonical["merges"] = [
            merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]
        ]
    return canonical


def _canonical_added_tokens(added_tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # `special` only matters for decoding; all that it changes in matching is stated beside it.
    kept = [{k: v for k, v in token.items() if k != "special"} for token in added_tokens]
    return sorted(kept, key=lambda token: token["id"])


def _without(value: Any, dropped: tuple[Any, ...]) -> Any:
    if isinstance(value, dict):
        return {k: _without(v, dropped) for k, v in value.items() if v not in dropped}
    if isinstance(value, list):
        return [_without(item, dropped) for item in value]
    return value
