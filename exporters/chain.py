"""Which cache entry belongs to which tokens: a chain of digests, one link per chunk.

A chunk's key depends on every token before it and on all that its states depend on, so two
prompts share an entry exactly as far as they are equal. Two engines that agree on a `Namespace`
find each other's entries, whatever their block sizes are.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from kvhub.errors import UsageError

__all__ = ["LAYOUT_VERSION", "Namespace", "chunk_keys", "shard_key"]

# Of an entry's states: [layers, 2, kv_heads, tokens, head_dim], keys rotated, little-endian.
LAYOUT_VERSION = "lkhtd-1"


@dataclass(frozen=True)
class Namespace:
    """What the states of some tokens depend on, besides the tokens.

    Whatever is unknown must not be left out: without it two different caches would share keys.

    Attributes
    ----------
    model, revision
        Whose states, and at which commit or digest of its weights.
    tokenizer_digest, rope_digest
        Of the tokenizer that made the tokens, and of what rotates the keys.
    kv_dtype
        As `torch` names it, without `torch.`.
    num_layers, kv_heads, head_dim
        The whole model's, also where an entry is a shard of its heads.
    chunk_tokens
        Tokens per entry, a power of two.
    layout
        The order of the dims.
    chat_template_digest
        Empty where prompts are not made by one.

    Raises
    ------
    UsageError
        Something is empty, not a positive number, or `chunk_tokens` is not a power of two.
    """

    model: str
    revision: str
    tokenizer_digest: str
    rope_digest: str
    kv_dtype: str
    num_layers: int
    kv_heads: int
    head_dim: int
    chunk_tokens: int = 32
    layout: str = LAYOUT_VERSION
    chat_template_digest: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise UsageError(f"{field.name} must be a positive int, found {value!r}.")
            required = field.name != "chat_template_digest"
            if field.type is str and (not isinstance(value, str) or (required and not value)):
                raise UsageError(
                    f"{field.name} must be a str that is not empty, found {value!r}.",
                    "A cache of which this is not known cannot be used again.",
                )
        if self.chunk_tokens & (self.chunk_tokens - 1):
            raise UsageError(f"chunk_tokens must be a power of two, found {self.chunk_tokens}.")

    @property
    def digest(self) -> str:
        """Hex; equal exactly where every field is."""
        return _digest((field.name, str(getattr(self, field.name))) for field in fields(self)).hex()


def chunk_keys(
    namespace: Namespace,
    tokens: Sequence[int],
    *,
    salt: str | None,
    lora: int | None,
    exact: bool,
) -> list[str]:
    """The keys of a prompt's complete chunks, the first one first. They are safe as file names.

    Parameters
    ----------
    namespace
        Whose states.
    tokens
        From the prompt's first on. Those behind the last complete chunk have no key.
    salt
        The request's cache salt. None is not the empty salt.
    lora
        The adapter's id. None is not adapter 0.
    exact
        Whether the model computed these states itself, from states that it computed itself.

    Raises
    ------
    UsageError
        A token or the adapter is not an integer from 0 up to 2**63 - 1.
    """
    try:
        numbers = array("q", tokens)
        array("q", [] if lora is None else [lora])
    except (OverflowError, TypeError) as error:
        raise UsageError(f"Tokens and adapters must be from 0 to 2**63 - 1: {error}.") from error
    if min(numbers, default=0) < 0 or (lora is not None and lora < 0):
        raise UsageError(
            f"Tokens and adapters must be from 0 to 2**63 - 1, found {min(*numbers, lora or 0)}.",
            "Prompts with placeholders for images have no keys.",
        )
    if sys.byteorder == "big":
        numbers.byteswap()
    # Absent is another tag, so that no value can look like it.
    parts = [("namespace", namespace.digest), ("exact", str(bool(exact)))]
    parts.append(("no salt", "") if salt is None else ("salt", salt))
    parts.append(("no lora", "") if lora is None else ("lora", str(lora)))
    parent, keys = _digest(parts), []
    size = namespace.chunk_tokens
    for start in range(0, len(numbers) - size + 1, size):
        chunk = numbers[start : start + size].tobytes()
        parent = hashlib.blake2b(parent + chunk, digest_size=16, person=b"kvhub-chunk").digest()
        keys.append(parent.hex())
    return keys


def shard_key(key: str, start: int, stop: int) -> str:
    """The key of KV heads `start` up to `stop` of an entry.

    Raises
    ------
    UsageError
        There are no such heads.
    """
    if not 0 <= start < stop:
        raise UsageError(f"Expected heads 0 <= start < stop, found {start} and {stop}.")
    return f"{key}-{start}-{stop}"


def _digest(parts: Iterable[tuple[str, str]]) -> bytes:
    digest = hashlib.blake2b(digest_size=16, person=b"kvhub-seed")
    for part in parts:
        for text in part:
            data = text.encode("utf-8", "surrogatepass")
            # The length first: otherwise ("a", "bc") would be ("ab", "c").
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
