"""The stand-in for TensorRT-LLM's executor does what the notes in its files say it does."""

import math
import sys
import threading
from pathlib import Path

import pytest
import torch
from tiny import tiny_model
from transformers import AutoModelForCausalLM
from trtllm_api import (
    PRESETS,
    V1_2_1,
    V1_3_0RC28,
    V1_4_0RC1,
    V1_4_MOONCAKE,
    get_cache_salt_id,
)
from trtllm_fakes import Idle, IdleWorker, greedy, prompts, serving, store_of
from trtllm_host import EngineDeadError

FAMILY = Path(__file__).parents[1] / "examples" / "tiny_family"


@pytest.fixture
def serve():
    with serving() as make:
        yield make


@pytest.mark.parametrize(
    ("version", "overlap", "tokens_per_block", "tp_size", "chunked"),
    [
        (V1_2_1, False, 8, 1, False),
        (V1_2_1, True, 4, 2, True),
        (V1_3_0RC28, True, 8, 2, True),
        (V1_4_0RC1, False, 32, 2, False),
        (V1_4_MOONCAKE, False, 16, 1, True),
    ],
)
def test_tokens_are_those_of_transformers(
    serve, version, overlap, tokens_per_block, tp_size, chunked
):
    host = serve(
        version,
        tokens_per_block=tokens_per_block,
        overlap=overlap,
        tp_size=tp_size,
        chunked=chunked,
        max_num_tokens=64 if chunked else 8192,
    )
    first = prompts(1, 8, 33, 90)
    second = [first[3][:70] + prompts(9)[0], first[3], first[2] + prompts(40, seed=1)[0]]
    cached = []
    for tokens in (first, second):
        requests = [host.submit(prompt, 11) for prompt in tokens]
        host.run_until_idle()
        for prompt, request in zip(tokens, requests, strict=True):
            assert request.tokens == greedy(prompt, 11)
            assert request.finish_reason == "length"
            cached.append(request.cached_tokens)
    assert cached[:4] == [0] * 4
    # Part of a block is reused too, but never the last token.
    assert cached[4] == 70
    assert cached[5] == 89
    assert cached[6] == 33
    assert host.leaked_blocks() == 0


def test_sixty_four_requests_at_once_on_few_blocks(serve):
    host = serve(num_blocks=60, parts=(Idle, IdleWorker), overlap=True)
    tokens = prompts(*range(3, 67))
    requests = [host.submit(prompt, 5) for prompt in tokens]
    host.run_until_idle()
    for prompt, request in list(zip(tokens, requests, strict=True))[::9]:
        assert request.tokens == greedy(prompt, 5)
    assert host.leaked_blocks() == 0
    assert all(request.done for request in requests)


@pytest.mark.parametrize("overlap", [False, True])
def test_callbacks_are_counted_as_in_the_test_of_upstream(serve, overlap):
    host = serve(parts=(Idle, IdleWorker), overlap=overlap, tokens_per_block=32)
    host.submit(prompts(48)[0], 32)
    host.run_until_idle()
    for name in ("get_num_new_matched_tokens", "update_state_after_alloc", "request_finished"):
        assert host.count(name) == 1
    for name in ("build_connector_meta", "start_load_kv", "wait_for_save"):
        assert host.count(name) == 32
    assert host.count("get_finished") == 32 + overlap
    worker, scheduler = host.manager.workers[0], host.manager.scheduler
    assert worker.layers == [0, 1, 2] * 32
    assert worker.forwards == 32
    assert host.count("save_kv_layer") == 3 * 32
    assert [len(blocks) for blocks in scheduler.allocated] == [2]
    assert len(scheduler.ended[0][1]) == math.ceil((48 + 32) / 32)
    (new,) = scheduler.outputs[0].new_requests
    assert (len(new.new_tokens), len(new.new_block_ids)) == (48, 2)
    assert (new.computed_position, new.num_scheduled_tokens) == (0, 48)
    for step, output in enumerate(scheduler.outputs[1:]):
        (data,) = output.cached_requests
        assert output.new_requests == []
        assert len(data.new_tokens) == (0 if overlap and step == 0 else 1)
        crosses = (data.computed_position + overlap) % 32 == 0 and data.new_tokens
        assert len(data.new_block_ids) == bool(crosses)
    one = ["build_connector_meta", "bind_connector_meta", "start_load_kv"]
    one += ["wait_for_layer_load", "save_kv_layer"] * 3 + ["wait_for_save"]
    names = [name for _, name in host.calls]
    start = names.index("get_num_new_matched_tokens")
    assert names[start + 1 : start + 2 + len(one)] == ["update_state_after_alloc", *one]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("version", [V1_2_1, V1_3_0RC28])
