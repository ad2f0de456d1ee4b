"""The config.json of published models, as far as it matters here, and what it means."""

import copy


def qwen3(layers, hidden, heads, **changes):
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": hidden,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
        **changes,
    }


def llama(layers, hidden, heads, factor, **changes):
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "max_position_embeddings": 131072,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rope_scaling": {
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
        **changes,
    }


def ministral3(layers, hidden, theta):
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_index": 10,
        "model_type": "mistral3",
        "text_config": {
            "head_dim": 128,
            "hidden_size": hidden,
            "max_position_embeddings": 262144,
            "model_type": "ministral3",
            "num_attention_heads": 32,
            "num_hidden_layers": layers,
            "num_key_value_heads": 8,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 16.0,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384,
                "type": "yarn",
            },
            "rope_theta": theta,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024},
    }


MISTRAL = {
    "hidden_size": 4096,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
}
QWEN25 = {
    "hidden_size": 3584,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
GLM4 = {
    "head_dim": 128,
    "hidden_size": 4096,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 151552,
}
# The raw config.json in the form of transformers 4, then model type, layers, heads, KV heads,
# head_dim, hidden size, positions, QK norm, RoPE type, theta, rotating dims, interleaved.
PUBLISHED = {
    "Qwen3-0.6B": (
        qwen3(28, 1024, 16),
        ("qwen3", 28, 16, 8, 128, 1024, 40960, True, "default", 1e6, 128, False),
    ),
    "Qwen3-8B": (
        qwen3(36, 4096, 32),
        ("qwen3", 36, 32, 8, 128, 4096, 40960, True, "default", 1e6, 128, False),
    ),
    "Qwen3-14B": (
        qwen3(40, 5120, 40),
        ("qwen3", 40, 40, 8, 128, 5120, 40960, True, "default", 1e6, 128, False),
    ),
    "Qwen3-32B": (
        qwen3(64, 5120, 64),
        ("qwen3", 64, 64, 8, 128, 5120, 40960, True, "default", 1e6, 128, False),
    ),
    "Qwen3-4B-Instruct-2507": (
        qwen3(36, 2560, 32, rope_theta=5000000, max_position_embeddings=262144),
        ("qwen3", 36, 32, 8, 128, 2560, 262144, True, "default", 5e6, 128, False),
    ),
    "Llama-3.1-8B": (
        llama(32, 4096, 32, 8.0),
        ("llama", 32, 32, 8, 128, 4096, 131072, False, "llama3", 5e5, 128, False),
    ),
    "Llama-3.1-70B": (
        llama(80, 8192, 64, 8.0),
        ("llama", 80, 64, 8, 128, 8192, 131072, False, "llama3", 5e5, 128, False),
    ),
    "Llama-3.2-1B": (
        llama(16, 2048, 32, 32.0, head_dim=64),
        ("llama", 16, 32, 8, 64, 2048, 131072, False, "llama3", 5e5, 64, False),
    ),
    "Ministral-3-3B": (
        ministral3(26, 3072, 1e6),
        ("ministral3", 26, 32, 8, 128, 3072, 262144, False, "yarn", 1e6, 128, False),
    ),
    "Ministral-3-8B": (
        ministral3(34, 4096, 1e6),
        ("ministral3", 34, 32, 8, 128, 4096, 262144, False, "yarn", 1e6, 128, False),
    ),
    "Ministral-3-14B": (
        ministral3(40, 5120, 1e9),
        ("ministral3", 40, 32, 8, 128, 5120, 262144, False, "yarn", 1e9, 128, False),
    ),
    "Mistral-7B-v0.3": (
        MISTRAL,
        ("mistral", 32, 32, 8, 128, 4096, 32768, False, "default", 1e6, 128, False),
    ),
    "Qwen2.5-7B-Instruct": (
        QWEN25,
        ("qwen2", 28, 28, 4, 128, 3584, 32768, False, "default", 1e6, 128, False),
    ),
    "GLM-4-9B-0414": (
        GLM4,
        ("glm4", 40, 32, 2, 128, 4096, 32768, False, "default", 1e4, 64, True),
    ),
}


def new_form(raw):
    """The same config.json in the form of transformers 5."""
    raw = copy.deepcopy(raw)
    text = raw.get("text_config", raw)
    rope = {"rope_theta": text.pop("rope_theta"), **(text.pop("rope_scaling", None) or {})}
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if "partial_rotary_factor" in text:
        rope["partial_rotary_factor"] = text.pop("partial_rotary_factor")
    text["rope_parameters"] = rope
    if "torch_dtype" in raw:
        raw["dtype"] = raw.pop("torch_dtype")
    return raw
