"""What breaks the stand-in for TensorRT-LLM's executor is what breaks the real one."""

from dataclasses import replace

import pytest
import torch
from trtllm_api import V1_2_1, V1_4_0RC1
from trtllm_fakes import Idle, IdleWorker, greedy, prompts, raising, serving
from trtllm_host import EngineDeadError

HOOKS = ("wait_for_layer_load", "save_kv_layer", "wait_for_save")


@pytest.fixture
def serve():
    with serving() as make:
        yield make


@pytest.mark.parametrize(
    "name",
    [
        *("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
        *("request_finished", "start_load_kv", "get_finished"),
    ],
)
def test_what_raises_outside_of_the_forward_pass_ends_the_engine(serve, name):
    scheduler = raising(name, Idle) if hasattr(Idle, name) else Idle
    worker = raising(name, IdleWorker) if hasattr(IdleWorker, name) else IdleWorker
    host = serve(parts=(scheduler, worker))
    request = host.submit(prompts(20)[0], 2)
    with pytest.raises(EngineDeadError, match=name):
        host.run_until_idle()
    assert request.finish_reason == "error" or name == "request_finished"
    with pytest.raises(EngineDeadError):
        host.step()


@pytest.mark.parametrize("name", HOOKS)
def test_what_raises_in_the_forward_pass_fails_every_request(serve, name):
    host = serve(parts=(Idle, raising(name, IdleWorker)))
    requests = [host.submit(prompt, 3) for prompt in prompts(20, 30)]
    host.run_until_idle()
    assert [request.error for request in requests] == [f"ValueError: {name}"] * 2
    assert host.leaked_blocks() == 0
    assert host.count("request_finished") == 2
    overlapping = serve(parts=(Idle, raising(name, IdleWorker)), overlap=True)
    overlapping.submit(prompts(20)[0], 3)
    with pytest.raises(EngineDeadError, match="Sampling failed"):
        overlapping.run_until_idle()


@pytest.mark.parametrize("stores_unfilled", [True, False])
def test_v1_keeps_the_blocks_of_a_failed_prefill_for_reuse(serve, stores_unfilled):
    worker = raising("wait_for_layer_load", IdleWorker)
    host = serve(replace(V1_2_1, stores_unfilled=stores_unfilled), (Idle, worker))
    prompt = prompts(40)[0]
    host.submit(prompt, 3)
    host.run_until_idle()
    del worker.wait_for_layer_load  # repaired
    request = host.submit(prompt, 3)
    host.run_until_idle()
    assert (request.tokens == greedy(prompt, 3)) == (not stores_unfilled)


@pytest.mark.parametrize(
    ("answer", "message"),
    [((24, False), "24 < promptLen"), ((0, True), "load_kv_async"), ((-8, False), "promptLen")],
)
def test_a_promise_that_is_not_allowed_ends_the_engine(serve, answer, message):
    host = serve(parts=(type("Promises", (Idle,), {"answer": answer}), IdleWorker))
    host.submit(prompts(24)[0], 2)
    with pytest.raises(EngineDeadError, match=message):
        host.step()


@pytest.mark.parametrize("ids", [([7], []), ([], [1])])
def test_an_unknown_id_ends_the_engine(serve, ids):
    worker = type("Knows", (IdleWorker,), {"get_finished": lambda self, saving, loading: ids})
    host = serve(parts=(Idle, worker))
    host.submit(prompts(24)[0], 2)
    with pytest.raises(EngineDeadError, match="KeyError"):
        host.step()


@pytest.mark.parametrize("salt", [None, "kvhub:1"])
def test_what_a_connector_loads_enters_the_reuse_tree(serve, salt):
    class Wrong(IdleWorker):
        def start_load_kv(self, stream):
            for block in self.get_connector_meta() or ():
                self.pool[block] = torch.randn(self.pool[block].shape)

    class Promises(Idle):
        answer = (32, False)

        def build_connector_meta(self, scheduler_output):
            return [b for data in scheduler_output.new_requests for b in data.new_block_ids]

    host = serve(parts=(Promises, Wrong))
    prompt = prompts(40)[0]
    first = host.submit(prompt, 6, cache_salt=salt)
    host.run_until_idle()
    assert first.tokens != greedy(prompt, 6)
    Promises.answer = (0, False)
    Wrong.start_load_kv = IdleWorker.start_load_kv
    plain = host.submit(prompt, 6)
    host.run_until_idle()
    assert (plain.cached_tokens == 0) == (plain.tokens == greedy(prompt, 6)) == bool(salt)


@pytest.mark.parametrize("version", [V1_2_1, V1_4_0RC1])
def test_a_cancelled_load(serve, version):
    class Never(IdleWorker):
        def get_finished(self, saving, loading):
            self.held[1].extend(loading)
            return [], [] if len(host.active) else self.held[1][:1] * self.release

        release = False

    host = serve(version, (type("Parks", (Idle,), {"answer": (16, True)}), Never))
    parked = host.submit(prompts(40)[0], 4)
    host.step()
    host.manager.scheduler.answer = (0, False)
    host.submit(prompts(9)[0], 3)
    host.cancel(parked)
    host.run_until_idle(drain=False)
    assert parked.finish_reason == "cancelled"
    assert bool(host.blocks.referenced) == version.defers_cancel
    Never.release = True
    host.run_until_idle()
    assert not host.blocks.referenced
    assert host.count("request_finished") == 2


def test_v1_does_not_pin_a_duplicate_that_is_being_saved(serve):
    worker = type("Never", (IdleWorker,), {"get_finished": lambda self, saving, loading: ([], [])})
    host = serve(parts=(type("Saves", (Idle,), {"saves": True}), worker))
    prompt = prompts(24)[0]
    for _ in range(2):
        host.submit(prompt, 3)
    host.run_until_idle(drain=False)
    first, second = (blocks for _, blocks in host.manager.scheduler.ended)
    assert not set(first) & set(second)
    assert set(first) <= host.blocks.referenced
    assert not set(second) & host.blocks.referenced
    assert host.leaked_blocks() == 0
