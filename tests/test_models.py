"""Loading models by name, and what is said when it does not work."""

import json

import pytest
import torch
from mapping import identity_mapper
from tiny import tiny_model

from kvhub import calibrate, handoff
from kvhub.errors import NetworkError, NotFoundError, UsageError
from kvhub.models import count_parameters, load_model, load_tokenizer, torch_dtype


@pytest.mark.parametrize("architecture", ["qwen3", "ministral3", "mistral3"])
def test_a_model_comes_back_in_evaluation_mode(tmp_path, architecture):
    """mistral3 is the multimodal wrapper that Ministral 3 is published in."""
    model = tiny_model(architecture, 2)
    model.save_pretrained(tmp_path / "m")
    loaded = load_model(str(tmp_path / "m"))
    assert type(loaded) is type(model)
    assert not loaded.training
    assert loaded.dtype == torch.float32
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    half = load_model(str(tmp_path / "m"), dtype="bfloat16")
    assert half.dtype == torch.bfloat16


def test_a_wrapped_text_model_is_calibrated_and_handed_to():
    model = tiny_model("mistral3", 3)
    ids = torch.arange(3, 30)[None]
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = handoff(identity_mapper(model), model, model, ids, max_new_tokens=8, **greedy)
    assert torch.equal(found, model.generate(ids, max_new_tokens=8, **greedy))
    for weighting in ("uniform", "attention"):
        statistics = calibrate(model, model, [torch.randint(3, 64, (10, 20))], weighting=weighting)
        assert statistics.tokens == 9 * 20


def test_parameters_are_counted_without_weights(tmp_path):
    model = tiny_model("qwen3", 2)
    model.config.save_pretrained(tmp_path / "m")  # a config and nothing else
    assert count_parameters(str(tmp_path / "m")) == model.num_parameters()


def test_what_cannot_be_loaded_is_told_apart(tmp_path):
    with pytest.raises(NetworkError, match="org/model"):
        load_model("org/model")
    with pytest.raises(NotFoundError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path / "nothing"))
    config = {"model_type": "vit", "hidden_size": 8, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="is a vit; expected a model that writes text"):
        load_model(str(tmp_path))
    with pytest.raises(UsageError, match="Unknown dtype 'int8'"):
        torch_dtype("int8")
    assert torch_dtype("auto", "cpu") == torch.float32
    assert torch_dtype("auto", "cuda:1") == torch.bfloat16
