"""A conversation of the embedded family, over a directory that `kvhub export` writes."""

import json
from pathlib import Path

import pytest
import torch
from deployments import states
from kvhub.exporters import export
from kvhub.exporters.serving import load_deployment
from transformers import AutoModelForCausalLM, AutoTokenizer
from trtllm_fakes import greedy
from trtllm_host import Host

from kvhub import ModelSpec, calibrate, fit, handoff, select_layers

FAMILY = Path(__file__).parents[1] / "examples" / "tiny_family"
MODULE = "kvhub.exporters.trtllm_connector"
PROMPT = """def fibonacci(count):
    first, second = 0, 1
    for _ in range(count):
        yield first
"""
NEXT = "\n\ndef main():\n    for number in fibonacci(10):\n"


@pytest.fixture(scope="module")
def family():
    models = [
        AutoModelForCausalLM.from_pretrained(FAMILY / name, dtype=torch.float32).eval()
        for name in ("middle", "large")
    ]
    for model in models:
        model.generation_config.eos_token_id = None
    specs = [ModelSpec.from_pretrained(str(FAMILY / name)) for name in ("middle", "large")]
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "large")
    text = "\n".join(
        path.read_text("utf-8") for path in sorted((FAMILY.parents[1] / "kvhub").glob("r*.py"))
    )
    ids = torch.tensor(tokenizer(text)["input_ids"])[: 40 * 96].view(-1, 4, 96)
    found = calibrate(*models, ids.unbind(), source_spec=specs[0], target_spec=specs[1])
    return (*models, tokenizer, fit(found, select_layers(found, 2)))


def test_the_target_goes_on_where_the_source_ended(family, tmp_path, monkeypatch):
    source, target, tokenizer, mapper = family
    path = export(mapper, "trtllm", tmp_path / "out", dtype=torch.float32)
    values = json.loads((path / "settings.json").read_text()) | {
        "store": {"kind": "files", "capacity_bytes": 2**26, "path": str(tmp_path / "store")},
        **{"source_kv_dtype": "float32", "target_kv_dtype": "float32", "chunk_tokens": 8},
        **{"staging_path": str(tmp_path / "stage"), "lookup_seconds": 10.0},
        "status_file": str(path / "status.jsonl"),
    }
    (path / "settings.json").write_text(json.dumps(values))
    monkeypatch.setenv("TLLM_KVHUB_CONFIG", str(path))
    engines = {}
    for model, side in ((source, "Source"), (target, "Target")):
        engines[side] = Host(
            model,
            connector=(MODULE, f"{side}Scheduler", f"{side}Worker"),
            tokens_per_block=8,
            num_blocks=96,
            llm_args_overrides={"kv_cache_config.enable_partial_reuse": False},
        )
    try:
        prompt = tokenizer(PROMPT)["input_ids"]
        first = engines["Source"].submit(prompt, 9)
        engines["Source"].run_until_idle()
        assert first.tokens == greedy(prompt, 9, source)
        history = prompt + first.tokens + tokenizer(NEXT)["input_ids"]
        salt = load_deployment(path).salt()
        served = engines["Target"].submit(history, 12, cache_salt=salt)
        plain = engines["Target"].submit(history, 12)
        engines["Target"].run_until_idle()
        # What the source had read, its own answer included, as far as it fills blocks.
        known = (len(prompt) + len(first.tokens) - 1) // 8 * 8
        assert served.external_tokens == known > len(prompt) - 8
        ids = torch.tensor([history])
        expected = handoff(
            *(mapper, source, target, ids),
            **{"max_new_tokens": 12, "exact_prefix": 0, "do_sample": False},
            exact_suffix=len(history) - known,
        )
        assert served.tokens == expected[0, len(history) :].tolist()
        assert plain.tokens == greedy(history, 12, target)
        assert [line["state"] for line in states(path)] == ["applied"]
        # Another tenant's request finds nothing of it.
        longer = history + plain.tokens + prompt
        again = engines["Target"].submit(longer, 5, cache_salt=f"{salt}:another")
        engines["Target"].run_until_idle()
        assert again.external_tokens == 0
        assert again.tokens == greedy(longer, 5, target)
    finally:
        for engine in engines.values():
            engine.close()
