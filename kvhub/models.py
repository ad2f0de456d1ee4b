"""Loading the two models of a pair, with errors that say what to do."""

from typing import TYPE_CHECKING, Any

import torch

from kvhub.errors import AuthError, NetworkError, NotFoundError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["count_parameters", "default_device", "load_model", "load_tokenizer", "torch_dtype"]


def default_device() -> str:
    """A CUDA device if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_dtype(name: str, device: str = "cpu") -> torch.dtype:
    """A dtype by its name; `auto` is float32 on a CPU and bfloat16 elsewhere.

    Raises
    ------
    UsageError
        It is not one of auto, float16, bfloat16, float32 and float64.
    """
    names = {
        "auto": torch.float32 if device == "cpu" else torch.bfloat16,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "float64": torch.float64,
    }
    if name not in names:
        raise UsageError(f"Unknown dtype {name!r}; expected one of {', '.join(names)}.")
    return names[name]


def load_model(
    model_id: str, *, revision: str | None = None, dtype: str = "auto", device: str | None = None
) -> "PreTrainedModel":
    """A language model in evaluation mode; of a multimodal one, with its wrapper (Ministral 3).

    Raises
    ------
    NotFoundError, AuthError, NetworkError
        It cannot be had.
    UsageError
        It is not a model that writes text.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    device = device or default_device()
    config = _load(AutoConfig, model_id, revision=revision)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        loader = AutoModelForCausalLM
    elif type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        loader = AutoModelForImageTextToText
    else:
        raise UsageError(
            f"{model_id} is a {config.model_type}; expected a model that writes text.",
            "Give a decoder-only language model of transformers.",
        )
    model: PreTrainedModel = _load(
        loader, model_id, revision=revision, dtype=torch_dtype(dtype, device)
    )
    return model.to(torch.device(device)).eval()


def load_tokenizer(model_id: str, *, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """A model's tokenizer; errors as for `load_model`."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = _load(AutoTokenizer, model_id, revision=revision)
    return tokenizer


def count_parameters(model_id: str, revision: str | None = None) -> int:
    """How many weights a model has, from its config alone; none of them is read or made."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = _load(AutoConfig, model_id, revision=revision).get_text_config(decoder=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(weight.numel() for weight in model.parameters())


def _load(loader: Any, model_id: str, **options: Any) -> Any:
    """Call a loader of transformers, which reports everything as an OSError with a cause."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return loader.from_pretrained(model_id, **options)
    except OSError as error:
        causes = _causes(error)
        if any(isinstance(cause, GatedRepoError) for cause in causes):
            raise AuthError(
                f"{model_id} is gated.", "Ask for access on its page, then run: hf auth login"
            ) from error
        if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
            raise NotFoundError(
                f"No model {model_id}, or no permission to see it.",
                "Check the spelling; for a private model run: hf auth login",
            ) from error
        network = (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, ConnectionError)
        if any(isinstance(cause, network) for cause in causes):
            raise NetworkError(
                f"{model_id} is not on this machine, and the Hub cannot be reached.",
                "Go online, unset HF_HUB_OFFLINE, or give a local directory.",
            ) from error
        raise NotFoundError(
            f"{model_id} cannot be loaded: {str(error).splitlines()[0]}",
            "Give a Hub id or a directory with config.json, weights and a tokenizer.",
        ) from error


def _causes(error: BaseException | None) -> list[BaseException]:
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
