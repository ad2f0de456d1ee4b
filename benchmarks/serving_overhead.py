"""What a connector costs an engine: with nothing to do per iteration, and per mapped token."""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Result, compare, smollm2_pair
from deployments import deploy
from kvhub.exporters.chain import chunk_keys, shard_key
from kvhub.exporters.entry import encode
from kvhub.exporters.paged import map_paged
from kvhub.exporters.paged_cache import PagedCache
from kvhub.exporters.planner import Arrival, Orders, Planner
from kvhub.exporters.pool import PagedPool
from kvhub.exporters.staging import Stage
from kvhub.exporters.status import Status
from kvhub.exporters.store import open_store
from kvhub.exporters.transfer import Transfer
from mapping import random_mapper
from tiny import tiny_model
from trtllm_api import V1_2_1
from trtllm_host import Host

from kvhub import ModelSpec

CONNECTOR = ("kvhub.exporters.trtllm_connector", "TargetScheduler", "TargetWorker")
ITERATIONS, REPEATS = 200, 7
CHUNK, TOKENS = 32, 1024
# Expected before the first measurement, in microseconds per iteration. Some twenty calls of methods
# that return at once, and a dataclass: 10. Each request that decodes has a lookup, a list and a
# comparison or two: 3. The stand-in's own work for a connector, in Python here and in C++ in part
# there, is in the difference of the hosts and not in the callbacks.
IDLE = {1: ("20 us", 100.0), 64: ("200 us", 600.0)}
# The source's states are read twice more than by the bare map, from the entries and on their way
# to the device; on a CPU that is some 50 KB per token, twice, at 5 GB/s, beside 9 million
# multiplications. Looking up is a link and a checksum of the same bytes.
LOADED, LOADED_LIMIT, LOOKED_UP = "1.2x", 1.6, "0.2x"


def overhead(folder: Path) -> list[Result]:
    """Both, in a new folder inside of this one."""
    return [*idle(folder / "idle"), *mapped(folder / "mapped")]


def idle(folder: Path) -> list[Result]:
    """Iterations in which no request has anything to load or save."""
    model = tiny_model("llama", 3, seed=1)
    spec = ModelSpec.from_model(model)
    folder.mkdir()
    deploy(random_mapper(spec, spec), folder / "out")
    before = os.environ.get("TLLM_KVHUB_CONFIG")
    os.environ["TLLM_KVHUB_CONFIG"] = str(folder / "out")
    rows = []
    try:
        for requests, (expected, limit) in IDLE.items():
            hosts = [_idle_host(model, connector, requests) for connector in (CONNECTOR, None)]
            spent = _timed(hosts[0])
            runs = [partial(_steps, host) for host in hosts]
            found = compare(runs[0], runs[1], REPEATS)
            spent.clear()
            # Apart, as clocks cost something too; again the best.
            times = []
            for _ in range(REPEATS):
                _steps(hosts[0])
                times.append(sum(spent))
                spent.clear()
            callbacks, whole = (
                1e6 * seconds / ITERATIONS
                for seconds in (min(times), found.measured - found.reference)
            )
            rows.append(
                Result(
                    f"nothing to do, {requests} decoding",
                    expected,
                    f"{callbacks:.0f} us in callbacks per iteration; the host's iteration is "
                    f"{whole:.0f} us longer than without a connector",
                    callbacks,
                    limit,
                    " us",
                )
            )
            for host in hosts:
                host.close()
    finally:
        if before is None:
            del os.environ["TLLM_KVHUB_CONFIG"]
        else:
            os.environ["TLLM_KVHUB_CONFIG"] = before
    return rows


