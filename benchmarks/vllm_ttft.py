"""Time to first token at the target's vLLM server: its own prefill against a mapped cache.

python benchmarks/vllm_ttft.py [--lengths 256,512,1024,1984] [--repeats 5] [--mapper DIR]
    [--plot FILE] [--json FILE]

Needs KVHUB_VLLM_PYTHON (`make test-vllm` makes .venv-vllm/bin/python) and the models of
examples/smollm2/make_models.py. Without a mapper, random weights of the recipe's shape stand in for
one: they take the same time. Two real servers on this machine's CPUs, float32; every request has
tokens of its own, so that nothing is cached by chance. A length's requests alternate: own, mapped.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from kvhub.exporters import export

from kvhub import KVMapper, ModelSpec
from kvhub.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
for folder in ("tests", "tests_vllm"):
    sys.path.insert(0, str(ROOT / folder))

from mapping import random_mapper  # noqa: E402
from servers import Server  # noqa: E402

MODELS = ROOT / "examples" / "smollm2" / "models"
CHUNK, LONGEST = 32, 2048
STILL_SECONDS = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="256,512,1024,1984", help="of prompts, in tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mapper", type=Path, help="a saved mapper of the SmolLM2 pair")
    parser.add_argument("--plot", type=Path, help="write a PNG there")
    parser.add_argument("--json", type=Path, help="write every time there")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    if "KVHUB_VLLM_PYTHON" not in os.environ or not (MODELS / "target").is_dir():
        sys.exit(__doc__)
    mapper = KVMapper.from_pretrained(str(options.mapper)) if options.mapper else stand_in()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(mapper, Path(folder), lengths, options.repeats)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(found, options.plot)
    return 0


def stand_in() -> KVMapper:
    """A random mapper of the recipe's shape."""
    specs = [ModelSpec.from_pretrained(str(MODELS / side)) for side in ("source", "target")]
    recipe = load_recipe("smollm2")
    mapper: KVMapper = random_mapper(*specs, recipe.heads, top_k=recipe.top_k)
    return mapper


def measure(mapper: KVMapper, root: Path, lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    path = export(mapper, "vllm", root / "export", dtype=torch.float32)
    salt = "kvhub:" + json.loads((path / "kvhub.json").read_text())["digest"]
    store = root / "store"
    started = []
    try:
        for side in ("source", "target"):
            content = json.loads((path / f"{side}.json").read_text())
            content["kv_connector_extra_config"]["settings"] = {
                "store": {"kind": "files", "capacity_bytes": 2**32, "path": str(store)},
                "staging_path": str(root / "stage"),
                "lookup_seconds": 5.0,
            }
            log = root / f"{side}.log"
            options = ("--max-model-len", str(LONGEST), "--max-num-batched-tokens", str(LONGEST))
            started.append(Server(MODELS / side, path, content, log, *options))
        source, target = (server.ready() for server in started)
        draw = random.Random(0)
        prompt([source, target], draw, store, 64, salt)  # nothing is measured of the first
        return [
            {"tokens": length, **prompt([source, target], draw, store, length, salt, repeats)}
            for length in lengths
        ]
    finally:
        for server in started:
            server.kill()


def prompt(
    servers: list[Server],
    draw: random.Random,
    store: Path,
    length: int,
    salt: str,
    repeats: int = 1,
) -> dict[str, Any]:
    """Seconds to the first token of prompts of one length."""
    source, target = servers
    times: dict[str, list[float]] = {"own": [], "mapped": []}
    for _ in range(repeats):
        for kind, seconds in times.items():
            tokens = [draw.randrange(1000, 40000) for _ in range(length)]
            fields = {}
            if kind == "mapped":
                fields["cache_salt"] = salt
                source.complete(tokens, count=1)
                wait_for(store)
            start = time.perf_counter()
            answer = target.complete(tokens, count=1, **fields)
            seconds.append(time.perf_counter() - start)
            wanted = (length - 1) // CHUNK * CHUNK if fields else 0
            if answer["cached"] != wanted:
                raise RuntimeError(f"Expected {wanted} cached tokens, found {answer}.")
    return times


def wait_for(store: Path) -> None:
    """Until both servers have saved what they computed: no entry has come for a while."""
    before, found = -1, 0
    while found != before:
        time.sleep(STILL_SECONDS)
        before, found = found, sum(path.is_file() for path in store.rglob("*"))


def show(found: list[dict[str, Any]]) -> None:
    print("| prompt tokens | own prefill s | mapped s | own / mapped |\n|---|---|---|---|")
    for row in found:
        own, mapped = (statistics.median(row[kind]) for kind in ("own", "mapped"))
        print(f"| {row['tokens']} | {own:.2f} | {mapped:.2f} | {own / mapped:.1f} |")


def plot(found: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    lengths = [row["tokens"] for row in found]
    for kind, label in (("own", "own prefill"), ("mapped", "mapped from the source's cache")):
        middle = [statistics.median(row[kind]) for row in found]
        axes.plot(lengths, middle, marker="o", label=label)
        axes.fill_between(
            *(lengths, [min(row[kind]) for row in found], [max(row[kind]) for row in found]),
            alpha=0.2,
        )
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("seconds to the first token")
    axes.set_title("SmolLM2 pair in vLLM on this machine's CPUs: median, least and most")
    axes.set_ylim(bottom=0)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(main())
