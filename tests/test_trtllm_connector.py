"""End to end between two stand-in engines: the target goes on as `kvhub.handoff` does."""

import functools
import importlib
import json
import sys
import time
from dataclasses import replace

import pytest
import torch
import trtllm_api as api
from deployments import deploy, states
from kvhub.exporters.trtllm_args import REQUIRED, check_args
from mapping import random_mapper
from tiny import tiny_model
from trtllm_api import PRESETS, V1_2_1, V1_3_0RC12, V1_3_0RC28, V1_4_0RC1, V1_4_MOONCAKE
from trtllm_fakes import greedy, prompts
from trtllm_host import Host

from kvhub import handoff
from kvhub.errors import IncompatiblePairError, KVHubError, UsageError, VerificationError

MODULE = "kvhub.exporters.trtllm_connector"


@functools.cache
def models():
    source, target = tiny_model("llama", 3, seed=1), tiny_model("qwen3", 4, seed=2)
    for model in (source, target):
        model.generation_config.eos_token_id = None
    return source, target


class Pair:
    """A source and a target engine of one exported directory, and what to expect of them."""

    def __init__(self, path, monkeypatch):
        self.path, self.monkeypatch, self.hosts = path, monkeypatch, []

    def export(self, heads="all", **settings):
        self.mapper = random_mapper(*models(), heads)
        self.deployment = deploy(self.mapper, self.path / "out", **settings)
        self.monkeypatch.setenv("TLLM_KVHUB_CONFIG", str(self.path / "out"))
        return self.deployment

    def serve(self, side, version=V1_2_1, overrides=None, **options):
        args = {"kv_cache_config.enable_partial_reuse": False}
        if version.layout == "mapping":
            dtype = str(options.get("dtype", torch.float32)).removeprefix("torch.")
            args["kv_cache_config.dtype"] = dtype
        names = (MODULE, f"{side.title()}Scheduler", f"{side.title()}Worker")
        options = {"tokens_per_block": 8, "num_blocks": 64, **options}
        model = models()[side == "target"]
        host = Host(model, version, names, llm_args_overrides=args | (overrides or {}), **options)
        self.hosts.append(host)
        return host

    def close(self, host):
        """As an engine ends, and what it would leave to the end of its process."""
        if host not in self.hosts:
            return
        self.hosts.remove(host)
        for worker in host.manager.workers:
            if worker.transfer is not None:
                worker.transfer.close()
        host.manager.scheduler.planner.stage.close()
        host.close()

    def read(self, tokens, count=2, version=V1_2_1, **options):
        """Let a source engine read prompts; what it answers."""
        host = self.serve("source", version, **options)
        answers = run(host, tokens, count)
        self.close(host)
        return [answer.tokens for answer in answers]

    def expected(self, prompt, request, exact=0, mapped=None):
        """The tokens of `handoff` for a request whose first `mapped` tokens were not computed."""
        ids, count = torch.tensor([prompt]), request.max_new_tokens
        mapped = request.cached_tokens if mapped is None else mapped
        rest = {"exact_prefix": exact, "exact_suffix": len(prompt) - mapped}
        options = {"max_new_tokens": count, "do_sample": False, **rest}
        return handoff(self.mapper, *models(), ids, **options)[0, len(prompt) :].tolist()

    @property
    def said(self):
        return states(self.path / "out")

    @property
    def entries(self):
        return {file.name for file in (self.path / "store").glob("*.kvhub")}


def own(prompt, request):
    return greedy(prompt, request.max_new_tokens, models()[1])


def run(host, tokens, count=6, salt=None, **options):
    requests = [host.submit(prompt, count, cache_salt=salt, **options) for prompt in tokens]
    host.run_until_idle()
    for worker in host.manager.workers:  # the store has what is saved a little later
        until = time.monotonic() + 60
        while worker.transfer.saver._bytes and time.monotonic() < until:
            time.sleep(0.001)
    return requests


@pytest.fixture
def pair(tmp_path, monkeypatch):
    made = Pair(tmp_path, monkeypatch)
    yield made
    for host in list(made.hosts):
        made.close(host)


