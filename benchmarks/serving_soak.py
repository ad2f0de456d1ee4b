"""Conversations that switch between two engines, through faults; exit status 1 on any miss.

python benchmarks/serving_soak.py [--store files|mooncake] [--conversations N] [--minutes N]
    [--seed N] [--version NAME] [--json FILE]

The engines are the stand-ins of the tests, one per model, each the target of the other: with a
connector of its own export that maps what the other one saved. Every turn goes to one of them at
random, with all of the conversation so far, most under a salt of kvhub's, for several tenants; some
are asked twice at the same time, some cancelled. Meanwhile entries are lost, damaged and late,
stores are killed and started again, connectors raise. Every token of every answer is compared with
a reference (see serving_reference.py), and so is what the blocks held.
"""

import argparse
import gc
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import Result

from kvhub import ModelSpec, console

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from deployments import deploy
from mapping import random_mapper
from serving_conversations import TENANTS, Driver, Soak
from serving_faults import Faults, Files, Mooncake, inject
from serving_overhead import overhead
from serving_reference import Checker, ShadowHost
from tiny import tiny_model
from trtllm_api import PRESETS, V1_2_1, Version

CONNECTOR = ("kvhub.exporters.trtllm_connector", "TargetScheduler", "TargetWorker")
LOOKUP_SECONDS = 0.25
BLOCKS = {"a": (8, 1400), "b": (16, 700)}  # tokens of a block, and their number

# Expected before the first run. Between the halves of a run memory grows by what the connectors
# remember of chunks, at most 65,536 per engine at some 250 bytes, which a few minutes do not fill.
EXPECTED_GROWTH, GROWTH_LIMIT = "< 8 MiB", 16.0


def run(
    folder: Path,
    kind: str = "files",
    conversations: int = 64,
    seconds: float = 180.0,
    seed: int = 0,
    version: Version = V1_2_1,
) -> Soak:
    """Serve in a new folder."""
    models = {"a": tiny_model("llama", 3, seed=1), "b": tiny_model("qwen3", 4, seed=2)}
    specs = {name: ModelSpec.from_model(model) for name, model in models.items()}
    faults = Faults(seed)
    before = handles()
    store = {"files": Files, "mooncake": Mooncake}[kind](folder)
    hosts: dict[str, ShadowHost] = {}
    checkers, salts = {}, {}
    variable = os.environ.get("TLLM_KVHUB_CONFIG")
    try:
        for name, other in (("a", "b"), ("b", "a")):
            mapper = random_mapper(specs[other], specs[name], "all" if name == "a" else "matched")
            path = folder / name
            settings = {
                "store": store.config,
                "tenants": TENANTS,
                "lookup_seconds": LOOKUP_SECONDS,
                "staging_path": str(folder / "stage"),
            }
            deployment = deploy(mapper, path, (other, name), **settings)
            # Read when a connector is made.
            os.environ["TLLM_KVHUB_CONFIG"] = str(path)
            host = hosts[name] = make_host(name, models[name], version, seed)
            salts[name] = {tenant: deployment.salt(tenant) for tenant in TENANTS}
            checkers[name] = Checker(
                host,
                models[name],
                models[other],
                mapper,
                salts[name].values(),
                path / "status.jsonl",
            )
            scheduler, worker = host.manager.scheduler, host.manager.workers[0]
            store.stores += [scheduler.store, worker.transfer.saver.store]
            inject(host, faults, 2 * LOOKUP_SECONDS)
        driver = Driver(hosts, checkers, salts, store, faults, conversations, seed)
        driver.soak.connections = store.connections
        driver.run(seconds)
        return summary(driver, before)
    finally:
        for host in hosts.values():
            host.close()
        store.close()
        if variable is None:
            os.environ.pop("TLLM_KVHUB_CONFIG", None)
        else:
            os.environ["TLLM_KVHUB_CONFIG"] = variable


def make_host(name: str, model: Any, version: Version, seed: int) -> ShadowHost:
    """One engine; they differ in all that they may differ in."""
    size, blocks = BLOCKS[name]
    overrides: dict[str, Any] = {"kv_cache_config.enable_partial_reuse": False}
    if version.layout == "mapping":
        overrides["kv_cache_config.dtype"] = "float32"
    # Where V1 is cancelled between two chunks of a prompt it keeps blocks that nobody computed.
    chunked = not version.stores_unfilled
    return ShadowHost(
        model,
        version,
        CONNECTOR,
        tokens_per_block=size,
        num_blocks=blocks,
        overlap=name == "b",
        chunked=chunked,
        max_num_tokens=512 if chunked else 8192,
        llm_args_overrides=overrides,
        seed=seed,
    )


