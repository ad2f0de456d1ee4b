"""The vLLM connector against what is recorded of vLLM's interface; tests_vllm/ has the real one."""

import inspect
import pickle

import pytest
import torch
from deployments import deploy, states
from mapping import random_mapper
from tiny import tiny_config
from vllm_fakes import RECORD, config, installed, output, pack, record, request

from kvhub import ModelSpec
from kvhub.cache import build_cache
from kvhub.errors import IncompatiblePairError, UsageError

BLOCK, BLOCKS, LENGTH = 8, 24, 45
LAYERS = {"source": 3, "target": 4}
PROMPT = [(7 * number) % 64 for number in range(LENGTH)]


@pytest.fixture
def vllm():
    with installed() as found:
        yield found


@pytest.fixture(scope="module")
def mapper():
    return random_mapper(
        *(
            ModelSpec.from_config(tiny_config(name, layers, head_dim=16), name, "0" * 40, "tokens")
            for name, layers in (("qwen3", 3), ("llama", 4))
        )
    )


@pytest.fixture
def deployment(mapper, tmp_path):
    return deploy(mapper, tmp_path / "out")


class Engine:
    """Scheduler and worker of one engine; what it computes are numbers by position."""

    def __init__(self, vllm, deployment, role, **changes):
        self.made = config(deployment.path, role, **changes)
        make, roles = vllm.connector.KVHubConnector, vllm.roles
        self.scheduler = make(self.made[0], roles.SCHEDULER, self.made[1])
        self.worker = make(
            vllm_config=self.made[0], role=roles.WORKER, kv_cache_config=self.made[1]
        )
        side = getattr(deployment, role)
        self.layers = side.num_layers
        shape = (self.layers, 2, BLOCKS, side.kv_heads, BLOCK, side.head_dim)
        self.states = torch.randn(*shape[:2], side.kv_heads, 256, side.head_dim)
        self.caches = {
            f"model.layers.{number}.self_attn.attn": pack(layer)
            for number, layer in enumerate(torch.zeros(shape))
        }
        self.worker.register_kv_caches(self.caches)
        self.pool = self.worker.worker.transfer.pool

    def ask(self, asked, computed=0):
        return self.scheduler.get_num_new_matched_tokens(asked, computed)

    def step(self, new=(), cached=(), scheduled=None, forward=()):
        """One iteration; `forward` are (blocks, first, last) tokens that it computes."""
        message = self.scheduler.build_connector_meta(output(new, cached, scheduled))
        self.worker.bind_connector_metadata(pickle.loads(pickle.dumps(message)))
        self.worker.start_load_kv(None)
        for blocks, first, last in forward:
            for token in range(first, last):
                self.write(blocks[token // BLOCK], token)
        self.worker.wait_for_save()
        failed = self.worker.get_block_ids_with_load_errors()
        assert self.worker.get_block_ids_with_load_errors() == set()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(
            record("KVConnectorOutput", invalid_block_ids=failed)
        )
        return failed

    def write(self, block, token):
        for layer in range(self.layers):
            for kind, views in enumerate((self.pool.keys, self.pool.values)):
                views[layer][block, :, token % BLOCK] = self.states[layer, kind, :, token]

    def serve(self, asked, blocks, computed=0, length=LENGTH):
        """A whole prompt in one iteration."""
        promised, _ = self.ask(asked, computed)
        self.scheduler.update_state_after_alloc(asked, None, promised)
        done = computed + promised
        failed = self.step(
            [(asked.request_id, blocks, done)],
            scheduled={asked.request_id: length - done},
            forward=[(blocks, done, length)],
        )
        return promised, failed

    def finish(self, asked):
        free, said = self.scheduler.request_finished(asked, [])
        assert free is False
        return said and said["kvhub"]

    def counters(self):
        return self.scheduler.scheduler.status.counters, self.worker.worker.status.counters

    def close(self):
        self.worker.shutdown()
        self.scheduler.shutdown()


@pytest.fixture
def make(vllm, deployment):
    engines = []

    def engine(role, **changes):
        engines.append(Engine(vllm, deployment, role, **changes))
        return engines[-1]

    yield engine
    for engine in engines:
        engine.close()


@pytest.fixture
def source(make):
    """One that has saved the prompt."""
    engine = make("source")
    engine.serve(request("s", PROMPT), [5, 3, 9, 0, 1, 7])
    engine.worker.worker.transfer.saver.close()
    assert engine.counters()[1]["saved"] == 5
    return engine


def mapped(mapper, source, tokens):
    """What the equation gives, `[layers, 2, heads, tokens, dim]`."""
    given = source.states[:, :, :, :tokens]
    cache = mapper(build_cache(*([layer[kind][None] for layer in given] for kind in (0, 1))))
    return torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])


