"""A conversation that models take turns in, each with a cache of its own that is never read twice.

Each turn brings the whole prompt, as the chat template renders it. The model of the turn

1. keeps its cache of the tokens that are unchanged from the start, however the template dropped or
   rewrote the rest;
2. gets what other models have read since from their caches, through a mapper;
3. computes the rest itself: the first tokens, the new ones, and always the last one.

Only what is new is mapped, once, and nothing that a model computed itself is replaced by it. Which
tokens are what is on record: see `kvhub.spans`.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.cache import (
    build_cache,
    cache_argument,
    cache_of,
    concatenate_caches,
    crop_cache,
    move_cache,
    prefill,
    read_cache,
)
from kvhub.compatibility import require_pair, require_same
from kvhub.errors import IncompatiblePairError, UsageError, VerificationError
from kvhub.generation import EXACT_PREFIX
from kvhub.mapper import KVMapper
from kvhub.spans import (
    Span,
    append_span,
    common_prefix,
    count_kind,
    crop_spans,
    plan_pieces,
)
from kvhub.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import Cache, DynamicCache, PreTrainedModel

__all__ = ["Conversation", "Turn"]

# Options of `generate` that a conversation sets itself, or without which it has no cache.
_OWN_OPTIONS = (
    "attention_mask",
    "cache",
    "past_key_values",
    "return_dict_in_generate",
    "use_cache",
)


@dataclass(frozen=True)
class Turn:
    """What one turn did with its prompt, in tokens.

    The prompt is `kept_exact + kept_own + kept_mapped + mapped + computed`.

    Attributes
    ----------
    model
        Whose turn it was.
    prompt_tokens
        Of the whole prompt.
    kept_exact, kept_own, kept_mapped
        Already in the model's cache, by kind: see `kvhub.spans`.
    mapped
        Mapped in this turn from other models' caches.
    computed
        Run through the model in this turn.
    reprefilled
        Those of `computed` that another model had read too, but that could not be mapped: no
        mapper leads here from it, or its states of them are mapped themselves.
    new_tokens
        Generated.
    seconds
        From the call to its answer.
    """

    model: str
    prompt_tokens: int
    kept_exact: int
    kept_own: int
    kept_mapped: int
    mapped: int
    computed: int
    reprefilled: int
    new_tokens: int
    seconds: float


@dataclass(frozen=True)
class _Memory:
    """A model's cache: of which tokens, and who computed them."""

    ids: list[int]
    spans: tuple[Span, ...]
    cache: "Cache"