def summary(driver: Driver, handles_before: Counter[str]) -> Soak:
    """Let go of everything, and look for what is left."""
    soak = driver.soak
    for name, host in driver.hosts.items():
        checker, scheduler = driver.checkers[name], host.manager.scheduler
        if not soak.dead:
            # What was loaded is released some iterations later, and a transfer ends with one.
            within(lambda h=host: not h.manager.in_transfer(), host.step)
            for _ in range(2):
                host.submit([1, 2, 3], 4)
                host.run_until_idle()
            within(lambda h=host: not h.manager.workers[0].transfer.saver._bytes, host.step)
        checker.check()
        planner, stage = scheduler.planner, scheduler.planner.stage
        saver = host.manager.workers[0].transfer.saver
        # The tree holds no references.
        soak.leaks["blocks"] += host.leaked_blocks() + len(host.blocks.referenced)
        staged = [path for path in stage.path.iterdir() if path.name != "owner"]
        soak.leaks["staged files"] += len(staged)
        soak.leaks["requests remembered"] += len(planner._requests) + len(planner._owners)
        soak.leaks["bytes in savers"] += saver._bytes + len(saver._reading)
        soak.leaks["requests not checked"] += checker.unchecked
        soak.engines[name], soak.states[name] = checker.counts, checker.reasons
        counters = Counter(scheduler.status.counters)
        counters.update(host.manager.workers[0].status.counters)
        soak.counters[name] = dict(sorted(counters.items()))
        soak.examples += [f"engine {name}: {example}" for example in checker.examples]
        for key, value in checker.largest.items():
            soak.largest[key] = max(soak.largest[key], value)
        host.manager.workers[0].transfer.close()
        stage.close()
        stage.store.close()
        saver.store.close()
    soak.over = max(soak.over, driver.store.over())
    soak.faults = driver.faults.counts
    driver.hosts, driver.checkers = {}, {}
    gc.collect()
    if isinstance(driver.store, Files):  # Mooncake's clients close when they like
        left = handles() - handles_before
        soak.leaks["handles at the end"] = sum(left.values())
        soak.examples += [f"still open: {name}" for name in left]
    return soak


def handles() -> Counter[str]:
    """What is open: files by name, sockets and pipes by kind."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{number}").partition(":")[0]] += 1
    return found


def within(condition: Callable[[], bool], act: Callable[[], object], seconds: float = 30.0) -> None:
    """Act until it holds; if it does not in time, what is left is found."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        act()
        time.sleep(0.001)


def results(soak: Soak) -> list[Result]:
    """What must be nothing, and memory."""
    wrong = ("wrong token", "wrong states", "wrong state", "failed", "no state")
    counts: dict[str, int] = {name: soak.total(name) for name in wrong}
    counts["engines that ended"] = len(soak.dead)
    counts |= soak.leaks
    counts["bytes over the store's capacity"] = soak.over
    rows = [Result(name, "0", str(count), count, 0, "") for name, count in counts.items()]
    first, second = soak.growth
    found = f"{second:.1f} MiB in the second half, {first:.1f} in the first"
    more, most = soak.more_handles, soak.connections
    rows.append(Result("more handles in the last quarter", f"<= {most}", f"{more}", more, most, ""))
    rows.append(Result("memory", EXPECTED_GROWTH, found, second, GROWTH_LIMIT, " MiB"))
    for name, floor in (("mapped tokens", 1), ("exact tokens", 1), ("tokens", 1)):
        count = soak.total(name)
        # A run in which nothing was served proves nothing.
        missing = max(0, floor - count)
        rows.append(Result(f"{name} compared", "> 0", f"{count}", missing, 0, " missing"))
    return rows


def main() -> None:
    """Run it and show what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", choices=("files", "mooncake"), default="files")
    parser.add_argument("--conversations", type=int, default=64, help="at a time; default: 64")
    parser.add_argument("--minutes", type=float, default=3.0, help="default: 3")
    parser.add_argument("--seed", type=int, default=0, help="of everything; default: 0")
    versions = {version.name: version for version in PRESETS}
    parser.add_argument("--version", choices=versions, default=V1_2_1.name, help="of the engines")
    parser.add_argument("--json", type=Path, help="write the results there as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("kvhub").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="kvhub-soak-") as name:
        soak = run(
            Path(name),
            arguments.store,
            arguments.conversations,
            60 * arguments.minutes,
            arguments.seed,
            versions[arguments.version],
        )
        rows = [*results(soak), *overhead(Path(name))]
    show(soak, rows, arguments.store)
    if arguments.json is not None:
        content = {
            "arguments": {**vars(arguments), "json": str(arguments.json)},
            "results": [{**asdict(row), "passed": row.passed} for row in rows],
            "soak": vars(soak),
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sys.stdout.flush()
    sys.exit(not all(row.passed for row in rows))


def show(soak: Soak, rows: list[Result], store: str) -> None:
    """Print what was found, the verdicts last."""
    for line in (*soak.dead, *soak.examples):
        console.say(line)
    for name, states in soak.states.items():
        console.say(f"engine {name}: {dict(states)}; {soak.counters[name]}")
    console.say(f"faults: {dict(sorted(soak.faults.items()))}")
    console.table(
        f"{store}: {soak.requests} requests in {soak.seconds:.0f} s, {soak.cancelled} cancelled, "
        f"{soak.total('tokens')} tokens compared, {sum(soak.faults.values())} faults; largest "
        f"difference of states {soak.largest['states']:.1g}, {soak.total('ties')} ties",
        ("what", "expected", "found", "verdict"),
        [(r.name, r.expected, r.found, "pass" if r.passed else "MISS") for r in rows],
    )


if __name__ == "__main__":
    main()
