"""The model types and kinds of RoPE that kvhub can map."""

from dataclasses import dataclass

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# These take the frequencies from the longest position of a forward, so a cache does not tell which
# ones its keys were rotated with.
LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")


@dataclass(frozen=True)
class Architecture:
    """What the modeling code of a model type does and its config does not say."""

    interleaved: bool = False
    partial: bool = False  # honours partial_rotary_factor
    qk_norm: bool | str = False  # or the config attribute that switches it on


# Only model types whose code was read and that pass tests/test_rope.py as tiny models. A config
# does not tell how dims are paired, so any other type would be a guess.
ARCHITECTURES = {
    "arcee": Architecture(),
    "cohere": Architecture(interleaved=True, qk_norm="use_qk_norm"),
    "ernie4_5": Architecture(interleaved=True),
    "gemma": Architecture(),
    "glm": Architecture(interleaved=True, partial=True),
    "glm4": Architecture(interleaved=True, partial=True),
    "glm4_moe": Architecture(partial=True, qk_norm="use_qk_norm"),
    "granite": Architecture(),
    "helium": Architecture(interleaved=True),
    "llama": Architecture(),
    "ministral3": Architecture(),
    "mistral": Architecture(),
    "mixtral": Architecture(),
    "phi": Architecture(partial=True, qk_norm="qk_layernorm"),
    "phi3": Architecture(partial=True),
    "qwen2": Architecture(),
    "qwen2_moe": Architecture(),
    "qwen3": Architecture(qk_norm=True),
    "qwen3_moe": Architecture(qk_norm=True),
    "seed_oss": Architecture(),
    "smollm3": Architecture(),
    "stablelm": Architecture(partial=True, qk_norm="qk_layernorm"),
    "starcoder2": Architecture(),
}