def test_chunks_of_a_prompt(serve, overlap, version):
    host = serve(version, (Idle, IdleWorker), overlap=overlap, chunked=True, max_num_tokens=64)
    host.submit(prompts(128)[0], 8)
    host.run_until_idle()
    first, second, third = (
        (output.new_requests + output.cached_requests)[0]
        for output in host.manager.scheduler.outputs[:3]
    )
    assert [len(blocks) for blocks in host.manager.scheduler.allocated] == [
        8 if version.layout else 16
    ]
    assert len(first.new_tokens) == 128
    assert len(first.new_block_ids) == (8 if version.layout else 16)
    assert len(second.new_block_ids) == (8 if version.layout else 0)
    assert (second.computed_position, second.num_scheduled_tokens) == (64, 64)
    assert second.new_tokens == []
    assert len(third.new_tokens) == (0 if overlap else 1)


@pytest.mark.parametrize("version", PRESETS, ids=lambda version: version.name)
@pytest.mark.parametrize("in_background", [False, True])
def test_a_connector_that_saves_and_loads(serve, version, in_background):
    entries = {}
    prompt = prompts(61)[0]
    cached = []
    for seed, overlap in enumerate((False, True)):
        parts = store_of(entries, in_background)
        host = serve(version, parts, tp_size=2, overlap=overlap, seed=seed)
        request = host.submit(prompt, 9)
        host.run_until_idle()
        assert request.tokens == greedy(prompt, 9)
        assert host.leaked_blocks() == 0
        cached.append(request.external_tokens)
    assert cached == [0, 56]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_load_in_the_background(serve, overlap):
    class Slow(IdleWorker):
        def get_finished(self, saving, loading):
            self.held[1].extend(loading)
            self.asked.append((saving, loading))
            last = 2 + sys.modules["tensorrt_llm"].mpi_rank()  # the second rank is late
            return [], self.held[1] if len(self.asked) == last else []

    parts = (type("Slowly", (Idle,), {"answer": (16, True)}), Slow)
    host = serve(parts=parts, overlap=overlap, tp_size=2)
    request = host.submit(prompts(40)[0], 4)
    host.step()
    scheduler = host.manager.scheduler
    assert scheduler.outputs[0].new_requests == []  # parked
    assert host.count("wait_for_layer_load") == 0
    host.step()
    host.step()
    assert len(scheduler.outputs) == 1  # nothing to schedule, and rank 1 is late
    host.run_until_idle()
    (new,) = scheduler.outputs[1].new_requests
    assert (new.computed_position, new.num_scheduled_tokens) == (16, 24)
    assert host.count("update_state_after_alloc") == 1
    assert host.count("get_finished") == 2 * (3 + 4 + overlap)
    assert request.cached_tokens == 16


def test_blocks_are_pinned_until_every_rank_has_saved(serve):
    late = []

    class Saver(IdleWorker):
        def get_finished(self, saving, loading):
            self.held[0].extend(saving)
            rank = sys.modules["tensorrt_llm"].mpi_rank()
            done = [number for number in self.held[0] if not rank or number in late]
            self.held = ([n for n in self.held[0] if n not in done], [])
            return done, []

    host = serve(parts=(type("Saves", (Idle,), {"saves": True}), Saver), tp_size=2)
    request = host.submit(prompts(40)[0], 4)
    host.run_until_idle(drain=False)
    assert request.done
    assert len(host.blocks.referenced) == 6
    assert host.leaked_blocks() == 0
    host.step()
    assert len(host.blocks.referenced) == 6
    late.append(request.request_id)
    host.run_until_idle()
    assert not host.blocks.referenced