@pytest.mark.parametrize(
    ("version", "heads", "blocks", "chunk", "ranks", "chunked", "overlap"),
    [
        (V1_2_1, "all", (4, 16), 8, (1, 1), False, False),
        (V1_2_1, "matched", (16, 4), 4, (2, 2), True, True),
        (V1_3_0RC12, "all", (8, 8), 16, (2, 1), True, False),
        (V1_3_0RC12, "matched", (4, 16), 32, (1, 2), False, True),
        (V1_3_0RC28, "all", (16, 4), 8, (1, 2), True, True),
        (V1_3_0RC28, "matched", (8, 8), 4, (2, 1), False, False),
        (V1_4_0RC1, "all", (8, 8), 8, (2, 2), False, True),
        (V1_4_0RC1, "matched", (4, 16), 4, (1, 1), True, False),
        (V1_4_MOONCAKE, "all", (4, 16), 4, (2, 2), True, False),
        (V1_4_MOONCAKE, "matched", (16, 4), 16, (1, 2), False, True),
    ],
)
def test_the_target_goes_on_as_handoff_does(
    pair, version, heads, blocks, chunk, ranks, chunked, overlap
):
    deployment = pair.export(
        heads, chunk_tokens=chunk, source_tp=ranks[0], target_tp=ranks[1], workspace_bytes=2**16
    )
    options = {"chunked": chunked, "overlap": overlap, "max_num_tokens": 64 if chunked else 8192}
    source, target = (
        {"tokens_per_block": size, "tp_size": count, **options}
        for size, count in zip(blocks, ranks, strict=True)
    )
    asked = prompts(45, 70, 33)
    answers = pair.read(asked, 12, version, **source)
    # What the source generated is its own work too.
    turns = [p + a + prompts(9)[0] for p, a in zip(asked, answers, strict=True)]
    host = pair.serve("target", version, **target)
    requests = [host.submit(turn, 8, cache_salt=deployment.salt()) for turn in turns]
    plain = [host.submit(turn, 8) for turn in turns]
    host.run_until_idle()
    unit = max(chunk, blocks[1])
    for prompt, turn, request, alone in zip(asked, turns, requests, plain, strict=True):
        # The last token that the source generated it has not computed; in an overlapping loop
        # nobody hears of the one before.
        known = (len(prompt) + 11 - overlap) // chunk * chunk
        assert request.external_tokens == request.cached_tokens == known // unit * unit
        assert request.tokens == pair.expected(turn, request)
        assert request.tokens != own(turn, request) == alone.tokens
        assert alone.external_tokens == 0
    said = {line["request"]: line for line in pair.said}
    assert {number: line["state"] for number, line in said.items()} == {
        request.request_id: "applied" for request in requests
    }
    mapped = {number: line["mapped_tokens"] for number, line in said.items()}
    assert mapped == {request.request_id: request.external_tokens for request in requests}
    assert host.leaked_blocks() == 0
    assert not host.manager.scheduler.planner._requests