def _idle_host(model: Any, connector: tuple[str, str, str] | None, requests: int) -> Host:
    overrides = {"kv_cache_config.enable_partial_reuse": False}
    steps = ITERATIONS * (2 * REPEATS + 4)
    blocks = requests * (steps // 32 + 2)
    host = Host(model, V1_2_1, connector, num_blocks=blocks, llm_args_overrides=overrides)

    def forward(chunks: Sequence[Any], before: Callable[..., Any], after: Callable[..., Any]):
        for layer in range(len(host.engine.layers)):
            before(layer)
            after(layer)
        return [1] * len(chunks)

    host.engine.forward = forward
    for _ in range(requests):
        host.submit([1, 2, 3], steps, lora_task_id=1)  # kvhub leaves adapters alone
    return host


def _steps(host: Host) -> None:
    for _ in range(ITERATIONS):
        host.step()


def _timed(host: Host) -> list[float]:
    """Seconds of each callback of a host, from now on."""
    call, spent = host.manager._call, []

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        result = call(*args)
        spent.append(time.perf_counter() - start)
        return result

    host.manager._call = timed
    return spent


def mapped(folder: Path) -> list[Result]:
    """A long prompt's entries looked up and loaded, against `map_paged` on the same tokens."""
    specs = smollm2_pair()
    mapper = random_mapper(*specs, "all")
    folder.mkdir()
    deployment = deploy(mapper, folder / "out", chunk_tokens=CHUNK, workspace_bytes=64 << 20)
    source, target = deployment.source, deployment.target
    status = Status()
    store = open_store(deployment.settings.store)
    stage = Stage(store, str(folder / "stage"), 1 << 30, status)
    planner = Planner(deployment, stage, status, maps=True, tokens_per_block=CHUNK)
    tokens, count = list(range(TOKENS + 1)), TOKENS // CHUNK
    heads = (0, source.kv_heads)
    shape = (count, source.num_layers, 2, source.kv_heads, CHUNK, source.head_dim)
    states = torch.randn(shape)
    keys = chunk_keys(planner.source, tokens, salt=None, lora=None, exact=True)
    for chunk, key in zip(states, keys, strict=True):
        store.put(shard_key(key, *heads), encode(chunk, shard_key(key, *heads), heads))
    pool = torch.zeros(count, target.num_layers, 2, target.kv_heads, CHUNK, target.head_dim)
    paged = PagedPool(pool, heads, CHUNK)
    transfer = Transfer(deployment, store, status, maps=True, pool=paged, rank=0)
    blocks = torch.randperm(count).tolist()
    arrival = Arrival(1, tokens, deployment.salt())
    orders = Orders()

    def look_up() -> None:
        if planner.offer(arrival, 0) != TOKENS:
            raise AssertionError(f"The entries are not found: {status.counters}.")

    def serve() -> None:
        transfer.load(orders)
        transfer.check(orders)

    def bare() -> None:
        map_paged(
            transfer.loader.plan, pages, own, workspace_bytes=deployment.settings.workspace_bytes
        )

    look_up()
    told = {"new_tokens": tokens, "new_blocks": blocks, "computed": 0, "scheduled": 1}
    planner.scheduled(1, new=True, **told, orders=orders)
    pages, own = (
        PagedCache(
            pool=cache,
            block_table=torch.tensor([table], dtype=torch.int32),
            lengths=torch.tensor([TOKENS]),
            start_positions=torch.tensor([0]),
        )
        for cache, table in ((states, list(range(count))), (pool, blocks))
    )
    loads = compare(serve, bare, 7)
    looks = compare(look_up, bare, 7)
    each = {
        name: 1e6 * seconds / TOKENS
        for name, seconds in (
            ("load", loads.measured),
            ("bare", loads.reference),
            ("look up", looks.measured),
        )
    }
    transfer.close()
    stage.close()
    store.close()
    return [
        Result(
            "loading a mapped token, SmolLM2 pair",
            LOADED,
            f"{each['load']:.0f} us beside {each['bare']:.0f} us of the bare map",
            loads.ratio,
            LOADED_LIMIT,
        ),
        Result(
            "looking it up and checking it",
            LOOKED_UP,
            f"{each['look up']:.1f} us beside {each['bare']:.0f} us of the bare map",
            looks.ratio,
            None,
        ),
    ]