class Conversation:
    """Models that take turns in one text.

    Parameters
    ----------
    models
        By a name of your choice, such as `source` and `target`. They must share a tokenizer, and
        may be on different devices.
    mappers
        By (name of the model it maps from, name of the model it maps to). Where none leads to a
        model, it reads what it has missed by itself, exactly, and its `Turn` says so.
    exact_prefix
        How many tokens at the start every model computes itself: they collect attention whatever
        they say, and a linear map hits them badly.

    Attributes
    ----------
    turns
        A `Turn` for every call so far.

    Raises
    ------
    UsageError
        A mapper between models that are not named, or a negative `exact_prefix`.
    IncompatiblePairError
        A mapper was fitted for other models, or for another tokenizer than another mapper; or a
        model does not keep every token, as behind a sliding window.

    Notes
    -----
    One row at a time: rows of a batch would part after the first reply, each with its own history.
    A turn that fails leaves everything as it was before.
    """

    def __init__(
        self,
        models: "Mapping[str, PreTrainedModel]",
        mappers: Mapping[tuple[str, str], KVMapper],
        *,
        exact_prefix: int = EXACT_PREFIX,
    ) -> None:
        if exact_prefix < 0:
            raise UsageError(f"exact_prefix must be at least 0; found {exact_prefix}.")
        specs = {name: ModelSpec.from_model(model) for name, model in models.items()}
        for spec in specs.values():
            # A cache that forgets tokens, as behind a sliding window, cannot be cropped either.
            require_pair(spec, spec)
        for pair, mapper in mappers.items():
            unknown = set(pair) - set(models)
            if unknown or len(set(pair)) != 2:
                raise UsageError(
                    f"A mapper leads from one model to another of {sorted(models)}; found {pair}.",
                    "Name both models in `models`, and the mapper by (from, to).",
                )
            require_same(mapper.config.source, specs[pair[0]], "source")
            require_same(mapper.config.target, specs[pair[1]], "target")
        _require_one_tokenizer(mappers)
        self.turns: list[Turn] = []
        self._models = dict(models)
        self._specs = specs
        self._mappers = dict(mappers)
        self._exact_prefix = exact_prefix
        self._memories: dict[str, _Memory] = {}
        self._text: list[int] = []

    @property
    def input_ids(self) -> Tensor:
        """The text after the last turn, `[1, tokens]` int64 on the CPU: its prompt and reply."""
        return torch.tensor([self._text], dtype=torch.long)

    def spans(self, model: str) -> tuple[Span, ...]:
        """What a model's cache covers; empty before its first turn. UsageError: no such model."""
        self._require_model(model)
        return self._memories[model].spans if model in self._memories else ()

    def cache(self, model: str) -> "DynamicCache":
        """A copy of a model's cache, of the tokens of `spans(model)`; later turns do not change it.

        Raises
        ------
        UsageError
            No model has this name, or it has not had a turn.
        """
        if not self.spans(model):
            raise UsageError(f"{model} has not had a turn.", "Let it read or reply first.")
        memory = self._memories[model]
        return crop_cache(memory.cache, 0, len(memory.ids))

    def reply(
        self, model: str, input_ids: Tensor, *, max_new_tokens: int = 64, **generate_options: Any
    ) -> Tensor:
        """Let a model answer a prompt.

        Parameters
        ----------
        model
            Its name.
        input_ids
            `[1, tokens]` int64, the whole prompt of this turn: the history too, as the chat
            template renders it now.
        max_new_tokens
            How many tokens to generate at the most.
        generate_options
            Passed to the model's `generate`, for example `do_sample=False`.

        Returns
        -------
        new_ids
            `[1, new tokens]` int64 on the CPU, without the prompt.

        Raises
        ------
        UsageError
            No such model, not one row of token ids, ids beyond the model's vocabulary, or an
            option that leaves no cache of one answer.
        VerificationError
            A cache is not finite or covers other tokens than the text.
        """
        started = time.perf_counter()
        ids = self._checked(model, input_ids)
        network = self._models[model]
        _require_one_answer(network, generate_options)
        memory, turn, _ = self._advance(model, ids)
        prompt = torch.tensor([ids], device=network.device)
        generate: Any = network.generate
        output: Tensor = generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=False,
            # Filled in place; an empty one too, or `generate` would keep its own to itself.
            **{cache_argument(network): memory.cache},
            **generate_options,
        )
        text: list[int] = output[0].tolist()
        cached = text[:-1]  # the last token was chosen and never run
        memory = _Memory(cached, append_span(memory.spans, len(cached), None), memory.cache)
        self._commit(model, memory, text, turn, started)
        return torch.tensor([text[len(ids) :]], dtype=torch.long)

    @torch.no_grad()
    def read(self, model: str, input_ids: Tensor) -> Tensor:
        """Let a model read a prompt without an answer.

        Parameters
        ----------
        model, input_ids
            As for `reply`.

        Returns
        -------
        logits
            `[1, last tokens, vocabulary]` in the model's dtype and on its device: the predictions
            after each token at the end of the prompt that no model had read before, and after the
            last one in any case.

        Raises
        ------
        UsageError, VerificationError
            As for `reply`.
        """
        started = time.perf_counter()
        ids = self._checked(model, input_ids)
        memory, turn, done = self._advance(model, ids)
        network = self._models[model]
        new_ids = torch.tensor([ids[done:]], device=network.device)
        output = prefill(network, new_ids, cache=memory.cache)
        memory = _Memory(ids, append_span(memory.spans, len(ids), None), cache_of(output))
        self._commit(model, memory, ids, turn, started)
        logits: Tensor = output.logits
        return logits

    @torch.no_grad()
    def _advance(self, model: str, ids: list[int]) -> tuple[_Memory, dict[str, int], int]:
        """All of a turn but its last piece, in a new memory; the counts; the tokens covered."""
        old = self._memories.get(model, _Memory([], (), build_cache([], [])))
        # One token at least must run, even where the cache has them all.
        kept = min(common_prefix(old.ids, ids), len(ids) - 1)
        spans = crop_spans(old.spans, kept)
        cache: Cache = crop_cache(old.cache, 0, kept) if kept > 0 else build_cache([], [])
        others = {
            name: crop_spans(memory.spans, common_prefix(memory.ids, ids))
            for name, memory in self._memories.items()
            if name != model
        }
        mappable = [source for source, target in self._mappers if target == model]
        pieces = plan_pieces(kept, len(ids), others, mappable, self._exact_prefix)
        turn = {
            "prompt_tokens": len(ids),
            "kept_exact": count_kind(spans, "exact"),
            "kept_own": count_kind(spans, "own"),
            "kept_mapped": count_kind(spans, "mapped"),
            "mapped": sum(p.stop - p.start for p in pieces if p.origin is not None),
            "computed": sum(p.stop - p.start for p in pieces if p.origin is None),
            "reprefilled": sum(p.stop - p.start for p in pieces if p.read_elsewhere),
        }
        network = self._models[model]
        done = pieces[-1].start
        for piece in pieces[:-1]:
            if piece.origin is None:
                new_ids = torch.tensor([ids[piece.start : piece.stop]], device=network.device)
                cache = cache_of(prefill(network, new_ids, cache=cache, logits_to_keep=1))
            else:
                mapped = self._map(piece.origin, model, piece.start, piece.stop)
                cache = mapped if piece.start == 0 else concatenate_caches(cache, mapped)
            spans = append_span(spans, piece.stop, piece.origin)
        return _Memory(ids[:done], spans, cache), turn, done

    def _map(self, origin: str, model: str, start: int, stop: int) -> "DynamicCache":
        """A model's states of some tokens, from those that another model computed itself."""
        mapper = self._mappers[origin, model]
        cache = crop_cache(self._memories[origin].cache, start, stop)
        network = self._models[model]
        mapped: DynamicCache = mapper(
            move_cache(cache, mapper.key_weight.device),
            positions=torch.arange(start, stop),
            dtype=network.dtype,
        )
        return move_cache(mapped, network.device)

    def _commit(
        self, model: str, memory: _Memory, text: list[int], turn: dict[str, int], started: float
    ) -> None:
        """Remember a turn, if its cache is what it should be."""
        keys, _ = read_cache(memory.cache, self._specs[model])
        cached, expected = keys[0].shape[2], len(memory.ids)
        if not cached == memory.spans[-1].stop == expected:
            raise VerificationError(
                f"The cache of {model} has {cached} tokens after this turn, expected {expected}.",
                "Leave out the options of generate that do not run the model token by token.",
            )
        self._memories[model], self._text = memory, text
        new_tokens = len(text) - turn["prompt_tokens"]
        seconds = time.perf_counter() - started
        self.turns.append(Turn(model=model, new_tokens=new_tokens, seconds=seconds, **turn))

    def _require_model(self, model: str) -> None:
        if model not in self._models:
            raise UsageError(
                f"No model {model!r} in this conversation; there are {', '.join(self._models)}."
            )

    def _checked(self, model: str, input_ids: Tensor) -> list[int]:
        """The ids of a prompt as a list."""
        self._require_model(model)
        one_row = input_ids.dim() == 2 and input_ids.shape[0] == 1 and input_ids.shape[1] > 0
        if not one_row or input_ids.is_floating_point():
            raise UsageError(
                "input_ids must be integers, [1, tokens]; found "
                f"{input_ids.dtype}, {list(input_ids.shape)}.",
                "Hold one conversation for each row of a batch.",
            )
        ids: list[int] = input_ids[0].tolist()
        vocabulary = self._models[model].get_input_embeddings().num_embeddings
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise UsageError(
                f"input_ids reach from {min(ids)} to {max(ids)}, the vocabulary of {model} from 0 "
                f"to {vocabulary - 1}.",
                "The models of a conversation must share a tokenizer.",
            )
        return ids


def _require_one_tokenizer(mappers: Mapping[tuple[str, str], KVMapper]) -> None:
    digests = {
        spec.tokenizer_digest
        for mapper in mappers.values()
        for spec in (mapper.config.source, mapper.config.target)
    } - {None}
    if len(digests) > 1:
        raise IncompatiblePairError(
            f"The mappers were fitted for different tokenizers: {sorted(map(str, digests))}.",
            "The models of a conversation must share a tokenizer: the same ids are read by all.",
        )


def _require_one_answer(model: "PreTrainedModel", options: Mapping[str, Any]) -> None:
    """Refuse what would leave a cache that is not the answer's."""
    refused = [name for name in _OWN_OPTIONS if name in options]
    if refused:
        raise UsageError(
            f"A conversation sets {', '.join(refused)} itself.", "Leave it out of the options."
        )
    config = options.get("generation_config") or model.generation_config
    for name in ("num_beams", "num_return_sequences"):
        value = options.get(name, getattr(config, name, None))
        if value not in (None, 1):
            raise UsageError(
                f"{name} is {value}; a conversation goes on from one answer, expected 1.",
                "Sample or search outside of it, and pass the text that was chosen as the prompt.",
            )