@pytest.mark.parametrize("salted", [False, True])
@pytest.mark.parametrize(("version", "ranks"), [(V1_2_1, 2), (V1_3_0RC28, 1)])
def test_the_targets_own_states_come_back_exact(pair, version, ranks, salted):
    deployment = pair.export(target_tp=ranks)
    prompt = prompts(45)[0]
    salt = deployment.salt() if salted else None
    first = pair.serve("target", version, tp_size=ranks)
    (before,) = run(first, [prompt], 12, salt)
    keys = len(pair.entries)
    assert keys == ranks * ((45 + 11) // 8)
    pair.close(first)
    pair.read([prompt])  # what is exact comes before what could be mapped
    second = pair.serve("target", version, tp_size=ranks)
    turn = prompt + before.tokens + prompts(5)[0]
    (after,) = run(second, [turn], 4, deployment.salt())
    assert after.external_tokens == 56
    assert after.tokens == own(turn, after)
    assert (pair.said[-1]["exact_tokens"], pair.said[-1]["mapped_tokens"]) == (56, 0)


def test_exact_states_are_loaded_bit_by_bit(pair):
    deployment = pair.export()
    prompt, kept = prompts(45)[0], {}
    first = pair.serve("target")
    saver = first.manager.workers[0].transfer.saver
    put = saver._put
    saver._put = lambda save, states: (kept.update({save.start: states.clone()}), put(save, states))
    run(first, [prompt], 4)
    pair.close(first)
    second = pair.serve("target", tokens_per_block=16, seed=3)
    transfer, loads = second.manager.workers[0].transfer, []
    load = transfer.load
    transfer.load = lambda orders: (loads.extend(orders.loads), load(orders))
    (request,) = run(second, [prompt], 4, deployment.salt())
    assert request.external_tokens == 32
    for start in range(0, 32, 8):
        found = transfer.pool.read(start, loads[0].blocks[start // 16 :])
        assert torch.equal(found, kept[start])


@pytest.mark.parametrize("size", [8, 16])
def test_an_exact_head_and_a_mapped_rest(pair, size):
    deployment = pair.export(exact_prefix=5)
    prompt = prompts(45)[0]
    pair.read([prompt])
    host = pair.serve("target", tokens_per_block=size)
    (refused,) = run(host, [prompt], 6, deployment.salt())
    assert refused.external_tokens == 0
    assert refused.tokens == own(prompt, refused)
    assert pair.said[-1]["state"] == "fallback_reprefill"
    pair.close(host)
    for file in (pair.path / "store").glob("*.kvhub"):
        file.unlink()  # also what the target has just saved
    pair.read([prompt])
    host = pair.serve("target", tokens_per_block=size)
    run(host, [prompt[: size + 1]], 1)  # the warm-up
    (request,) = run(host, [prompt], 6, deployment.salt())
    line = pair.said[-1]
    assert (line["exact_tokens"], line["mapped_tokens"]) == (size, request.cached_tokens - size)
    assert request.tokens == pair.expected(prompt, request, exact=size)
    assert request.tokens != own(prompt, request)


@pytest.mark.parametrize(
    ("version", "overlap"), [(version, bool(number % 2)) for number, version in enumerate(PRESETS)]
)
def test_what_lies_on_top_of_mapped_states_is_never_saved(pair, version, overlap):
    deployment = pair.export()
    prompt = prompts(45)[0]
    pair.read([prompt])
    before = pair.entries
    host = pair.serve("target", version, overlap=overlap)
    (first,) = run(host, [prompt], 20, deployment.salt())
    assert first.external_tokens == 40
    turn = prompt + first.tokens + prompts(30)[0]
    (second,) = run(host, [turn], 20, deployment.salt())  # hits the engine's own reuse tree
    assert second.cached_tokens > 56
    assert second.external_tokens == 0
    run(host, [turn + second.tokens + [1, 2, 3]], 9, deployment.salt())
    assert pair.entries == before
    # Without the salt the engine computes it, exactly, and that is saved.
    (plain,) = run(host, [turn], 1)
    assert plain.tokens == own(turn, plain)
    assert len(pair.entries - before) == len(turn) // 8


def test_other_block_sizes_and_tenants_find_the_same_entries(pair):
    deployment = pair.export()
    prompt = prompts(45)[0]
    host = pair.serve("source", V1_2_1)
    run(host, [prompt], 2, "alice")  # whose name 1.2 does not show
    assert pair.entries == set()
    pair.close(host)
    host = pair.serve("source", V1_3_0RC12)
    run(host, [prompt], 2, "alice")
    pair.close(host)
    host = pair.serve("target", V1_3_0RC12)
    for tenant in ("bob", None):
        (request,) = run(host, [prompt], 4, deployment.salt(tenant))
        assert request.external_tokens == 0
        assert request.tokens == own(prompt, request)
    (request,) = run(host, [prompt], 4, deployment.salt("alice"))
    assert request.tokens == pair.expected(prompt, request) != own(prompt, request)


WRONG = {
    **dict.fromkeys(("pipeline_parallel_size", "context_parallel_size", "max_beam_width"), 2),
    "enable_attention_dp": True,
    "attn_backend": "FLASHINFER",
    "backend": "tensorrt",
    "kv_cache_config.enable_block_reuse": False,
    "kv_cache_config.enable_partial_reuse": True,
    "kv_cache_config.host_cache_size": 1,
    "kv_cache_config.max_attention_window": [64],
    "scheduler_config.capacity_scheduler_policy": "MAX_UTILIZATION",
}


@pytest.mark.parametrize("version", PRESETS, ids=lambda version: version.name)
def test_what_is_required_of_the_engine(pair, version):
    deployment = pair.export()
    for path, _, _ in REQUIRED:
        right = {"kv_cache_config.enable_partial_reuse": False}
        names = (MODULE, "TargetScheduler", "TargetWorker")
        check_args(api.make_llm_args(version, names, **right), deployment, maps=True)
        args = api.make_llm_args(version, names, **right | {path: WRONG.get(path, object())})
        with pytest.raises(UsageError, match=path):
            check_args(args, deployment, maps=True)
    for path in ("max_beam_width", "kv_cache_config.enable_partial_reuse"):
        with pytest.raises((UsageError, NotImplementedError)):
            pair.serve("target", version, {path: WRONG[path]})
    for name in ("TargetScheduler", "SourceWorker"):  # each of the two refuses for itself
        api.install(version)
        try:
            kind = getattr(importlib.import_module(MODULE), name)
            with pytest.raises(UsageError, match="max_beam_width"):
                kind(api.make_llm_args(version, None, **right, max_beam_width=2))
        finally:
            api.uninstall()
            sys.modules.pop(MODULE, None)


def edit(pair, name, **values):
    file = pair.path / "out" / name
    content = json.loads(file.read_text())
    for key, value in values.items():
        content.pop(key, None)
        if value is not None:
            content[key] = value
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("side", "version", "change", "options", "message"),
    [
        ("target", V1_2_1, {"target_tp": 2}, {}, "tensor_parallel_size"),
        ("source", V1_2_1, {}, {"tp_size": 2}, "tensor_parallel_size"),
        ("target", V1_2_1, {"target_kv_dtype": "bfloat16"}, {}, "pool"),
        ("target", V1_4_MOONCAKE, {"target_kv_dtype": "bfloat16"}, {}, "dtype"),
        ("target", V1_3_0RC28, {"target_kv_dtype": "bfloat16"}, {}, "dtype"),
        ("target", V1_2_1, {"target_kv_dtype": "float4"}, {}, "target_kv_dtype"),
        ("target", V1_2_1, {"unheard_of": 1}, {}, "unheard_of"),
        ("target", V1_2_1, {"chunk_tokens": 24}, {}, "power of two"),
        ("target", V1_2_1, {"source_kv_scales": [1.0]}, {}, "scales"),
        ("target", V1_2_1, {"store": {"kind": "attic"}}, {}, "attic"),
        ("target", V1_2_1, {"target_tp": 0}, {}, "target_tp"),
        ("target", V1_2_1, {"target_tp": "two"}, {}, "wrong kind"),
    ],
)
def test_settings_that_do_not_fit(pair, side, version, change, options, message):
    pair.export()
    edit(pair, "settings.json", **change)
    with pytest.raises(KVHubError, match=message):
        pair.serve(side, version, **options)


def test_an_edited_directory(pair):
    pair.export()
    rope = json.loads((pair.path / "out" / "kvhub.json").read_text())["source"]
    rope["rope"]["inv_freq"][1] *= 2
    for change in (
        {"schema": 2},
        {"target": None},
        {"heads": "matched"},
        {"source": rope},
        {"weights_sha256": "0" * 64},
    ):
        kept = (pair.path / "out" / "kvhub.json").read_text()
        edit(pair, "kvhub.json", **change)
        with pytest.raises(VerificationError):
            pair.serve("target")
        (pair.path / "out" / "kvhub.json").write_text(kept)
    weights = pair.path / "out" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(VerificationError, match="sha256"):
        pair.serve("target")


@pytest.mark.parametrize("version", [V1_2_1, V1_3_0RC28, V1_4_MOONCAKE])
def test_a_pool_of_another_model(pair, version, monkeypatch):
    pair.export()
    turned = models()[::-1]
    monkeypatch.setattr(sys.modules[__name__], "models", lambda: turned)
    with pytest.raises(IncompatiblePairError):
        pair.serve("target", version)


def test_layouts_that_are_refused(pair):
    pair.export()
    host = pair.serve("target", V1_4_MOONCAKE)
    worker = host.manager.workers[0]
    layout = host.engine.layout(0, V1_4_MOONCAKE)
    (group,) = layout.groups
    (region,) = group.regions
    turned = replace(region, buffers=region.buffers[::-1])
    for groups in (
        (group, group),
        (replace(group, window_size=32),),
        (replace(group, regions=(region, region)),),
        (replace(group, regions=(turned,)),),
    ):
        with pytest.raises(IncompatiblePairError):
            worker.register_kv_cache_layout(replace(layout, groups=groups))
    worker._llm_args.kv_cache_config.dtype = "auto"
    with pytest.raises(IncompatiblePairError, match="auto"):
        worker.register_kv_cache_layout(layout)
    worker.tokens_per_block = 16
    with pytest.raises(IncompatiblePairError, match="tokens per block"):
        worker.register_kv_caches(host.engine.unique_pool(0))
