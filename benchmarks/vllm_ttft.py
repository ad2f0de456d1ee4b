"""Time to first token at the target's vLLM server: its own prefill against a mapped cache.

kvhub fit smollm2
python benchmarks/vllm_ttft.py [--mapper smollm2] [--lengths 128,256,512,1024,1536] [--repeats 7]
    [--plot FILE] [--json FILE]

Needs KVHUB_VLLM_PYTHON (`make test-vllm` makes .venv-vllm/bin/python) and the models of
examples/smollm2/make_models.py. Two real servers on this machine's CPUs, float32, one thread each;
every request has tokens of its own, so that nothing is cached by chance. A length's requests
alternate: own, mapped. What the source took for its answer is not counted: it answered before the
conversation changed models.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from kvhub.exporters import export

from kvhub import KVMapper
from kvhub.estimates import estimate
from kvhub.models import count_parameters

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests_vllm"))

from servers import Server  # noqa: E402

MODELS = ROOT / "examples" / "smollm2" / "models"
CHUNK, LONGEST = 32, 2048
STILL_SECONDS = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--mapper", default="smollm2", help="of the SmolLM2 pair: name or directory"
    )
    parser.add_argument("--lengths", default="128,256,512,1024,1536", help="of prompts, in tokens")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plot", type=Path, help="write a PNG there")
    parser.add_argument("--json", type=Path, help="write every time there")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    if "KVHUB_VLLM_PYTHON" not in os.environ or not (MODELS / "target").is_dir():
        sys.exit(__doc__)
    mapper = KVMapper.from_pretrained(options.mapper)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(mapper, Path(folder), lengths, options.repeats)
    found = {"machine": machine(), "mapper": described(mapper), "rows": rows}
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(rows, options.plot)
    return 0


def machine() -> dict[str, Any]:
    """What the times depend on."""
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {"cpu": names[0], "cores": os.cpu_count(), "platform": platform.platform()}


def described(mapper: KVMapper) -> dict[str, Any]:
    """Which it is, and how many operations it needs per token beside the target's layers.

    By those alone, the map should be so many times as fast as the prefill of a short prompt.
    """
    config = mapper.config
    parameters = count_parameters(str(MODELS / "target"))
    costs = estimate(config.source, config.target, config.heads, config.top_k, parameters)
    embedding = config.target.vocab_size * config.target.hidden_size
    prefill = 2 * (parameters - embedding)
    return {
        "heads": config.heads,
        "top_k": config.top_k,
        "map_flops_per_token": costs.map_flops,
        "prefill_flops_per_token": prefill,
        "expected_ratio": prefill / costs.map_flops,
    }


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
            answer = target.complete(tokens, count=1, logprobs=None, **fields)
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


def show(found: dict[str, Any]) -> None:
    print(f"{found['machine']['cores']} cores of {found['machine']['cpu']}; medians (least, most)")
    print(f"By operations alone: {found['mapper']['expected_ratio']:.1f} times as fast\n")
    print("| prompt tokens | own prefill s | mapped s | own / mapped |\n|---|---|---|---|")
    for row in found["rows"]:
        cells = [
            f"{statistics.median(row[kind]):.2f} ({min(row[kind]):.2f}, {max(row[kind]):.2f})"
            for kind in ("own", "mapped")
        ]
        ratio = statistics.median(row["own"]) / statistics.median(row["mapped"])
        print(f"| {row['tokens']} | {' | '.join(cells)} | {ratio:.1f} |")


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
    axes.set_title("SmolLM2 pair in vLLM on CPUs: median, least and most")
    axes.set_ylim(bottom=0)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(main())
