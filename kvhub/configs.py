"""Finding a model's config and reading its geometry, RoPE and limits from it."""

import copy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors, hf_hub_download
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvhub.architectures import (
    ARCHITECTURES,
    LENGTH_DEPENDENT_ROPE_TYPES,
    SUPPORTED_ROPE_TYPES,
    Architecture,
)
from kvhub.errors import (
    AuthError,
    IncompatiblePairError,
    NetworkError,
    NotFoundError,
    VerificationError,
)


def find_model_file(
    model_id: str, filename: str, revision: str | None = None, local_files_only: bool = False
) -> tuple[Path, str | None]:
    """Return the path of a model's file and, for a model of the Hub, the commit it belongs to.

    Parameters
    ----------
    model_id
        Hub id or local directory; a directory of that name wins.
    filename
        Relative to the model.
    revision
        Branch, tag or commit on the Hub.
    local_files_only
        Use only what was downloaded before.

    Raises
    ------
    NotFoundError
        If the model, the revision or the file does not exist.
    AuthError
        If the model is gated.
    NetworkError
        If the file was not downloaded before and the Hub does not answer.
    """
    directory = Path(model_id)
    if directory.is_dir():
        if not (directory / filename).is_file():
            raise NotFoundError(
                f"Expected a {filename} in {model_id}, found none.",
                "Give the directory that save_pretrained wrote, or a Hub id.",
            )
        return directory / filename, None
    at = f"{model_id} at {revision}" if revision else model_id
    try:
        path = hf_hub_download(
            model_id, filename, revision=revision, local_files_only=local_files_only
        )
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise NetworkError(
            f"Expected {filename} of {at} on this machine or on the Hub, found it in neither: "
            "the Hub was not asked or did not answer.",
            "Check the network, unset HF_HUB_OFFLINE, or give a local directory.",
        ) from error
    except errors.GatedRepoError as error:
        raise AuthError(
            f"{model_id} is gated, and access was refused.",
            f"Ask for access at https://huggingface.co/{model_id}, then run: hf auth login",
        ) from error
    except (
        errors.EntryNotFoundError,
        errors.HFValidationError,
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
    ) as error:
        raise NotFoundError(
            f"Expected {filename} of a model {at}, found none, neither as a directory nor on "
            "the Hub.",
            "Check the spelling; for a private model, run: hf auth login",
        ) from error
    except errors.HfHubHTTPError as error:
        raise NetworkError(
            f"The Hub did not give {filename} of {at}: {error}.", "Try again later."
        ) from error
    # The Hub's cache keeps every file in a directory named by its commit.
    depth = len(Path(filename).parts) - 1
    return Path(path), Path(path).parents[depth].name


def parse_config(raw: dict[str, Any]) -> PreTrainedConfig:
    """Turn the content of a config.json into the config class of its model type.

    The class knows what the file leaves out (Llama 3.1 states no head_dim) and converts the old
    form of RoPE parameters.

    Raises
    ------
    VerificationError
        If the content is not a config or the class refuses a value.
    IncompatiblePairError
        If transformers does not know the model type.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise VerificationError(
            f"Expected a model_type in config.json, found {model_type!r}.",
            "Is this the directory of a transformers model?",
        )
    if model_type not in CONFIG_MAPPING:
        raise IncompatiblePairError(
            f"The model type {model_type!r} is unknown to the installed transformers.",
            "Upgrade transformers; models that bring their own code are not supported.",
        )
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(raw))
    except (errors.StrictDataclassError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise VerificationError(
            f"config.json of a {model_type} model cannot be read: {error}."
        ) from error
    return config


def describe_config(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what a config says about the cache, as the fields of a `ModelSpec` in JSON form.

    The config may be completed in place (transformers does so when it computes RoPE).

    Raises
    ------
    IncompatiblePairError
        If the config is not that of one text model with attention.
    """
    text = _text_config(config)
    unsupported = []
    if config.is_encoder_decoder:
        unsupported.append("it is an encoder-decoder, not a decoder-only model")
    if getattr(text, "is_heterogeneous", False):
        unsupported.append("its layers differ in size (heterogeneous layers)")
        # The whole config refuses to be read for an attribute that differs between layers.
        text = text.per_layer_config[0]
    architecture = ARCHITECTURES.get(text.model_type)
    head_dim = getattr(text, "head_dim", None)
    attention_heads = _required(text, "num_attention_heads")
    layer_types = _layer_types(text)
    rope, rope_reasons = _describe_rope(text, architecture)
    unsupported += _unsupported_layers(text, layer_types) + rope_reasons
    sliding = any("sliding" in layer_type for layer_type in layer_types)
    qk_norm = architecture.qk_norm if architecture else False
    dtype = text.dtype or config.dtype or torch.float32
    return {
        "model_type": text.model_type,
        "num_layers": _required(text, "num_hidden_layers"),
        "attention_heads": attention_heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or attention_heads,
        "head_dim": head_dim or _required(text, "hidden_size") // attention_heads,
        "hidden_size": _required(text, "hidden_size"),
        "vocab_size": _required(text, "vocab_size"),
        "max_positions": _required(text, "max_position_embeddings"),
        "dtype": str(dtype).removeprefix("torch."),
        "rope": rope,
        "qk_norm": bool(getattr(text, qk_norm, False)) if isinstance(qk_norm, str) else qk_norm,
        "layer_types": layer_types,
        "sliding_window": getattr(text, "sliding_window", None) if sliding else None,
        "unsupported": unsupported,
    }


