"""Finding the files of a model, in a directory or in the Hub's cache."""

import json
from types import SimpleNamespace

import huggingface_hub.constants
import huggingface_hub.errors
import pytest
from tiny import tiny_config
from tokenizers import Tokenizer, models

from kvhub.errors import AuthError, NetworkError, NotFoundError, VerificationError
from kvhub.spec import ModelSpec
from kvhub.tokenization import file_digest


def write_model(directory, raw, tokenizer=True):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    if tokenizer:
        tokenizer_state = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        tokenizer_state.save(str(directory / "tokenizer.json"))


def test_from_a_local_directory(tmp_path):
    write_model(tmp_path, tiny_config("mistral3"))
    spec = ModelSpec.from_pretrained(str(tmp_path))
    digest = file_digest(tmp_path / "tokenizer.json")
    assert spec == ModelSpec.from_config(tiny_config("mistral3"), str(tmp_path), None, digest)
    assert digest is not None


def test_a_missing_tokenizer_is_unknown(tmp_path):
    # transformers would make an empty one for this model type, equal to that of any other model.
    write_model(tmp_path, tiny_config("qwen3"), tokenizer=False)
    assert ModelSpec.from_pretrained(str(tmp_path)).tokenizer_digest is None


def hub_model(monkeypatch, tmp_path, raw):
    """Put a model into an empty Hub cache, as a download would."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--name"
    write_model(repository / "snapshots" / commit, raw)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return commit


@pytest.mark.parametrize("at_commit", [False, True])
def test_from_the_hub_cache(monkeypatch, tmp_path, at_commit):
    commit = hub_model(monkeypatch, tmp_path, tiny_config("qwen3"))
    revision = commit if at_commit else None
    spec = ModelSpec.from_pretrained("org/name", revision=revision, local_files_only=True)
    assert (spec.model_id, spec.revision) == ("org/name", commit)
    assert spec.tokenizer_digest is not None


@pytest.mark.parametrize("local_files_only", [False, True])
def test_a_model_that_was_never_downloaded(monkeypatch, tmp_path, local_files_only):
    hub_model(monkeypatch, tmp_path, tiny_config("qwen3"))
    for model_id, revision in (("org/other", None), ("org/name", "v2")):
        with pytest.raises(
            NetworkError, match=rf"config\.json of {model_id}.* in neither"
        ) as caught:
            ModelSpec.from_pretrained(model_id, revision, local_files_only)
        assert "HF_HUB_OFFLINE" in caught.value.hint


@pytest.mark.parametrize("model_id", ["not a model", "a/b/c"])
def test_an_id_that_cannot_exist(model_id):
    with pytest.raises(NotFoundError, match=rf"model {model_id}, found none"):
        ModelSpec.from_pretrained(model_id)


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        ("GatedRepoError", AuthError, "org/name is gated"),
        ("RepositoryNotFoundError", NotFoundError, "a model org/name at v1, found none"),
        ("RevisionNotFoundError", NotFoundError, "a model org/name at v1, found none"),
        ("RemoteEntryNotFoundError", NotFoundError, r"Expected config\.json of a model org/name"),
        ("HfHubHTTPError", NetworkError, r"did not give config\.json of org/name at v1"),
    ],
)
def test_answers_of_the_hub(monkeypatch, raised, expected, message):
    error = getattr(huggingface_hub.errors, raised)
    response = SimpleNamespace(headers={}, request=None)

    def answer(*arguments, **options):
        raise error("no", response=response)

    monkeypatch.setattr("kvhub.configs.hf_hub_download", answer)
    with pytest.raises(expected, match=message):
        ModelSpec.from_pretrained("org/name", revision="v1")


def test_a_directory_without_a_model(tmp_path):
    with pytest.raises(NotFoundError, match=r"Expected a config\.json in .*, found none"):
        ModelSpec.from_pretrained(str(tmp_path))


@pytest.mark.parametrize(("content", "message"), [("{", "Expected JSON"), ("[]", "an object")])
def test_a_broken_config_file(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(VerificationError, match=message):
        ModelSpec.from_pretrained(str(tmp_path))


def test_a_broken_tokenizer_file(tmp_path):
    write_model(tmp_path, tiny_config("qwen3"))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(VerificationError, match=r"tokenizer in .*tokenizer\.json, found a file"):
        ModelSpec.from_pretrained(str(tmp_path))
