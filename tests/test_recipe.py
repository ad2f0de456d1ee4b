"""The built-in pairs are complete, and their models are found or asked for."""

import importlib.util
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvhub import ModelSpec
from kvhub import recipe as recipes
from kvhub.cache import cache_of, prefill
from kvhub.corpus import kind_of
from kvhub.errors import NotFoundError
from kvhub.recipe import Recipe, list_recipes, load_recipe

MAKE_MODELS = Path(__file__).parents[1] / "examples" / "smollm2" / "make_models.py"
# k and mapper size in arXiv 2608.03893, table of pairs.
PAPER = {
    "qwen3-14b-to-32b": ("Qwen/Qwen3-14B", "Qwen/Qwen3-32B", 8, "1.07B"),
    "qwen3-8b-to-32b": ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B", 12, "1.61B"),
    "llama3.1-8b-to-70b": ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", 20, "3.36B"),
    "ministral3-3b-to-8b": ("Ministral-3-3B", "Ministral-3-8B", 26, "1.85B"),
    "ministral3-3b-to-14b": ("Ministral-3-3B", "Ministral-3-14B", 20, "1.68B"),
    "ministral3-8b-to-14b": ("Ministral-3-8B", "Ministral-3-14B", 12, "1.01B"),
}
OTHERS = {
    "qwen3-0.6b-to-1.7b": 8,
    "qwen3-1.7b-to-4b": 12,
    "smollm2": 8,
    "tiny-large-to-middle": 4,
    "tiny-middle-to-large": 3,
    "tiny-small-to-large": 4,
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_pairs_have_its_k_and_its_calibration(name):
    source, target, top_k, parameters = PAPER[name]
    recipe = load_recipe(name)
    assert source in recipe.source
    assert target in recipe.target
    assert recipe.top_k == top_k
    assert (recipe.sequences, recipe.length, recipe.stride) == (500, 1024, 4)
    assert recipe.data == "HuggingFaceFW/fineweb-edu:sample-10BT"
    assert "2608.03893" in recipe.note
    assert f"{parameters} parameters" in recipe.note


def test_every_recipe_is_listed_once_by_its_name():
    assert [recipe.name for recipe in list_recipes()] == sorted([*PAPER, *OTHERS])
    assert {recipe.name: recipe.top_k for recipe in list_recipes()}.items() >= OTHERS.items()


@pytest.mark.parametrize("recipe", list_recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_can_be_used_as_it_is(recipe):
    for field, kind in get_type_hints(Recipe).items():
        value = getattr(recipe, field)
        assert value in get_args(kind) if get_args(kind) else type(value) is kind, field
    assert min(recipe.top_k, recipe.sequences, recipe.length, recipe.stride) >= 1
    if recipe.name.startswith("tiny"):
        assert recipe.top_k <= ModelSpec.from_pretrained(recipe.locate_models()[0]).num_layers
    assert recipe.ridge_lambda == 1e-3
    assert kind_of(recipe.data) == ("built-in" if recipe.local else "dataset")
    assert recipe.source != recipe.target
    assert recipe.note
    assert "\n" not in recipe.note
    # Ten tokens per feature is what calibration asks for; no pair has over 8 KV heads of 128.
    tokens = recipe.sequences * recipe.length / recipe.stride
    heads_and_dim = {"smollm2": 3 * 64}.get(recipe.name, 2 * 32 if recipe.local else 8 * 128)
    assert tokens > (10 if recipe.local else 4) * recipe.top_k * heads_and_dim


def test_an_unknown_recipe_is_refused_with_the_nearest_name():
    with pytest.raises(NotFoundError, match=r"'qwen3-14B-to-32'; .* qwen3-8b-to-32b") as raised:
        load_recipe("qwen3-14B-to-32")
    assert raised.value.hint == "Did you mean qwen3-14b-to-32b?"
    with pytest.raises(NotFoundError) as raised:
        load_recipe("../recipes/smollm2")
    with pytest.raises(NotFoundError) as raised:
        load_recipe("something else")
    assert "kvhub recipes" in raised.value.hint


def test_models_on_the_hub_are_named_by_their_ids():
    assert load_recipe("qwen3-8b-to-32b").locate_models() == ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B")


def test_local_models_are_found_here_first_and_then_in_the_checkout(tmp_path, monkeypatch):
    recipe = load_recipe("tiny-small-to-large")
    checkout, here = tmp_path / "checkout", tmp_path / "here"
    (checkout / "kvhub").mkdir(parents=True)
    here.mkdir()
    monkeypatch.setattr(recipes, "__file__", str(checkout / "kvhub" / "recipe.py"))
    monkeypatch.chdir(here)

    def put(root, model):
        (root / model).mkdir(parents=True)
        (root / model / "config.json").touch()

    put(checkout, recipe.source)
    with pytest.raises(NotFoundError, match="tiny-small-to-large needs the model") as raised:
        recipe.locate_models()
    assert recipe.target in raised.value.message
    assert str(here) in raised.value.message
    assert raised.value.hint == recipe.obtain
    put(checkout, recipe.target)
    found = str(checkout / recipe.source), str(checkout / recipe.target)
    assert recipe.locate_models() == found
    put(here, recipe.source)
    assert recipe.locate_models() == (recipe.source, found[1])


@pytest.fixture(scope="module")
def make_models():
    pytest.importorskip("gguf")
    specification = importlib.util.spec_from_file_location("make_models", MAKE_MODELS)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


IDS = torch.arange(20)[None]


def test_pruning_leaves_a_model_without_those_layers(make_models, llama, tmp_path):
    layers = list(llama.model.layers)
    make_models.prune(llama, (1, 4))
    assert list(llama.model.layers) == [layers[i] for i in (0, 2, 3, 5)]
    llama.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.num_hidden_layers == 4
    output = prefill(llama, IDS)
    torch.testing.assert_close(output.logits, loaded(IDS).logits)
    assert len(cache_of(output)) == 4
    # In two steps, which needs every layer to find its own place in the cache.
    cache = cache_of(prefill(llama, IDS[:, :12]))
    second = prefill(llama, IDS[:, 12:], cache=cache)
    torch.testing.assert_close(second.logits, output.logits[:, 12:])


def test_gguf_weights_are_read_as_they_were_written(make_models, llama, tmp_path):
    import gguf

    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    config = llama.config
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    kinds = {ours: theirs for theirs, ours in make_models.LAYER_WEIGHTS.items()}
    for name, weight in llama.model.state_dict().items():
        parts = name.split(".")
        if parts[0] == "layers":
            kind = kinds[".".join(parts[2:-1])]
            # GGUF has the pairs that rotate together side by side: x0, x4, x1, x5, ...
            order = {"attn_q": 4, "attn_k": 2}.get(kind)
            if order:
                weight = weight.unflatten(0, (order, 2, 4)).transpose(1, 2).flatten(0, 2)
            name = f"blk.{parts[1]}.{kind}.weight"
        else:
            name = {
                "embed_tokens.weight": "token_embd.weight",
                "norm.weight": "output_norm.weight",
            }[name]
        writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    loaded = make_models.load(path)
    torch.testing.assert_close(loaded(IDS).logits, llama(IDS).logits)
