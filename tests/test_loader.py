"""What a rank writes into its pool and reads out of it, byte for byte."""

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from deployments import deploy
from kvhub.exporters.chain import chunk_keys, shard_key
from kvhub.exporters.entry import decode, encode
from kvhub.exporters.loader import _kernels
from kvhub.exporters.paged import map_paged
from kvhub.exporters.paged_cache import PagedCache
from kvhub.exporters.plan import make_plan
from kvhub.exporters.planner import Load, Orders, Piece, Save
from kvhub.exporters.pool import FLOAT8, PagedPool
from kvhub.exporters.serving import DTYPES
from kvhub.exporters.status import Status
from kvhub.exporters.store import open_store
from kvhub.exporters.transfer import Transfer
from mapping import random_mapper
from test_trtllm_connector import Pair, models, run
from trtllm_api import V1_2_1, V1_3_0RC28, V1_4_MOONCAKE
from trtllm_fakes import prompts

from kvhub.errors import IncompatiblePairError, UsageError, VerificationError

TOKENS = list(range(64))


@pytest.fixture
def pair(tmp_path, monkeypatch):
    made = Pair(tmp_path, monkeypatch)
    yield made
    for host in list(made.hosts):
        made.close(host)


@pytest.mark.parametrize("version", [V1_2_1, V1_3_0RC28, V1_4_MOONCAKE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_pools_hold_what_the_map_writes(pair, dtype, version):
    name = str(dtype).removeprefix("torch.")
    deployment = pair.export(source_kv_dtype=name, target_kv_dtype=name)
    prompt, moved = prompts(41)[0], {"saves": [], "loads": []}

    def listen(host):
        transfer = host.manager.workers[0].transfer
        save, load = transfer.save, transfer.load
        transfer.save = lambda saves: (moved["saves"].extend(saves), save(saves))
        transfer.load = lambda orders: (moved["loads"].extend(orders.loads), load(orders))
        return transfer.pool

    source = pair.serve("source", version, tokens_per_block=4, dtype=dtype)
    read = listen(source)
    run(source, [prompt], 1)
    target = pair.serve("target", version, tokens_per_block=16, dtype=dtype)
    written = listen(target)
    (request,) = run(target, [prompt], 1, deployment.salt())
    assert request.external_tokens == 32
    (load,) = moved["loads"]
    saved = [read.read(save.start, save.blocks) for save in moved["saves"][:4]]
    found = [written.read(start, load.blocks[start // 16 :]) for start in range(0, 32, 8)]
    caches = [
        PagedCache(
            pool=pool,
            block_table=torch.arange(4, dtype=torch.int32)[None],
            lengths=torch.tensor([32]),
            start_positions=torch.tensor([0]),
        )
        for pool in (torch.stack(saved), torch.zeros_like(torch.stack(found)))
    ]
    map_paged(make_plan(pair.mapper), *caches)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(torch.stack(found), caches[1].pool, rtol=eps, atol=1e-5)
    assert torch.stack(found).float().abs().sum() > 0


def bits(states):
    return states.contiguous().view(torch.uint8)


def random_pool(dtype, layers, heads, size, head_dim=16, blocks=9, gap=0):
    """Blocks of small numbers, `gap` numbers between them."""
    inner = torch.Size((layers, 2, heads, size, head_dim))
    flat = (torch.randn(blocks, inner.numel() + gap) * 0.5).to(dtype)
    return flat[:, : inner.numel()].unflatten(1, inner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT8])
@pytest.mark.parametrize(("size", "chunk"), [(4, 16), (16, 4), (8, 8)])
@pytest.mark.parametrize("gap", [0, 32])
def test_a_pool_reads_and_writes_exactly_its_chunk(dtype, size, chunk, gap):
    pool = PagedPool(random_pool(dtype, 3, 2, size, gap=gap), (0, 2), chunk)
    before = pool.states.clone()
    start = 32 + (chunk if chunk < size else 0)
    blocks = [5, 0, 7, 3][: max(chunk // size, 1)]
    found = pool.read(start, blocks)
    assert pool.chunk_bytes == found.nbytes
    for token in range(chunk):
        block, slot = blocks[(start % size + token) // size], (start % size + token) % size
        assert torch.equal(bits(found[:, :, :, token]), bits(before[block, :, :, :, slot]))
    other = random_pool(dtype, 3, 2, chunk)[0]
    pool.write(start, blocks, other)
    assert torch.equal(bits(pool.read(start, blocks)), bits(other))
    pool.write(start, blocks, found)
    assert torch.equal(bits(pool.states), bits(before))


class Rank:
    """One rank of a target and entries to load, without an engine."""

    def __init__(self, path, heads="all", size=16, rank=0, maps=True, **settings):
        self.mapper = random_mapper(*models(), heads)
        self.deployment = deploy(self.mapper, path / "out", **settings)
        chosen = self.deployment.settings
        self.store = open_store(chosen.store)
        self.status = Status()
        self.path, self.chunk, self.size = path, chosen.chunk_tokens, size
        ranks = chosen.target_tp if maps else chosen.source_tp
        name = chosen.target_kv_dtype if maps else chosen.source_kv_dtype
        self.pool = random_pool(DTYPES[name], 4 if maps else 3, 2 // ranks, size, blocks=20)
        heads = self.pool.shape[3]
        self.transfer = Transfer(
            *(self.deployment, self.store, self.status),
            maps=maps,
            pool=PagedPool(self.pool, (rank * heads, (rank + 1) * heads), self.chunk),
            rank=rank,
        )
        self.saver = self.transfer.saver

    def pieces(self, kinds, start=0):
        """Entries of random states, `m`apped or `e`xact, in files; and the states."""
        settings = self.deployment.settings
        pieces, kept = [], []
        for number, kind in enumerate(kinds):
            mapped = kind == "m"
            side = self.deployment.source if mapped else self.deployment.target
            dtype = settings.source_kv_dtype if mapped else settings.target_kv_dtype
            ranks = settings.source_tp if mapped else settings.target_tp
            states = random_pool(DTYPES[dtype], side.num_layers, 2, self.chunk, blocks=1)[0]
            keys, files = [], []
            for first in range(0, 2, 2 // ranks):
                heads = (first, first + 2 // ranks)
                keys.append(shard_key(f"{number:032x}", *heads))
                part = states[:, :, heads[0] : heads[1]].contiguous()
                files.append(str(self.path / f"{kind}{number}-{first}"))
                with open(files[-1], "wb") as file:
                    file.writelines(encode(part, keys[-1], heads))
            pieces.append(Piece(start + number * self.chunk, mapped, keys, files))
            kept.append(states)
        return pieces, kept

    def load(self, pieces, blocks):
        chain = [f"chunk at {piece.start}" for piece in pieces]
        orders = Orders(loads=[Load(1, pieces, blocks, chain)])
        self.transfer.load(orders)
        return orders

    def mapped(self, kept, start, dtype=torch.float32):
        """Chunk by chunk what `map_paged` makes of states."""
        pools = (torch.stack(kept), torch.zeros(len(kept), 4, 2, 2, self.chunk, 16, dtype=dtype))
        source, target = (
            PagedCache(
                pool=pool,
                block_table=torch.arange(len(kept), dtype=torch.int32)[None],
                lengths=torch.tensor([len(kept) * self.chunk]),
                start_positions=torch.tensor([start]),
            )
            for pool in pools
        )
        map_paged(make_plan(self.mapper), source, target)
        return target.pool


@pytest.fixture
def rank(tmp_path):
    made, number = [], itertools.count()

    def make(**options):
        made.append(Rank(tmp_path / str(next(number)), **options))
        return made[-1]

    yield make
    for one in made:
        one.transfer.close()


@pytest.mark.parametrize("heads", ["all", "matched"])
@pytest.mark.parametrize(("size", "kinds"), [(16, "eemmmm"), (4, "emmeem"), (8, "mmmmmm")])
@pytest.mark.parametrize("ranks", [(1, 1, 0), (2, 2, 1), (1, 2, 0), (2, 1, 0)])
def test_each_piece_is_exact_or_mapped_where_it_belongs(rank, heads, size, kinds, ranks):
    source, target, number = ranks
    options = {"source_tp": source, "target_tp": target, "workspace_bytes": 2**15}
    one = rank(heads=heads, size=size, rank=number, **options)
    pieces, kept = one.pieces(kinds, start=16)
    blocks = torch.randperm(20)[: 64 // size].tolist()
    wide, other = one.pool, one.transfer.pool
    before = wide.clone()
    one.transfer.check(one.load(pieces, blocks))
    own = slice(*other.heads)
    for position, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
        found = other.read(piece.start, blocks[piece.start // size :])
        if kind == "e":
            assert torch.equal(found, kept[position][:, :, own])
            continue
        expected = one.mapped([kept[position]], piece.start)[0][:, :, own]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    untouched = [block for block in range(len(wide)) if block not in blocks]
    assert torch.equal(wide[untouched], before[untouched])
    assert torch.equal(wide[blocks[: 16 // size]], before[blocks[: 16 // size]])
    exact = kinds.count("e") * 8
    expected = {} if number else {"exact_tokens": exact, "mapped_tokens": 48 - exact, "applied": 1}
    assert dict(one.status.counters) == expected


def test_float8_on_both_sides(rank):
    """A stored number times its layer's scale is the true one."""
    one = rank(
        source_kv_dtype="float8_e4m3fn",
        target_kv_dtype="float8_e4m3fn",
        source_kv_scales=[0.5, 2.0, 0.25],
        target_kv_scales=[0.125, 1.0, 0.001, 4.0],
    )
    pieces, kept = one.pieces("mmee")
    one.transfer.check(one.load(pieces, [3, 1]))
    factors = torch.tensor([0.5, 2.0, 0.25]).view(-1, 1, 1, 1, 1)
    expected = one.mapped([states.float() * factors for states in kept[:2]], 0)
    scales = torch.tensor([0.125, 1.0, 0.001, 4.0]).view(-1, 1, 1, 1, 1)
    stored = (expected / scales).clamp(-448, 448).to(FLOAT8)
    assert bool((stored.float().abs() == 448).any())  # else nothing is too large
    for number in range(2):
        found = one.transfer.pool.read(number * 8, [3])
        differs = bits(found) != bits(stored[number])
        assert differs.float().mean() < 0.01  # sums in another order, rounded the other way
        torch.testing.assert_close(found.float(), stored[number].float(), rtol=0.13, atol=0.01)
        assert torch.equal(
            bits(one.transfer.pool.read(16 + number * 8, [1])), bits(kept[2 + number])
        )


@pytest.mark.parametrize("blocks", [[0], [0, -1], [0, 20], []])
def test_blocks_that_are_not_there(rank, blocks):
    one = rank()
    before = one.pool.clone()
    pieces, _ = one.pieces("mmmm")
    orders = one.load(pieces, blocks)
    with pytest.raises(VerificationError, match="could not be loaded"):
        one.transfer.check(orders)
    assert torch.equal(one.pool, before)
    assert one.status.counters["applied"] == 0


def test_a_failure_lasts_until_the_chunk_is_loaded(rank):
    one = rank()
    pieces, _ = one.pieces("mmmm")
    bad, good = one.load(pieces, [0]), Orders()
    with pytest.raises(VerificationError):
        one.transfer.check(bad)
    for keys in (["chunk at 8"], None):
        with pytest.raises(VerificationError, match="earlier request"):
            one.transfer.check(Orders(reused={2: keys}))
    one.transfer.check(Orders(reused={2: ["another"]}))
    one.transfer.check(one.load(pieces, [0, 1]))
    one.transfer.check(Orders(reused={2: ["chunk at 8"], 3: None}))
    one.transfer.load(Orders(lost={4: ["gone"]}))
    with pytest.raises(VerificationError, match="ordered"):
        one.transfer.check(Orders(lost={4: ["gone"]}))
    one.transfer.check(good)


def test_a_load_without_an_outcome_is_a_failure(rank):
    one = rank()
    pieces, _ = one.pieces("mm")
    with pytest.raises(VerificationError, match="could not be loaded"):
        one.transfer.check(Orders(loads=[Load(1, pieces, [0], ["key"])]))


def test_what_is_not_finite_is_an_error(rank):
    one = rank()
    pieces, kept = one.pieces("mm")
    kept[0][0, 1, 0, 0, 0] = float("nan")
    with open(pieces[0].files[0], "wb") as file:
        file.writelines(encode(kept[0], pieces[0].keys[0], (0, 2)))
    with pytest.raises(VerificationError, match="not finite"):
        one.transfer.check(one.load(pieces, [0]))
    pool = one.transfer.pool
    pool.states[2, 1, 0, 0, 0, 0] = float("inf")
    one.transfer.save([Save(1, "1" * 32, 0, [2])])
    one.saver.close()
    assert one.status.counters["error: save"] == 1
    assert one.store.stats()["files"] == 0


def test_a_wrong_number_of_scales(rank):
    with pytest.raises(UsageError, match="scale for each of 4 layers"):
        rank(target_kv_dtype="float8_e4m3fn", target_kv_scales=[1.0])
    with pytest.raises(UsageError, match="scale for each of 3 layers"):
        rank(source_kv_dtype="float8_e4m3fn", source_kv_scales=[1.0] * 4)


def test_saves_are_bounded_and_never_waited_for(rank):
    one = rank(maps=False, saving_bytes=3 * 3 * 2 * 2 * 8 * 16 * 4)
    key = chunk_keys(
        one.deployment.source.namespace("float32", 8), TOKENS, salt=None, lora=None, exact=True
    )
    release, put = threading.Event(), one.store.put
    one.store.put = lambda *args: (release.wait(30), put(*args))[1]
    before = one.pool.clone()
    one.transfer.save([Save(7, key[number], number * 8, [number // 2]) for number in range(5)])
    one.pool.zero_()  # what was begun is a copy
    assert one.status.counters["not saved: too much on its way"] == 2
    release.set()
    one.saver.close()
    assert one.transfer.saved([7, 8]) == [7, 8]
    assert one.saver._bytes == 0
    for number in range(3):
        name = shard_key(key[number], 0, 2)
        found = decode(one.store.get(name), name)
        slots = slice(number % 2 * 8, number % 2 * 8 + 8)
        assert torch.equal(found, before[number // 2, :, :, :, slots])
    assert one.store.get(shard_key(key[3], 0, 2)) is None


def test_a_request_is_being_read_until_its_copy_is_done(rank):
    one = rank(maps=False)
    held = threading.Event()

    class Event:
        def synchronize(self):
            held.wait(30)
            raise RuntimeError("injected")

    copy = one.saver._copy
    one.saver._copy = lambda save: (copy(save)[0], Event())
    one.transfer.save([Save(7, "0" * 32, 0, [0])])
    assert one.transfer.saved([7, 8]) == [8]
    held.set()
    one.saver.close()
    assert one.transfer.saved([7]) == [7]  # even where the copy failed
    assert one.status.counters["error: save"] == 1


def test_a_source_does_not_load(rank):
    one = rank(maps=False)
    with pytest.raises(UsageError, match="target"):
        one.transfer.load(Orders(loads=[Load(1, [], [], [])]))
    wrong = PagedPool(random_pool(torch.float32, 4, 2, 16), (0, 2), one.chunk)
    with pytest.raises(IncompatiblePairError):
        Transfer(one.deployment, one.store, one.status, maps=False, pool=wrong, rank=0)


def test_a_gpu_without_the_kernels_is_noted():
    """They do not take float32; the map is then as right and slower, which somebody must see."""
    status = Status()
    plan = SimpleNamespace(key_weight=SimpleNamespace(is_cuda=True), dtype=torch.float32, repair={})
    assert _kernels(plan, 2**20, status) is None
    assert status.counters["error: kernels"] == 1