def found(engine, blocks, tokens):
    read = [engine.pool.read(start, blocks[start // BLOCK :]) for start in range(0, tokens, BLOCK)]
    return torch.cat(read, 3)


def test_it_is_what_vllm_calls(vllm):
    own = vllm.connector.KVHubConnector
    assert not own.__abstractmethods__
    for name, parameters in RECORD["methods"].items():
        if name not in vars(own):
            continue
        if parameters == "property":
            assert isinstance(vars(own)[name], property)
        else:
            given = inspect.signature(vars(own)[name]).parameters.values()
            assert [str(item.replace(annotation=item.empty)) for item in given] == parameters, name


def test_a_target_has_the_mapped_states_of_the_source(source, make, mapper, deployment):
    target, blocks = make("target"), [2, 8, 4, 6, 11, 10]
    asked = request("t", PROMPT, deployment.salt())
    assert target.serve(asked, blocks) == (40, set())
    torch.testing.assert_close(
        found(target, blocks, 40), mapped(mapper, source, 40), atol=1e-4, rtol=1e-4
    )
    assert target.finish(asked) == {
        "mapper": deployment.digest,
        "status": "applied",
        "mapped_tokens": 40,
        "exact_tokens": 0,
    }
    assert states(deployment.path)[-1]["state"] == "applied"
    again = request("again", PROMPT, deployment.salt())
    assert target.serve(again, [*blocks[:5], 12], computed=40) == (0, set())
    assert target.finish(again)["mapped_tokens"] == 40  # what the engine had kept


def test_own_states_come_back_as_they_were(source, make, deployment):
    """And are preferred; behind them the source's are mapped."""
    first = make("target")
    first.serve(request("own", PROMPT[:20]), [1, 2, 3], length=20)
    first.worker.worker.transfer.saver.close()
    target, blocks = make("target"), [4, 5, 6, 7, 8, 9]
    asked = request("t", PROMPT, deployment.salt())
    assert target.serve(asked, blocks)[0] == 40
    said = target.finish(asked)
    assert (said["exact_tokens"], said["mapped_tokens"]) == (16, 24)
    assert torch.equal(found(target, blocks, 16), first.states[:, :, :, :16])


def test_the_question_may_be_repeated(source, make, deployment):
    target = make("target")
    asked = request("t", PROMPT, deployment.salt())
    answers, held, counted = set(), set(), []
    for _ in range(3):
        answers.add(target.ask(asked))
        held.add(target.scheduler.scheduler.stage.held_bytes)
        counted.append(dict(target.counters()[0]))
    assert answers == {(40, False)}
    assert len(held) == 1
    assert counted == [{"miss: absent": 5}] * 3  # the target's own: looked for once
    assert not states(deployment.path)[1:]
    assert target.ask(asked, 8) == (32, False)
    assert target.scheduler.scheduler.stage.held_bytes < max(held)
    target.finish(asked)
    assert target.scheduler.scheduler.stage.held_bytes == 0


@pytest.mark.parametrize("length", [8, 9, 40, 41])
def test_the_last_token_is_never_promised(source, make, deployment, length):
    asked = request("t", PROMPT[:length], deployment.salt())
    assert make("target").ask(asked)[0] == (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("salt", "values", "status"),
    [
        (None, {}, None),
        ("tenant", {}, None),
        ("kvhub:0123456789abcdef", {}, None),
        ("own", {"lora_request": object()}, "unsupported"),
        ("own", {"mm_features": [object()]}, "unsupported"),
        ("own", {"prompt_embeds": object()}, "unsupported"),
        ("own", {"skip_reading_prefix_cache": True}, "unsupported"),
        ("own", {"kv_transfer_params": {"kvhub": {"mapper": "another"}}}, "unsupported"),
        (None, {"kv_transfer_params": {"kvhub": {"mapper": "own"}}}, "unsupported"),
    ],
)
def test_others_are_left_alone(source, make, deployment, salt, values, status):
    target = make("target")
    if values.get("kv_transfer_params") == {"kvhub": {"mapper": "own"}}:
        values = {"kv_transfer_params": {"kvhub": {"mapper": deployment.digest}}}
    salt = deployment.salt() if salt == "own" else salt
    asked = request("t", PROMPT, salt, **values)
    assert target.ask(asked) == (0, False)
    said = target.finish(asked)
    assert (said and said["status"]) == status


def test_a_failed_load_is_computed_by_the_engine(source, make, deployment, monkeypatch):
    target, blocks = make("target"), [2, 8, 4, 6, 11, 10]
    loader = target.worker.worker.transfer.loader
    monkeypatch.setattr(loader, "_load", lambda *arguments: 1 / 0)
    asked = request("t", PROMPT, deployment.salt())
    other = request("u", [9] * LENGTH, deployment.salt())
    assert target.serve(asked, blocks) == (40, set(blocks[:5]))
    # Also in the next iterations, which were planned before the engine heard of it.
    target.serve(other, [12, 13, 14, 15, 16, 17])
    assert target.counters()[1]["not saved: a load failed"] == 5
    assert "saved" not in target.counters()[1]
    assert target.finish(asked)["status"] == "fallback_reprefill"
    assert states(deployment.path)[-2]["reason"] == "its states could not be loaded"
    again = request("again", PROMPT, deployment.salt())
    assert target.serve(again, [*blocks[:5], 17], computed=40) == (0, set())
    assert target.finish(again)["mapped_tokens"] == 0  # computed by the engine since
    third = request("v", [8] * LENGTH)
    target.step()
    target.serve(third, [18, 19, 20, 21, 22, 23])
    target.worker.worker.transfer.saver.close()
    assert target.counters()[1]["saved"] == 5


def test_what_could_not_be_ordered_is_computed_too(source, make, deployment, monkeypatch):
    target, blocks = make("target"), [2, 8, 4, 6, 11, 10]
    planner = target.scheduler.scheduler.planner
    monkeypatch.setattr(planner, "scheduled", lambda *arguments, **options: 1 / 0)
    asked = request("t", PROMPT, deployment.salt())
    assert target.serve(asked, blocks) == (40, set(blocks[:5]))
    assert target.finish(asked)["status"] == "fallback_reprefill"


def test_nothing_is_written_that_the_engine_does_not_count_on(source, make, deployment):
    target, blocks = make("target"), [2, 8, 4, 6, 11, 10]
    asked = request("t", PROMPT, deployment.salt())
    assert target.ask(asked)[0] == 40
    target.scheduler.update_state_after_alloc(asked, None, 0)
    target.step([("t", blocks, 0)], scheduled={"t": LENGTH})
    assert not found(target, blocks, 40).any()
    assert target.finish(asked)["status"] == "fallback_reprefill"


def test_prompts_may_be_computed_in_parts(make, deployment):
    engine, blocks, tokens = make("source"), [5, 3, 9, 0, 1, 7], [*PROMPT]
    asked = request("s", tokens)
    assert engine.ask(asked) == (0, False)
    engine.scheduler.update_state_after_alloc(asked, None, 0)
    engine.step([("s", blocks[:2], 0)], scheduled={"s": 10}, forward=[(blocks, 0, 10)])
    engine.step(
        cached=[("s", blocks[2:], 10, False)], scheduled={"s": 35}, forward=[(blocks, 10, 45)]
    )
    for place in range(LENGTH, LENGTH + 4):  # and its output, a token at a time
        tokens.append(place)
        more = [12] if place == 48 else None
        engine.step(
            cached=[("s", more, place, False)],
            scheduled={"s": 1},
            forward=[([*blocks, 12], place, place + 1)],
        )
    engine.worker.worker.transfer.saver.close()
    assert engine.counters()[1]["saved"] == 6
    target = make("target")
    assert target.ask(request("t", tokens, deployment.salt()))[0] == 48


def test_a_preempted_request_comes_again(source, make, mapper, deployment):
    target, tokens = make("target"), [*PROMPT]
    asked = request("t", tokens, deployment.salt())
    assert target.serve(asked, [2, 8, 4, 6, 11, 10]) == (40, set())
    tokens += [1, 2, 3, 4, 5]
    asked.num_tokens = len(tokens)
    blocks = [12, 13, 14, 15, 16, 17, 18]
    promised, _ = target.ask(asked)
    assert promised == 40
    target.scheduler.update_state_after_alloc(asked, None, promised)
    target.step(cached=[("t", blocks, 40, True)], scheduled={"t": 10})
    torch.testing.assert_close(
        found(target, blocks, 40), mapped(mapper, source, 40), atol=1e-4, rtol=1e-4
    )
    target.step(cached=[("t", None, 50, False)], scheduled={"t": 1})
    assert target.finish(asked)["mapped_tokens"] == 40
    assert not target.scheduler.scheduler.status.counters["error: plan"]


@pytest.mark.parametrize("broken", ["offer", "scheduled", "forget", "next_iteration"])
def test_no_hook_of_the_scheduler_raises(make, deployment, monkeypatch, broken):
    target = make("target")

    def fail(*arguments, **options):
        raise ValueError(broken)

    monkeypatch.setattr(target.scheduler.scheduler.planner, broken, fail)
    asked = request("t", PROMPT, deployment.salt())
    assert target.serve(asked, [0, 1, 2, 3, 4, 5]) == (0, set())
    target.finish(asked)
    counted = target.counters()[0]
    assert any(name.startswith("error: ") for name in counted), counted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel_config.pipeline_parallel_size": 2}, "pipeline_parallel_size = 2"),
        ({"parallel_config.tensor_parallel_size": 2}, "tensor_parallel_size = 2"),
        ({"speculative_config": object()}, "speculative_config"),
        ({"model_config.use_mla": True}, "use_mla"),
        ({"kv_transfer_config.kv_load_failure_policy": "fail"}, "kv_load_failure_policy = 'fail'"),
        ({"dtype": torch.bfloat16}, "a cache of torch.bfloat16"),
        ({"kv_transfer_config.kv_connector_extra_config": {"role": "both"}}, "role = source"),
        ({"kv_transfer_config.kv_connector_extra_config": {}}, "role = source"),
    ],
)
def test_what_cannot_be_served_is_refused(make, changes, message):
    with pytest.raises(UsageError, match=message):
        make("target", **changes)


def test_other_packings_are_refused(make, vllm):
    target = make("target")
    vllm.backend._get_attn_isa = lambda *arguments: "amx"
    with pytest.raises(IncompatiblePairError, match="'amx'"):
        target.worker.register_kv_caches(target.caches)
