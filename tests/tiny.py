"""Tiny random models of the supported architectures, for the tests."""

import copy

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 65536,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
MINISTRAL3_ROPE = {
    **YARN,
    "rope_theta": 1e6,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
GLM_MOE = {
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
HIDDEN_64 = {"hidden_size": 64, "head_dim": None}
# What each architecture needs beyond COMMON, in the form its published config.json has.
ARCHITECTURES = {
    "qwen3": {"rope_theta": 1e6},
    "qwen2": {"rope_theta": 1e6, **HIDDEN_64},
    "llama": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "mistral": {"rope_theta": 1e6, "sliding_window": None},
    "ministral3": {"rope_parameters": MINISTRAL3_ROPE},
    "glm": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "glm4": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "arcee": {"rope_scaling": YARN, "rope_theta": 5e4},
    "cohere": {"rope_theta": 1e4, "head_dim": None, "use_qk_norm": True},
    "ernie4_5": {"rope_theta": 5e5},
    "gemma": {"rope_theta": 1e4},
    "glm4_moe": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "use_qk_norm": True, **GLM_MOE},
    "granite": {"rope_theta": 1e4, "head_dim": None},
    "helium": {"rope_theta": 1e5, "hidden_size": 64},
    "mixtral": {"rope_theta": 1e6, "num_local_experts": 2},
    "phi": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "qk_layernorm": True, **HIDDEN_64},
    "phi3": {"rope_theta": 1e4, "sliding_window": None, "head_dim": None},
    "qwen2_moe": {"rope_theta": 1e6, "head_dim": None, **MOE},
    "qwen3_moe": {"rope_theta": 1e6, **MOE},
    "seed_oss": {"rope_theta": 1e7},
    "smollm3": {"rope_theta": 5e6, "no_rope_layer_interval": 100},
    "stablelm": {
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "qk_layernorm": True,
        **HIDDEN_64,
    },
    "starcoder2": {"rope_theta": 1e5, "sliding_window": None},
}
VISION = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 32,
    "patch_size": 16,
}


def tiny_config(architecture, layers=2, **overrides):
    """Return the raw config.json dict of a tiny model.

    `architecture` is a model type; "mistral3" is the multimodal wrapper around ministral3. An
    override of None removes a key.
    """
    if architecture == "mistral3":
        text = tiny_config("ministral3", layers, **overrides)
        return {
            "model_type": "mistral3",
            "text_config": text,
            "vision_config": dict(VISION),
            "image_token_index": 3,
            "tie_word_embeddings": False,
        }
    values = {
        "model_type": architecture,
        "num_hidden_layers": layers,
        **COMMON,
        **ARCHITECTURES.get(architecture, {}),
        **overrides,
    }
    # Published configs state `sliding_window: null`, where the class default would be a window.
    kept = ("sliding_window", "pad_token_id")
    values = {key: value for key, value in values.items() if value is not None or key in kept}
    return copy.deepcopy(values)


def tiny_model(architecture, layers=2, seed=0, dtype=torch.float32, **overrides):
    """Return a tiny random model in eval mode; the weights depend on `seed` only."""
    raw = tiny_config(architecture, layers, **overrides)
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    auto = AutoModelForImageTextToText if architecture == "mistral3" else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=dtype)
        # The initial 0.02 makes attention nearly uniform and norms equal to one, which would hide
        # mistakes: spread the weights out.
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, dtype=torch.float32)
            scale = 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            offset = parameter.detach().float().mean() if parameter.dim() == 1 else 0.0
            parameter.data.copy_((offset + scale * noise).to(dtype))
    return model.eval()
