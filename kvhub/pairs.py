"""From names to the two models of a pair, and their mapper."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvhub.recipe import locate_model
from kvhub.spec import ModelSpec
from kvhub.store import find_mapper

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvhub.mapper import KVMapper

__all__ = ["LoadedPair", "Track", "load_mapper_pair", "load_pair", "read_spec"]

# Opens a progress bar under a description and gives what moves it: (done, total).
Track = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True)
class LoadedPair:
    """Both models of a pair with their tokenizer."""

    source: "PreTrainedModel"
    target: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"


def read_spec(model: str) -> ModelSpec:
    """The spec of a model, under the name that the user gave."""
    return replace(ModelSpec.from_pretrained(locate_model(model)), model_id=model)


def load_pair(source: ModelSpec, target: ModelSpec, dtype: str, device: str | None) -> LoadedPair:
    """Load both models, at the commits of their specs, and the target's tokenizer."""
    from kvhub.models import load_model, load_tokenizer

    source_model, target_model = (
        load_model(locate_model(spec.model_id), revision=spec.revision, dtype=dtype, device=device)
        for spec in (source, target)
    )
    tokenizer = load_tokenizer(locate_model(target.model_id), revision=target.revision)
    return LoadedPair(source_model, target_model, tokenizer)


def load_mapper_pair(
    name: str, source: str | None, target: str | None, dtype: str, device: str | None
) -> "tuple[KVMapper, LoadedPair]":
    """A mapper and its two models, which may have been moved."""
    from kvhub.package import load

    mapper = load(find_mapper(name))
    config = mapper.config
    source_spec, target_spec = (
        spec if moved is None else replace(spec, model_id=moved, revision=None)
        for spec, moved in ((config.source, source), (config.target, target))
    )
    pair = load_pair(source_spec, target_spec, dtype, device)
    return mapper.to(pair.target.device), pair