@pytest.mark.parametrize("version", PRESETS, ids=lambda version: version.name)
def test_versions_differ_as_they_say(serve, version):
    seen = {}

    class Reads(Idle):
        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            for name in ("cache_salt_id", "cache_salt", "tokens", "py_request_id", "blocks"):
                seen[name] = getattr(request, name, "none")
            seen["generation"] = request.is_generation_only_request
            return 0, False

    host = serve(version, (Reads, IdleWorker))
    host.submit(prompts(9)[0], 2, cache_salt="a")
    host.run_until_idle()
    (data,) = host.manager.scheduler.outputs[0].new_requests
    salted = version is not V1_2_1
    assert (seen["cache_salt"] == "a") == salted == hasattr(data, "cache_salt")
    assert seen["cache_salt_id"] == get_cache_salt_id("a")
    assert {seen[name] for name in ("tokens", "py_request_id", "blocks")} == {"none"}
    assert callable(seen["generation"]) == bool(version.layout)
    old = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"
    assert (old in sys.modules) == (version is V1_2_1)
    groups = getattr(data, "new_block_ids_by_layer_group", None)
    if version.by_group:
        ids = groups[0]
        assert type(groups).__name__ == version.by_group
        assert ids == data.new_block_ids
    else:
        assert not groups
    worker = host.manager.workers[0]
    if version.layout:
        (region,) = worker.layout.groups[0].regions
        assert region.stride > region.size == region.as_tensor().shape[1]
        assert hasattr(worker.layout, "as_single_pool_tensor") == (version.layout == "dtype")
    else:
        assert worker.pool.is_contiguous()
        assert worker.pool.shape == (128, 3, 2, 2 * 8 * 16)


@pytest.mark.parametrize("version", [V1_3_0RC28, V1_4_MOONCAKE])
def test_sliding_windows_are_layer_groups_of_v2(serve, version):
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    window = {"use_sliding_window": True, "sliding_window": 12, "layer_types": layers}
    sliding = tiny_model("qwen3", layers=3, **window)
    with pytest.raises(NotImplementedError, match="by_layer_group"):
        serve(version, (Idle, IdleWorker), model=sliding)
    told = []

    class Grouped(Idle):
        def update_state_after_alloc_by_layer_group(self, request, block_ids_by_layer_group):
            told.append(block_ids_by_layer_group)

        def request_finished_by_layer_group(self, request, cache_block_ids_by_layer_group):
            told.append(cache_block_ids_by_layer_group)
            return False

    host = serve(version, (Grouped, IdleWorker), model=sliding)
    prompt = prompts(30)[0]
    request = host.submit(prompt, 9)
    host.run_until_idle()
    assert request.tokens == greedy(prompt, 9, sliding)
    layout = host.manager.workers[0].layout
    assert [group.layer_ids for group in layout.groups] == [(0, 2), (1,)]
    assert [group.window_size for group in layout.groups] == [12, None]
    passed, kept = told[-1][0], told[-1][1]
    assert passed[:3] == [-1] * 3
    assert min(passed[3:] + kept) >= 0
    assert len(passed) == len(kept) == 5
    assert host.manager.scheduler.outputs[0].new_requests[0].new_block_ids == []


def test_the_embedded_models_run(serve):
    small = AutoModelForCausalLM.from_pretrained(FAMILY / "small", dtype=torch.float32).eval()
    prompt = prompts(50)[0]
    expected = greedy(prompt, 8, small)
    host = serve(model=small, tp_size=2)
    request = host.submit(prompt, 8)
    host.run_until_idle()
    assert request.tokens == expected
    stopping = serve(model=small, overlap=True)
    stopped = stopping.submit(prompt, 8, eos=[expected[2]])
    stopping.run_until_idle()
    assert stopped.tokens == expected[: expected.index(expected[2]) + 1]
    assert stopped.finish_reason == "stop"
    assert stopping.leaked_blocks() == 0
    half = serve(model=small, dtype=torch.bfloat16)
    assert half.engine.unique_pool(0).dtype == torch.bfloat16
    half.submit(prompt, 8)
    half.run_until_idle()


