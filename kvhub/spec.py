"""What kvhub knows about a model: the geometry of its cache, its RoPE and its tokenizer."""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from kvhub.errors import (
    IncompatiblePairError,
    NetworkError,
    NotFoundError,
    VerificationError,
)
from kvhub.tokenization import file_digest, tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["ModelSpec", "RopeSpec", "tokenizer_digest"]

RopeValue: TypeAlias = "float | int | bool | str | tuple[float | int, ...]"


@dataclass(frozen=True)
class RopeSpec:
    """How a model rotates its keys, in canonical form.

    Attributes
    ----------
    rope_type
        "default", "linear", "llama3" or "yarn"; others only so that a refusal can name them.
    rope_theta
        The base of the frequencies.
    parameters
        The rest of transformers' ``rope_parameters``, sorted by name.
    rotary_dim
        How many leading dims of a head rotate.
    interleaved
        True if the pairs are (0, 1), (2, 3) and so on (GLM, Cohere); False if dim i pairs with
        dim i + rotary_dim / 2.
    attention_scaling
        The factor on cos and sin (YaRN); 1.0 for other types.
    inv_freq
        Radians per position of each pair, exact float32 values, rotary_dim / 2 of them.
    """

    rope_type: str
    rope_theta: float
    parameters: tuple[tuple[str, RopeValue], ...]
    rotary_dim: int
    interleaved: bool
    attention_scaling: float
    inv_freq: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; `from_dict` gives an equal spec back."""
        data = dataclasses.asdict(self)
        data["parameters"] = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self.parameters
        }
        data["inv_freq"] = list(self.inv_freq)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RopeSpec:
        """Read what `to_dict` wrote.

        Raises
        ------
        VerificationError
            If a key is unknown or missing, or a value cannot be right.
        """
        _check_fields(cls, data, "rope")
        spec = cls(
            **{
                **data,
                "parameters": _canonical(data["parameters"]),
                "inv_freq": tuple(data["inv_freq"]),
            }
        )
        if 2 * len(spec.inv_freq) != spec.rotary_dim:
            raise VerificationError(
                f"The rope spec has {len(spec.inv_freq)} inverse frequencies, expected "
                f"{spec.rotary_dim // 2}, half of its {spec.rotary_dim} rotating dims."
            )
        return spec


@dataclass(frozen=True)
class ModelSpec:
    """What decides whether one model's cache can be mapped into another's.

    Attributes
    ----------
    model_id
        Hub id or local path.
    revision
        Commit sha, if known.
    model_type
        Of the text model, e.g. "qwen3"; the wrapper of a multimodal model does not count.
    num_layers, attention_heads, kv_heads, head_dim, hidden_size, vocab_size, max_positions
        The geometry. `vocab_size` counts embedding rows, which may be padded.
    dtype
        Of the weights, e.g. "bfloat16"; "float32" where the config does not say.
    rope
        None if the model has no RoPE or one that cannot be described, which `unsupported` explains.
    qk_norm
        Whether keys are normalised before they are rotated.
    layer_types
        One per layer, in transformers' names, e.g. "full_attention".
    sliding_window
        In tokens; None unless a layer uses one.
    unsupported
        Why kvhub cannot map this model's cache, one sentence each; empty for a supported model.
    tokenizer_digest
        What `tokenizer_digest` gives; None if no tokenizer could be read.
    """

    model_id: str
    revision: str | None
    model_type: str
    num_layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: str
    rope: RopeSpec | None
    qk_norm: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None
    unsupported: tuple[str, ...]
    tokenizer_digest: str | None

    @property
    def kv_dim(self) -> int:
        """Features that one layer caches per token for keys, and as many for values."""
        return self.kv_heads * self.head_dim

    def require_rope(self) -> RopeSpec:
        """Return `rope`, or raise IncompatiblePairError if the model has none."""
        if self.rope is None:
            raise IncompatiblePairError(
                f"Expected a model with RoPE, found none in {self.model_id or self.model_type}: "
                f"{'; '.join(self.unsupported)}.",
                "Choose another model; kvhub check SOURCE TARGET tells what is supported.",
            )
        return self.rope

    @classmethod
    def from_pretrained(
        cls, model_id_or_path: str, revision: str | None = None, local_files_only: bool = False
    ) -> ModelSpec:
        """Read the config and the tokenizer of a model, no weights.

        Parameters
        ----------
        model_id_or_path
            Hub id or local directory.
        revision
            Branch, tag or commit on the Hub.
        local_files_only
            Use only what is already on this machine.

        Raises
        ------
        NotFoundError, AuthError, NetworkError
            If the config cannot be had.
        VerificationError
            If config.json cannot be read as a config.
        IncompatiblePairError
            If the model type is unknown to transformers or has no attention.
        """
        from kvhub.configs import find_model_file

        model_id = str(model_id_or_path)
        path, commit = find_model_file(model_id, "config.json", revision, local_files_only)
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise VerificationError(
                f"Expected JSON in config.json of {model_id}, found: {error}.",
                "Download or save the model again.",
            ) from error
        if not isinstance(raw, dict):
            raise VerificationError(
                f"Expected an object in config.json of {model_id}, found {raw!r}."
            )
        digest = _pretrained_digest(model_id, commit or revision, local_files_only)
        return cls.from_config(raw, model_id, commit, digest)

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig | dict[str, Any],
        model_id: str = "",
        revision: str | None = None,
        tokenizer_digest: str | None = None,
    ) -> ModelSpec:
        """Describe a model from its config.

        Parameters
        ----------
        config
            A transformers config, or the content of a config.json in the form of transformers 4
            (``rope_theta``, ``rope_scaling``) or 5 (``rope_parameters``).
        model_id, revision, tokenizer_digest
            What the config does not tell; stored as they are.

        Raises
        ------
        VerificationError
            If a dict cannot be read as a config.
        IncompatiblePairError
            If the model type is unknown to transformers or has no attention.
        """
        from kvhub.configs import describe_config, parse_config

        # transformers completes RoPE parameters in place: never in the caller's object.
        config = parse_config(config) if isinstance(config, dict) else copy.deepcopy(config)
        return cls.from_dict(
            {
                "model_id": model_id,
                "revision": revision,
                "tokenizer_digest": tokenizer_digest,
                **describe_config(config),
            }
        )

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> ModelSpec:
        """Describe a live model; it has no tokenizer, so `tokenizer_digest` is None."""
        config = model.config
        # Only configs that were loaded, not made, have a commit.
        commit = getattr(config, "_commit_hash", None)
        spec = cls.from_config(config, config._name_or_path, commit)
        return dataclasses.replace(spec, dtype=str(model.dtype).removeprefix("torch."))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; `from_dict` gives an equal spec back."""
        data = dataclasses.asdict(self)
        data["rope"] = None if self.rope is None else self.rope.to_dict()
        data["layer_types"] = list(self.layer_types)
        data["unsupported"] = list(self.unsupported)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelSpec:
        """Read what `to_dict` wrote.

        Raises
        ------
        VerificationError
            If a key is unknown or missing, or a value cannot be right.
        """
        _check_fields(cls, data, "model")
        spec = cls(
            **{
                **data,
                "rope": None if data["rope"] is None else RopeSpec.from_dict(data["rope"]),
                "layer_types": tuple(data["layer_types"]),
                "unsupported": tuple(data["unsupported"]),
            }
        )
        if len(spec.layer_types) != spec.num_layers:
            raise VerificationError(
                f"The model spec names {len(spec.layer_types)} layer types, expected one for each "
                f"of its {spec.num_layers} layers."
            )
        return spec


