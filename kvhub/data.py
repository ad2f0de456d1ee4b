"""Token sequences for calibration and evaluation.

Every sequence has an index that depends on the data, the tokenizer and the length alone. So ranks
can share the work, a killed run can go on, and evaluation can use sequences that calibration
never saw, all by index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.corpus import describe, documents, kind_of
from kvhub.errors import UsageError
from kvhub.library import HELD_OUT_MODULES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "HELD_OUT_MODULES",
    "TokenBatch",
    "calibrated_on",
    "describe",
    "evaluation_stream",
    "token_batches",
]

_SHORTEST = 16  # tokens of a document worth a sequence
_TOKENIZED_TOGETHER = 32  # documents
_PASSAGE_CHARACTERS = 16  # per token of a sequence, so that a passage gives about four


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Some sequences, padded on the right to the longest of them.

    Attributes
    ----------
    input_ids
        [batch, tokens], int64.
    attention_mask
        [batch, tokens], int64: 1 at a token, 0 at padding.
    sequence_ids
        [batch]: the index of each sequence in the data.
    """

    input_ids: Tensor
    attention_mask: Tensor
    sequence_ids: tuple[int, ...]


def token_batches(
    tokenizer: PreTrainedTokenizerBase,
    data: str,
    *,
    sequences: int,
    length: int,
    batch_size: int = 4,
    start: int = 0,
    rank: int = 0,
    world_size: int = 1,
    text_field: str = "text",
) -> Iterator[TokenBatch]:
    """Tokenize a text into sequences `start` to `start + sequences - 1`, in order.

    Each document is cut into sequences of exactly `length` tokens; what is left at its end is
    dropped. A document shorter than that is one short sequence, and one below 16 tokens none.
    If the tokenizer opens a text with its BOS token, it opens every sequence, because every
    prompt that is handed off starts with it too. Documents never share a sequence.

    To evaluate on other sequences than `calibrate` saw, start behind them: `evaluation_stream`.
    To go on after sequence `n - 1`, pass `start=n` and what is left as `sequences`.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer; source and target must share it.
    data
        `stdlib`, `stdlib-held-out`, `english`, a path or a dataset id: see `kvhub.corpus`.
    sequences
        How many, over all ranks.
    length
        Tokens per sequence, BOS included.
    batch_size
        Sequences per batch; the last batch may have fewer.
    start
        Index of the first sequence.
    rank, world_size
        This process takes the sequences whose index is `rank` modulo `world_size`. Each process
        tokenizes all the text, which costs little beside running a model over its part.
    text_field
        The field or column with the text, for .jsonl, .parquet and datasets.

    Returns
    -------
    iterator of TokenBatch
        Its `len` is the number of batches, all together.

    Raises
    ------
    UsageError
        If an argument is out of range, the text cannot be read, or it has too few sequences. Of
        built-in texts and files they are counted before this function returns; of a dataset on
        the Hub, which is read as it arrives, at its end.
    NotFoundError, AuthError, NetworkError
        If the data is not there, not accessible, or the Hub cannot be reached.
    """
    for name, value, least in (
        ("sequences", sequences, 1),
        ("length", length, 2),
        ("batch_size", batch_size, 1),
        ("start", start, 0),
        ("world_size", world_size, 1),
        ("rank", rank, 0),
    ):
        if value < least:
            raise UsageError(f"{name} is {value}, expected at least {least}.")
    if rank >= world_size:
        raise UsageError(f"rank is {rank}, expected below world_size, which is {world_size}.")

    def stream() -> Iterator[list[int]]:
        texts = documents(data, text_field=text_field, passage=_PASSAGE_CHARACTERS * length)
        return islice(_sequences(tokenizer, texts, length), start + sequences)

    tokens = stream()
    if kind_of(data) != "dataset":
        _require(sum(1 for _ in tokens), sequences, start, data, length)
        tokens = stream()

    def batches() -> Iterator[TokenBatch]:
        padding = tokenizer.pad_token_id or 0
        found = 0
        batch: dict[int, list[int]] = {}
        for index, ids in enumerate(tokens):
            found = index + 1
            if index >= start and index % world_size == rank:
                batch[index] = ids
            if len(batch) == batch_size:
                yield _padded(batch, padding)
                batch = {}
        _require(found, sequences, start, data, length)
        if batch:
            yield _padded(batch, padding)

    own = sum(index % world_size == rank for index in range(start, start + sequences))
    return _SizedBatches(batches(), math.ceil(own / batch_size))