def test_metadata_is_pickled_for_the_other_ranks(serve):
    class Tells(Idle):
        def build_connector_meta(self, scheduler_output):
            self.told = [scheduler_output]
            return self.told

    host = serve(parts=(Tells, IdleWorker), tp_size=2)
    host.submit(prompts(9)[0], 1)
    host.run_until_idle()
    first, second = (worker.get_connector_meta() for worker in host.manager.workers)
    assert first is host.manager.scheduler.told
    assert second == first
    assert second is not first
    host.manager.scheduler.build_connector_meta = lambda output: lambda: None
    host.submit(prompts(9)[0], 1)
    with pytest.raises(EngineDeadError, match="pickle"):
        host.step()


def test_block_ids_are_shuffled_and_start_with_reused_ones(serve):
    host = serve(parts=(Idle, IdleWorker))
    prompt = prompts(40)[0]
    for tokens in (prompt, prompt[:24] + prompts(16, seed=3)[0]):
        host.submit(tokens, 2)
        host.run_until_idle()
    first, second = host.manager.scheduler.allocated
    assert sorted(first) != first
    assert first[:3] == second[:3]
    assert not set(first[3:]) & set(second[3:])
    assert host.manager.scheduler.computed == [0, 24]
    assert host.manager.scheduler.outputs[2].new_requests[0].computed_position == 24


def test_an_unaligned_prefix_ends_its_chunk_at_a_block(serve):
    host = serve(parts=(Idle, IdleWorker), chunked=True, max_num_tokens=32)
    prompt = prompts(100)[0]
    for tokens in (prompt[:20], prompt):
        host.submit(tokens, 2)
        host.run_until_idle()
    scheduler = host.manager.scheduler
    assert scheduler.computed == [0, 20]
    datas = [data for o in scheduler.outputs for data in o.new_requests + o.cached_requests]
    spans = [(data.computed_position, data.num_scheduled_tokens) for data in datas[2:]]
    assert spans == [(20, 28), (48, 32), (80, 20), (100, 1)]


@pytest.mark.parametrize("version", PRESETS[:2])
def test_two_prompts_are_added_one_by_one_or_in_a_batch(serve, version):
    host = serve(version, (Idle, IdleWorker))
    for prompt in prompts(20, 20):
        host.submit(prompt, 1)
    host.step()
    names = ["get_num_new_matched_tokens", "update_state_after_alloc"]
    calls = [name for _, name in host.calls if name in names]
    assert calls == (sorted(names * 2) if version.batched_add else names * 2)


def test_constructors_run_on_threads_at_the_same_time(serve):
    meeting = threading.Barrier(3, timeout=10)

    class Meets:
        def __init__(self, llm_args):
            super().__init__(llm_args)
            meeting.wait()
            self.thread = threading.current_thread()

    parts = (type("Scheduler", (Meets, Idle), {}), type("Worker", (Meets, IdleWorker), {}))
    host = serve(parts=parts, tp_size=2)
    threads = [part.thread for part in (host.manager.scheduler, *host.manager.workers)]
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("name", "value", "refused_by"),
    [
        ("scheduler_config.capacity_scheduler_policy", "MAX_UTILIZATION", PRESETS),
        ("pipeline_parallel_size", 2, PRESETS),
        ("max_beam_width", 2, PRESETS[2:]),
        ("kv_cache_config.host_cache_size", 1, PRESETS[2:]),
    ],
)
def test_what_start_up_refuses(serve, name, value, refused_by):
    for version in PRESETS:
        if version in refused_by:
            with pytest.raises(NotImplementedError):
                serve(version, (Idle, IdleWorker), llm_args_overrides={name: value})
            assert "tensorrt_llm" not in sys.modules
        else:
            serve(version, (Idle, IdleWorker), llm_args_overrides={name: value}).close()


def test_without_block_reuse_nobody_asks_the_connector(serve):
    off = {"kv_cache_config.enable_block_reuse": False}
    host = serve(parts=(Idle, IdleWorker), llm_args_overrides=off)
    host.submit(prompts(40)[0], 3)
    host.run_until_idle()
    assert host.count("get_num_new_matched_tokens") == 0
    assert host.count("update_state_after_alloc") == 1
