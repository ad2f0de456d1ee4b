"""Export a full-size mapper as ONNX, in a process of its own: seconds and peak memory per step.

Qwen3-14B to 32B, `all` heads, k = 8, float16: 2.15 GB of random weights. Takes 3 GB of disk.

python benchmarks/onnx_size.py [--json FILE]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOP_K = 8
# Expected before the first measurement. Plan: a copy of the weights beside the mapper's own. Write:
# no more, the file is written from the plan's memory. Check: the runtime has the weights once more,
# and one layer as float32. And 0.5 GB of libraries.
EXPECTED = {"mapper": 1.2, "plan": 2.2, "write": 2.3, "check": 3.5}  # times the weights


def measure(path: Path) -> dict[str, Any]:
    """Export to `path`: what the child process does.

    Memory is the most that the process held during a step, mapped pages of files included.
    """
    import torch
    from common import QWEN3, mapper_config
    from kvhub.exporters import onnx_graph, plan

    from kvhub import KVMapper, ModelSpec, exporters
    from kvhub.mapper_config import tensor_shapes

    steps: dict[str, dict[str, float]] = {}
    start = time.perf_counter()

    def end_step(name: str) -> None:
        nonlocal start
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        steps[name] = {"seconds": time.perf_counter() - start, "peak_bytes": peak}
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is held now
        start = time.perf_counter()

    # `export` looks both up when it runs; the test is the last part of `export_onnx`.
    make_plan, self_test = plan.make_plan, onnx_graph.self_test

    def measured_plan(*arguments: Any, **options: Any) -> plan.ExportPlan:
        made = make_plan(*arguments, **options)
        end_step("plan")
        return made

    def measured_test(*arguments: Any) -> None:
        end_step("write")
        self_test(*arguments)
        end_step("check")

    plan.make_plan, onnx_graph.self_test = measured_plan, measured_test
    torch.manual_seed(0)
    source, target = (
        ModelSpec.from_config(
            {
                **QWEN3,
                "hidden_size": 5120,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
            },
            name,
        )
        for name, layers, heads in (("Qwen/Qwen3-14B", 40, 40), ("Qwen/Qwen3-32B", 64, 64))
    )
    config = mapper_config(source, target, "all", TOP_K)
    tensors = {
        name: torch.empty(shape, dtype=torch.float16).uniform_(-0.02, 0.02)
        for name, shape in tensor_shapes(config).items()
    }
    mapper = KVMapper(config, tensors)
    end_step("mapper")
    exporters.export(mapper, "onnx", path)
    return {
        "weights_bytes": mapper.size_bytes,
        "file_bytes": sum(file.stat().st_size for file in path.iterdir()),
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--export-to", type=Path, help=argparse.SUPPRESS)  # the child
    arguments = parser.parse_args()
    if arguments.export_to is not None:
        print(json.dumps(measure(arguments.export_to)))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--export-to", str(Path(folder) / "exported")]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    facts = json.loads(done.stdout)
    weights = facts["weights_bytes"]
    print(f"{weights / 1e9:.2f} GB of weights, {facts['file_bytes'] / 1e9:.2f} GB of files")
    print("step      seconds   peak GB   times the weights   expected")
    for name, expected in EXPECTED.items():
        step = facts["steps"][name]
        print(
            f"{name:<8}{step['seconds']:9.1f}{step['peak_bytes'] / 1e9:10.2f}"
            f"{step['peak_bytes'] / weights:20.2f}{expected:11.1f}"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