class _SizedBatches(Iterator[TokenBatch]):
    """Batches whose number is known before they are made, so that progress has a total."""

    def __init__(self, batches: Iterator[TokenBatch], count: int) -> None:
        self._batches = batches
        self._count = count

    def __next__(self) -> TokenBatch:
        return next(self._batches)

    def __len__(self) -> int:
        return self._count


def evaluation_stream(
    calibration: dict[str, Any], data: str | None = None, length: int | None = None
) -> tuple[str, int, int]:
    """Choose text for an evaluation that calibration has not seen.

    Parameters
    ----------
    calibration
        `MapperConfig.calibration`: what calibration used.
    data
        Text to evaluate on; None for calibration's own.
    length
        Tokens per sequence; None for calibration's.

    Returns
    -------
    tuple of str, int and int
        `data`, `start` and `length` for `token_batches`. Of calibration's own text these are the
        sequences behind those that it saw; in place of `stdlib` it is `stdlib-held-out`, which
        the embedded models' training did not see either.

    Raises
    ------
    UsageError
        Calibration's own text is not known by a name that finds it, or its sequences cannot be
        told from those of `length` tokens.
    """
    used, used_length = calibration.get("data"), calibration.get("length")
    tokens = length or used_length
    if not isinstance(tokens, int):
        raise UsageError("Calibration had no one length.", "Choose one: --length 512.")
    findable = isinstance(used, str) and calibration.get("kind") != "files"
    if data is None and not findable:
        raise UsageError(
            f"Calibration used {used or 'text of its own'}, and a mapper does not record where "
            "local or merged text is.",
            "Name the text to evaluate on: --data FILE.",
        )
    data = data or str(used)
    if data == used == "stdlib":
        return "stdlib-held-out", 0, tokens
    seen = calibrated_on(calibration, data)
    if seen is None:
        return data, 0, tokens
    if not isinstance(seen["data"], str) or tokens != seen.get("length"):
        raise UsageError(
            f"Calibration used {seen['data']} in sequences of {seen.get('length')} tokens; "
            f"which of those of {tokens} tokens it has seen cannot be told.",
            "Leave --length out, or evaluate on other text with --data.",
        )
    return data, seen["sequences"], tokens


def calibrated_on(calibration: dict[str, Any], data: str) -> dict[str, Any] | None:
    """The record of a calibration, refit or repair on a text or another version of it."""
    about = describe(data)
    # A file may have any name; built-in texts and datasets keep theirs when they change.
    key = "sha256" if about["kind"] == "files" else "data"
    record: dict[str, Any] | None = calibration
    while record is not None:
        used = record.get(key)
        if about[key] in (used if isinstance(used, list) else [used]):
            return record
        record = record.get("refit") or record.get("repair")
    return None


def _sequences(
    tokenizer: PreTrainedTokenizerBase, texts: Iterator[str], length: int
) -> Iterator[list[int]]:
    """Yield token ids, opened by BOS where the tokenizer opens texts with it."""
    opening = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id][:1]
    room = length - len(opening)
    shortest = min(_SHORTEST, room)
    while group := list(islice(texts, _TOKENIZED_TOGETHER)):
        for ids in tokenizer(group, add_special_tokens=False, verbose=False)["input_ids"]:
            if shortest <= len(ids) < room:
                yield opening + ids
            for end in range(room, len(ids) + 1, room):
                yield opening + ids[end - room : end]


def _padded(batch: dict[int, list[int]], padding: int) -> TokenBatch:
    longest = max(map(len, batch.values()))
    input_ids = torch.full((len(batch), longest), padding)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(batch.values()):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        attention_mask[row, : len(ids)] = 1
    return TokenBatch(input_ids, attention_mask, tuple(batch))


def _require(found: int, sequences: int, start: int, data: str, length: int) -> None:
    if found < start + sequences:
        behind = f" after the first {start}" if start else ""
        raise UsageError(
            f"{data} has {max(0, found - start)} sequences of {length} tokens{behind}, "
            f"expected {sequences}.",
            "Ask for fewer or shorter sequences, or add text.",
        )