def _text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    try:
        return config.get_text_config(decoder=True)
    except ValueError as error:
        raise IncompatiblePairError(
            f"Expected one text model in a {config.model_type} config, found several: {error}"
        ) from error


def _required(text: PreTrainedConfig, name: str) -> int:
    value = getattr(text, name, None)
    if not isinstance(value, int):
        raise IncompatiblePairError(
            f"Expected {name} in the config of a {text.model_type} model, found {value!r}.",
            "kvhub maps between decoder-only models with attention in every layer.",
        )
    return value


def _layer_types(text: PreTrainedConfig) -> list[str]:
    layer_types = getattr(text, "layer_types", None)
    if layer_types is not None:
        return list(layer_types)
    # As transformers does for a cache of this config.
    kind = "full_attention"
    if getattr(text, "sliding_window", None) is not None:
        kind = "sliding_attention"
    elif getattr(text, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    return [kind] * _required(text, "num_hidden_layers")


def _unsupported_layers(text: PreTrainedConfig, layer_types: list[str]) -> list[str]:
    reasons = []
    for kind in sorted(set(layer_types) - {"full_attention"}):
        count = layer_types.count(kind)
        reasons.append(f"{count} of its {len(layer_types)} layers are {kind}, not full_attention")
    if getattr(text, "kv_lora_rank", None):
        reasons.append(
            f"it caches a latent of rank {text.kv_lora_rank} and no keys or values (MLA)"
        )
    elif getattr(text, "v_head_dim", None) not in (None, getattr(text, "head_dim", None)):
        reasons.append(f"its values have {text.v_head_dim} dims per head, unlike its keys")
    if getattr(text, "num_kv_shared_layers", None) or getattr(text, "kv_sharing_modes", None):
        reasons.append("some of its layers read the cache of other layers (KV sharing)")
    no_rope_layers = getattr(text, "no_rope_layers", None)
    # transformers writes 1 for a layer with RoPE and 0 for one without.
    if no_rope_layers and not all(no_rope_layers):
        reasons.append(
            f"{list(no_rope_layers).count(0)} of its {len(layer_types)} layers have no RoPE"
        )
    if text.model_type == "gpt_oss":
        reasons.append("its attention has learned sinks")
    return reasons


def _describe_rope(
    text: PreTrainedConfig, architecture: Architecture | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the fields of a `RopeSpec` in JSON form, if there are any, and reasons to refuse."""
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        return None, ["it has no RoPE"]
    if "rope_type" not in parameters:
        return None, ["its layers rotate differently (RoPE parameters for each layer type)"]
    reasons = []
    if architecture is None:
        reasons.append(
            f"how a {text.model_type} model pairs the dims it rotates has not been verified"
        )
        architecture = Architecture()
    rope_type = parameters["rope_type"]
    if rope_type in LENGTH_DEPENDENT_ROPE_TYPES:
        reasons.append(f"its RoPE depends on the sequence length (type {rope_type})")
    elif rope_type not in SUPPORTED_ROPE_TYPES:
        reasons.append(f"its RoPE has type {rope_type}, supported are {SUPPORTED_ROPE_TYPES}")
    partial = parameters.get("partial_rotary_factor")
    if partial not in (None, 1.0) and not architecture.partial:
        reasons.append(f"partial_rotary_factor is {partial}, which {text.model_type} code ignores")
    if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
        return None, reasons
    try:
        inv_freq, scaling = _frequencies(text, rope_type, architecture.partial)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise VerificationError(
            f"Expected numbers in the RoPE parameters of a {text.model_type} config, found "
            f"{dict(parameters)}: {error!r}."
        ) from error
    rest = {
        name: value
        for name, value in parameters.items()
        if name not in ("rope_type", "type", "rope_theta") and value is not None
    }
    rope = {
        "rope_type": rope_type,
        "rope_theta": float(parameters["rope_theta"]),
        "parameters": rest,
        "rotary_dim": 2 * len(inv_freq),
        "interleaved": architecture.interleaved,
        "attention_scaling": float(scaling),
        "inv_freq": inv_freq.float().tolist(),
    }
    return rope, reasons


def _frequencies(
    text: PreTrainedConfig, rope_type: str, partial: bool
) -> tuple[torch.Tensor, float]:
    """Return inverse frequencies and attention scaling, as a model of this config computes them."""
    if rope_type != "default":
        with torch.device("cpu"):
            found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[rope_type](text)
        return found
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    factor = text.rope_parameters.get("partial_rotary_factor", 1.0) if partial else 1.0
    dim = int(head_dim * factor)
    theta = text.rope_parameters["rope_theta"]
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu")
    return 1.0 / (theta ** (steps / dim)), 1.0