def _canonical(parameters: dict[str, Any]) -> tuple[tuple[str, RopeValue], ...]:
    """Sort parameters and make them hashable, with one form for 8 and 8.0."""

    def value_of(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(value_of(item) for item in value)
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return tuple((name, value_of(parameters[name])) for name in sorted(parameters))


# The JSON types that a field may have, by its annotation.
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "float": (float, int),
    "int": (int,),
    "int | None": (int, type(None)),
    "str": (str,),
    "str | None": (str, type(None)),
    "RopeSpec | None": (dict, type(None)),
    "tuple[float, ...]": (list,),
    "tuple[str, ...]": (list,),
    "tuple[tuple[str, RopeValue], ...]": (dict,),
}


def _check_fields(cls: type, data: Any, what: str) -> None:
    """Refuse unknown keys, missing keys, and values of a type that the field does not have."""
    expected = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    if not isinstance(data, dict) or data.keys() != expected.keys():
        found = sorted(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise VerificationError(
            f"Expected a {what} spec with the keys {sorted(expected)}, found {found}."
        )
    for name, annotation in expected.items():
        value = data[name]
        # Not isinstance: True is an int to Python, but not to JSON.
        fits = type(value) in _JSON_TYPES[annotation]
        if fits and isinstance(value, list):
            kinds = (str,) if annotation == "tuple[str, ...]" else (float, int)
            fits = all(type(item) in kinds for item in value)
        if fits and annotation == "int":
            fits = value > 0  # every one of them counts something
        if not fits:
            raise VerificationError(
                f"Expected {name} of a {what} spec to be {annotation}, found {value!r}."
            )


def _pretrained_digest(model_id: str, revision: str | None, local_files_only: bool) -> str | None:
    """Return the digest of a model's tokenizer.json; None if there is none to be had.

    The file is what the model was trained with. The tokenizer that transformers makes of it
    depends on the installed version.
    """
    from kvhub.configs import find_model_file

    try:
        path, _ = find_model_file(model_id, "tokenizer.json", revision, local_files_only)
    except (NetworkError, NotFoundError):
        return None
    return file_digest(path)
