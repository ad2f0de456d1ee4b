"""What is promised, loaded and saved: only what is there, right, and exact where it says so."""

import pickle
import time
from dataclasses import replace

import pytest
import torch
from deployments import deploy
from kvhub.exporters import planner as planner_module
from kvhub.exporters.chain import chunk_keys, shard_key
from kvhub.exporters.entry import encode
from kvhub.exporters.planner import Arrival, Orders, Planner
from kvhub.exporters.staging import Stage
from kvhub.exporters.status import Status
from kvhub.exporters.store import open_store
from mapping import random_mapper
from test_trtllm_connector import models

TOKENS = list(range(1, 46))


class Scheduler:
    """A planner over a store, and an engine's half of the conversation with it."""

    def __init__(self, path, size=8, maps=True, names=("source", "target"), **settings):
        mapper = random_mapper(*models())
        self.deployment = deploy(mapper, path / "out", names, **settings)
        self.settings, self.size = self.deployment.settings, size
        self.store, self.status = open_store(self.settings.store), Status()
        self.stage = Stage(self.store, self.settings.staging_path, 2**24, self.status)
        self.salt = self.deployment.salt()
        self.planner = self.make(maps)

    def make(self, maps=True, deployment=None):
        found = deployment or self.deployment
        return Planner(found, self.stage, self.status, maps=maps, tokens_per_block=self.size)

    def keep(self, kind, chunks, tokens=TOKENS, salt=None):
        """Put entries of some chunks into the store."""
        target = kind == "exact"
        side = self.deployment.target if target else self.deployment.source
        size = self.settings.chunk_tokens
        keys = chunk_keys(side.namespace("float32", size), tokens, salt=salt, lora=None, exact=True)
        for number in chunks:
            states = torch.zeros(side.num_layers, 2, 2, size, side.head_dim)
            key = shard_key(keys[number], 0, 2)
            self.store.put(key, encode(states, key, (0, 2)))

    def offer(self, name=1, tokens=TOKENS, computed=0, salt="", **more):
        salt = self.salt if salt == "" else salt
        return self.planner.offer(Arrival(name, tokens, salt, **more), computed)

    def step(self, name=1, tokens=(), blocks=(), computed=0, scheduled=1, new=False):
        orders = Orders()
        self.planner.next_iteration()
        self.planner.scheduled(
            name,
            new=new,
            new_tokens=tokens,
            new_blocks=blocks,
            computed=computed,
            scheduled=scheduled,
            orders=orders,
        )
        return pickle.loads(pickle.dumps(orders))

    def begin(self, name=1, tokens=TOKENS, computed=0, offered=0):
        blocks = [*range(-(-len(tokens) // self.size))]
        left = len(tokens) - computed - offered
        return self.step(name, tokens, blocks, computed, left, new=True)


@pytest.fixture
def scheduler(tmp_path):
    made = []

    def make(**options):
        made.append(Scheduler(tmp_path / str(len(made)), **options))
        return made[-1]

    yield make
    for one in made:
        one.stage.close()


def versions(load):
    return "".join("em"[piece.mapped] for piece in load.pieces)


@pytest.mark.parametrize(
    ("size", "computed", "exact", "mapped", "expected"),
    [
        (8, 0, "", "01234", "mmmmm"),
        (8, 0, "0123", "01234", "eeeem"),
        (8, 0, "13", "01234", "memem"),
        (8, 16, "", "01234", "mmm"),
        (8, 0, "", "0124", "mmm"),
        (8, 0, "", "1234", ""),
        (8, 4, "", "01234", ""),
        (8, 40, "", "01234", ""),
        (16, 0, "", "01234", "mmmm"),
        (16, 0, "01", "01234", "eemm"),
        (16, 0, "012", "01234", "ee"),  # a block that is exact and mapped would need both
        (16, 0, "0", "01234", ""),
        (16, 8, "", "01234", ""),
        (4, 8, "", "01234", "mmmm"),
        (4, 4, "", "01234", ""),
    ],
)
def test_what_is_offered(scheduler, size, computed, exact, mapped, expected):
    one = scheduler(size=size)
    one.keep("exact", map(int, exact))
    one.keep("source", map(int, mapped))
    offered = one.offer(computed=computed)
    assert offered == 8 * len(expected)
    assert bool(expected) == (one.status.counters["fallback_reprefill"] == 0)
    orders = one.begin(computed=computed, offered=offered)
    if not expected:
        assert orders.loads == []
        assert one.stage.held_bytes == 0
        return
    (load,) = orders.loads
    assert versions(load) == expected
    assert [piece.start for piece in load.pieces] == [*range(computed, computed + offered, 8)]
    assert len(load.chain) == len(expected)
    assert one.step(computed=44).loads == []  # once


@pytest.mark.parametrize(("length", "offered"), [(40, 32), (41, 40), (8, 0), (9, 8), (1, 0)])
def test_the_last_token_is_never_offered(scheduler, length, offered):
    one = scheduler()
    one.keep("source", range(5))
    assert one.offer(tokens=TOKENS[:length]) == offered


def test_only_a_salt_of_this_mapper_is_served(scheduler):
    one = scheduler()
    one.keep("source", range(5))
    one.keep("source", range(5), salt="alice")
    for salt in (None, "alice", "kvhub", f"{one.salt}x", "kvhub:0000000000000000", f"{one.salt}:"):
        assert one.offer(salt=salt) == 0
    assert one.status.counters["salts of another mapper"] == 2
    assert one.offer(salt=f"{one.salt}:alice") == 40
    assert one.offer(salt=f"{one.salt}:bob") == 0
    assert one.offer(salt=one.salt, unsupported="LoRA") == 0
    assert one.status.counters["unsupported: LoRA"] == 1
    source = scheduler(maps=False)
    source.keep("source", range(5))
    assert source.offer(salt=source.salt) == 0


def changed(deployment, field, value):
    if field in ("source_kv_dtype", "chunk_tokens", "source_tp"):
        return replace(deployment, settings=replace(deployment.settings, **{field: value}))
    if field == "scales":
        scaled = {"source_kv_dtype": "float8_e4m3fn", "source_kv_scales": value}
        return replace(deployment, settings=replace(deployment.settings, **scaled))
    side = deployment.source
    if field == "rope":
        value = replace(side.rope, inv_freq=side.rope.inv_freq * value)
    elif field in ("attention_scaling", "interleaved"):
        field, value = "rope", replace(side.rope, **{field: value})
    return replace(deployment, source=replace(side, **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("model", "m"), ("revision", "1" * 40), ("tokenizer_digest", "other"), ("rope", 1.001)),
        *(("attention_scaling", 1.1), ("interleaved", True), ("source_kv_dtype", "bfloat16")),
        *(("chunk_tokens", 4), ("source_tp", 2), ("scales", (1.0, 1.0, 1.0))),
    ],
)
def test_another_namespace_has_other_entries(scheduler, field, value):
    one = scheduler()
    one.keep("source", range(5))
    assert one.offer() == 40
    one.planner = one.make(deployment=changed(one.deployment, field, value))
    assert one.offer(2) == 0
    before = one.planner.source.digest
    if field == "scales":
        other = changed(one.deployment, field, (1.0, 1.0, 2.0))
        assert one.make(deployment=other).source.digest != before


@pytest.mark.parametrize("size", [4, 8, 16])
def test_complete_chunks_are_saved_once(scheduler, size):
    one = scheduler(maps=False, size=size)
    assert one.offer(salt=None) == 0
    saves = one.begin().saves
    assert [save.start for save in saves] == [0, 8, 16, 24, 32]
    for save in saves:
        covered = [block * size for block in save.blocks]
        assert covered[0] <= save.start < save.start + 8 <= covered[-1] + size
    new = [100, 101, 102]
    grown = [
        one.step(tokens=[token], blocks=[], computed=45 + i).saves for i, token in enumerate(new)
    ]
    blocks = 48 // size - -(-45 // size)
    assert blocks == 0
    assert [[save.start for save in saves] for saves in grown] == [[], [], [40]]
    assert one.planner.finished(1)
    assert not one.planner.finished(1)
    one.offer(2, salt=None)
    assert one.begin(2).saves == []
    assert not one.planner.finished(2)


def test_chunks_are_saved_again_after_a_while(scheduler, monkeypatch):
    one = scheduler(maps=False)
    now = [1000.0]
    monkeypatch.setattr(planner_module.time, "monotonic", lambda: now[0])
    for wait, count in ((0, 5), (59, 0), (2, 5), (30, 0)):
        now[0] += wait
        one.offer(1, salt=None)
        assert len(one.begin().saves) == count
    monkeypatch.undo()
    assert time.monotonic() != now[0]


def test_a_prompt_in_parts_is_saved_as_it_is_computed(scheduler):
    one = scheduler(maps=False)
    one.offer(salt=None)
    first = one.step(tokens=TOKENS, blocks=range(6), computed=0, scheduled=20, new=True)
    second = one.step(computed=20, scheduled=20)
    assert [len(orders.saves) for orders in (first, second)] == [2, 3]


def test_nothing_on_top_of_mapped_states_is_saved(scheduler):
    one = scheduler()
    one.keep("source", range(3))
    assert one.offer() == 24
    assert one.begin(offered=24).saves == []
    assert all(one.step(tokens=[t], computed=45 + t).saves == [] for t in range(10))
    one.planner.finished(1)
    # A later turn finds them in the engine, and so on.
    assert one.offer(2, [*TOKENS, 9, 9, 9], computed=40) == 0
    assert one.begin(2, [*TOKENS, 9, 9, 9], computed=40).saves == []


def test_a_duplicate_does_not_make_mapped_blocks_exact(scheduler):
    """Two requests at once, one mapped, one computed: the engine keeps the blocks of either."""
    one = scheduler()
    one.keep("source", range(5))
    assert one.offer(1) == 40
    take, one.stage.take = one.stage.take, lambda *args: []
    assert one.offer(2) == 0
    one.stage.take = take
    one.begin(1, offered=40)
    assert len(one.begin(2).saves) == 5  # its own blocks are exact
    for name in (1, 2):
        one.planner.finished(name)
    longer = TOKENS[:40] + [9] * 20
    one.offer(3, longer, computed=40)
    assert one.begin(3, longer, computed=40).saves == []


def test_blocks_that_were_never_filled_are_not_taken_for_exact(scheduler):
    """As they stay behind when V1 cancels; another request that computes them changes nothing."""
    one = scheduler(maps=False)
    one.offer(1, salt=None)
    one.step(1, tokens=TOKENS, blocks=range(6), computed=0, scheduled=16, new=True)
    one.offer(2, salt=None)
    one.planner.finished(1)
    one.begin(2)
    one.planner.finished(2)
    longer = TOKENS[:40] + [9] * 20
    one.offer(3, longer, computed=40, salt=None)
    assert one.begin(3, longer, computed=40).saves == []
    one.offer(4, longer, computed=16, salt=None)
    assert len(one.begin(4, longer, computed=16).saves) == 2  # of nine: five are known, two filled


def test_what_the_engine_has_of_unknown_origin_is_not_exact(scheduler):
    one = scheduler(maps=False)
    one.offer(computed=16, salt=None)
    assert one.begin(computed=16).saves == []


def test_a_page_that_is_gone_ends_saving(scheduler):
    one = scheduler(maps=False)
    one.offer(salt=None)
    saves = one.step(tokens=TOKENS, blocks=[0, 1, -1, 3, 4, 5], scheduled=45, new=True).saves
    assert [save.start for save in saves] == [0, 8]


def test_asked_twice_is_asked_anew(scheduler):
    one = scheduler()
    one.keep("source", range(5))
    assert one.offer() == one.offer() == 40
    assert len(one.planner._owners) == 1
    held = one.stage.held_bytes
    one.planner.forget(1)
    assert 0 == one.stage.held_bytes < held
    assert one.offer(1) == 40
    (load,) = one.begin(offered=40).loads
    assert load.blocks == [0, 1, 2, 3, 4, 5]
    # What is let go of later is the first offer's, not the second's.
    assert one.offer(1) == 40
    for _ in range(4):
        one.planner.next_iteration()
    assert one.stage.held_bytes == held


def test_a_request_that_begins_anew_unasked_is_left_alone(scheduler):
    one = scheduler(maps=False)
    one.offer(salt=None)
    one.begin()
    other = [7] * 45
    assert one.step(tokens=other, blocks=range(6, 12), scheduled=45, new=True).saves == []
    assert one.step(tokens=[1] * 16, blocks=[12, 13], computed=60).saves == []


def test_staged_files_live_until_every_rank_has_loaded(scheduler):
    one = scheduler()
    one.keep("source", range(5))
    one.offer()
    one.begin(offered=40)
    assert one.stage.held_bytes
    one.planner.finished(1)
    kept = [one.stage.held_bytes for _ in range(3) if one.planner.next_iteration() is None]
    assert kept[0] > 0
    assert kept[-1] == 0


def test_what_cannot_be_ordered_is_lost_and_said_so(scheduler):
    one = scheduler()
    one.keep("source", range(5))
    one.offer(1)
    one.offer(2, TOKENS[:20])
    one.begin(1, offered=40)
    orders = Orders()
    one.planner.lose(orders)
    assert {name: len(keys) for name, keys in orders.lost.items()} == {2: 2}
    assert one.begin(2, TOKENS[:20], offered=16).loads == []


def test_what_the_engine_reuses_is_named(scheduler):
    one = scheduler()
    one.keep("source", range(5))
    one.offer(1)
    (load,) = one.begin(1, offered=40).loads
    one.offer(2, computed=24)
    assert one.begin(2, computed=24, offered=16).reused == {2: load.chain[:3]}
    one.offer(3, computed=20)
    assert one.begin(3, computed=20).reused == {3: None}
    one.offer(4, computed=24, salt=None)
    assert one.begin(4, computed=24).reused == {}


@pytest.mark.parametrize("tokens", [[-1] * 20, [2**63] * 20])
def test_tokens_that_have_no_keys(scheduler, tokens):
    one = scheduler()
    with pytest.raises(Exception, match="Tokens"):
        one.offer(tokens=tokens)
    assert one.begin(tokens=tokens) == Orders()


def test_a_stage_that_raises_keeps_nothing(scheduler):
    one = scheduler()
    one.keep("source", range(5))
    take = one.stage.take

    def raising(*args):
        take(*args)
        raise RuntimeError("injected")

    one.stage.take = raising
    assert one.offer() == 0
    assert one.planner.status.counters["fallback_reprefill: an error"] == 1
    one.planner.finished(1)
    assert one.stage.held_bytes == 0
    assert not one.planner._owners
