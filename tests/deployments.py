"""Exported directories for the tests of what serves from them."""

import hashlib
import json

from kvhub.exporters.plan import make_plan
from kvhub.exporters.serving import load_deployment, mapper_digest
from safetensors.torch import save_file


def side(spec, name):
    rope = spec.require_rope()
    return {
        "model": name,
        "revision": "0" * 40,
        "tokenizer_digest": "tokens",
        "num_layers": spec.num_layers,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rope": {
            "inv_freq": list(rope.inv_freq),
            "attention_scaling": rope.attention_scaling,
            "rotary_dim": rope.rotary_dim,
            "interleaved": rope.interleaved,
        },
    }


def deploy(mapper, path, names=("source", "target"), dtype=None, **settings):
    """Write what a connector reads of an exported directory; with float32 pools by default."""
    plan = make_plan(mapper, dtype=dtype)
    path.mkdir(parents=True)
    tensors = {
        name: getattr(plan, name)
        for name in ("key_weight", "value_weight", "key_bias", "value_bias")
    }
    save_file(tensors, path / "weights.safetensors")
    weights = hashlib.sha256((path / "weights.safetensors").read_bytes()).hexdigest()
    facts = {
        "schema": 1,
        "heads": plan.heads,
        "groups": plan.groups,
        "top_k": plan.top_k,
        "gather": plan.gather.tolist(),
        "weights_sha256": weights,
        "source": side(mapper.config.source, names[0]),
        "target": side(mapper.config.target, names[1]),
    }
    facts["digest"] = mapper_digest(facts)
    (path / "kvhub.json").write_text(json.dumps(facts))
    values = {
        "store": {
            "kind": "files",
            "capacity_bytes": 2**28,
            "path": str(path.parent / "store"),
        },
        "source_kv_dtype": "float32",
        "target_kv_dtype": "float32",
        "chunk_tokens": 8,
        "staging_path": str(path.parent / "stage"),
        "status_file": str(path / "status.jsonl"),
        "workspace_bytes": 2**20,
        "lookup_seconds": 10.0,
        **settings,
    }
    (path / "settings.json").write_text(json.dumps(values))
    return load_deployment(path)


def states(path):
    """What the status file says became of requests, in order."""
    file = path / "status.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
