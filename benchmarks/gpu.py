"""The map's kernels on one H100 or H200: first whether they are right, then what they take.

python benchmarks/gpu.py [--json FILE] [--minutes 8] [--only NAME]

Random weights of Qwen3-14B's and 32B's shapes. Exit status 1, and no times, if a check fails.
Without a CUDA device the same code runs at toy size, and its figures mean nothing; the kernels too
run then with TRITON_INTERPRET=1, in float16 only, as Triton's interpreter is wrong in bfloat16.
"""

import argparse
import gc
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu_checks import HALF, correctness
from gpu_map import time_copies, time_maps
from gpu_pools import REAL, TOY, Sizes
from gpu_prefill import time_prefills
from gpu_timing import Budget, Row

from kvhub import console
from kvhub.errors import UsageError
from kvhub.roofline import H100_SXM, H200, Device

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("correctness", "map", "copies", "prefill")
PREFILL_SHARE = 0.25  # of the time: kept for the last section
TOY_NOTE = "toy size without a GPU: no figure here means anything"
PACKAGES = ("torch", "triton", "transformers", "kvhub")
QUERIES = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")
LATER_QUERIES = ("clocks.sm", "temperature.gpu", "clocks_throttle_reasons.active")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write everything there, after every section")
    parser.add_argument("--minutes", type=float, default=8.0, help="what does not fit is skipped")
    parser.add_argument("--only", choices=SECTIONS, help="one section; map also checks first")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    seconds = 60 * options.minutes
    report = _Report(Budget(seconds, PREFILL_SHARE * seconds), options.json)
    try:
        return _run(report, options.only)
    except Exception as error:
        report.parts["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        # Also after an error: what was measured until then took a GPU.
        report.write()
        report.show()


def _run(report: "_Report", only: str | None) -> int:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sizes = REAL if device.type == "cuda" else TOY
    dtypes = _kernel_dtypes(device)
    roof = _roof(device)
    report.parts["environment"] = environment(device, sizes, roof)
    report.write()
    if only in (None, "correctness", "map"):
        console.say(f"correctness, at most {report.budget.total / 60:g} minutes in all ...")
        for dtype in HALF:
            if dtype not in dtypes:
                report.budget.skip(
                    f"the kernels in {dtype}: without a GPU they need Triton and "
                    "TRITON_INTERPRET=1, and are right in float16 only"
                )
        checks = correctness(sizes, device, dtypes)
        report.parts["correctness"] = [check.to_dict() for check in checks]
        report.write()
        if not all(check.passed for check in checks):
            console.say("A check failed, so nothing is timed.")
            return 1
    kernels = sizes.dtype in dtypes
    budget = report.budget
    sections: dict[str, Callable[[], Iterable[Row]]] = {
        "map": lambda: time_maps(sizes, roof, device, budget, kernels),
        "copies": lambda: time_copies(sizes, roof, device, budget),
        "prefill": lambda: time_prefills(sizes, roof, device, budget),
    }
    for name, section in sections.items():
        if only in (None, name):
            console.say(f"{name}, {budget.left:.0f} s left ...")
            report.take(name, section)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    report.parts["environment"]["after"] = _ask_driver(LATER_QUERIES) if roof else None
    return 0


def _kernel_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Those in which the kernels can be run here."""
    try:
        import triton
    except ImportError:
        if device.type == "cuda":
            raise
        return ()
    interpreted = triton.knobs.runtime.interpret
    if device.type == "cuda":
        if interpreted:
            raise UsageError(
                "TRITON_INTERPRET is set: Triton would interpret the kernels on the CPU.",
                "Unset it.",
            )
        return HALF
    return (torch.float16,) if interpreted else ()


def _roof(device: torch.device) -> Device | None:
    """The data sheet of this GPU; of an H100 at toy size, so that the code runs."""
    if device.type == "cpu":
        return H100_SXM
    name = torch.cuda.get_device_name(device)
    # PCIe and NVL cards have other peaks, and a MIG slice has a part of them.
    if any(part in name for part in ("MIG", "NVL", "PCIe", "GH200")):
        return None
    return H200 if "H200" in name else H100_SXM if "H100" in name else None


def environment(device: torch.device, sizes: Sizes, roof: Device | None) -> dict[str, Any]:
    """What the figures depend on."""
    toy = device.type == "cpu"
    found: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "toy": toy,
        "note": TOY_NOTE if toy else None,
        "roofline_device": roof.name if roof else None,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "threads": torch.get_num_threads(),
        "dtype": str(sizes.dtype),
        "top_k": sizes.top_k,
        "tokens_per_block": sizes.tokens_per_block,
        "source": sizes.source,
        "target": sizes.target,
    }
    if not toy:
        properties = torch.cuda.get_device_properties(device)
        free, _ = torch.cuda.mem_get_info(device)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": properties.total_memory / 1e9,
            "free_memory_gb": free / 1e9,
            "l2_mb": properties.L2_cache_size / 1e6,
            "cuda": torch.version.cuda,
            "driver": _ask_driver(QUERIES),
        }
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _ask_driver(queries: Sequence[str]) -> dict[str, str] | None:
    """Of the first visible GPU by nvidia-smi's count; None where it cannot be asked."""
    output = _output("nvidia-smi", f"--query-gpu={','.join(queries)}", "--format=csv,noheader")
    if output is None:
        return None
    return dict(zip(queries, output.splitlines()[0].split(", "), strict=False))


def _output(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


class _Report:
    """What was found so far."""

    def __init__(self, budget: Budget, path: Path | None) -> None:
        self.budget, self.path = budget, path
        self.rows: list[Row] = []
        self.parts: dict[str, Any] = {"environment": {}, "correctness": [], "error": None}

    def take(self, name: str, section: Callable[[], Iterable[Row]]) -> None:
        """Run a section; one that needs more memory than there is ends there."""
        try:
            for row in section():
                self.rows.append(row)
                heads = f", {row.heads}" if row.heads else ""
                console.say(f"  {row.name}{heads}, {row.tokens} tokens: {row.median_ms:.3f} ms")
        except torch.cuda.OutOfMemoryError as error:
            self.budget.skip(f"the rest of {name}: {str(error).splitlines()[0]}")
        self.write()

    def ratios(self) -> list[dict[str, Any]]:
        """The map over what it competes with, all of it measured in this run."""
        median = {(row.name, row.heads, row.tokens): row.median_ms for row in self.rows}
        found = []
        for name, heads, tokens in median:
            if name not in ("map", "map, called", "multiply kernel"):
                continue
            if name == "multiply kernel":
                others = [("bare products", heads)]
            else:
                others = [("prefill", None), ("torch's map_paged", heads)]
            for other, other_heads in others:
                against = median.get((other, other_heads, tokens))
                if against:
                    ratio = median[name, heads, tokens] / against
                    names = {"name": name, "over": other, "heads": heads, "tokens": tokens}
                    found.append({**names, "ratio": ratio})
        return found

    def write(self) -> None:
        if self.path is None:
            return
        everything = {
            **self.parts,
            "rows": [row.to_dict() for row in self.rows],
            "ratios": self.ratios(),
            "skipped": self.budget.skipped,
            "seconds": self.budget.total - self.budget.left,
        }
        text = json.dumps(everything, indent=2, allow_nan=False) + "\n"
        self.path.write_text(text, encoding="utf-8")

    def show(self) -> None:
        checks = self.parts["correctness"]
        passed = sum(check["passed"] for check in checks)
        shown = self.parts["environment"]
        toy = f" ({TOY_NOTE})" if shown.get("toy") else ""
        title = (
            f"{shown.get('device')}{toy}, torch {torch.__version__}, triton "
            f"{shown.get('triton')}; {passed} of {len(checks)} checks passed"
        )
        columns = ("what", "heads", "tokens ", "ms ", "expected ", "GB/s ", "expected ", "TFLOP/s ")
        console.table(
            title,
            (*columns, "expected "),
            [
                (
                    *(row.name, row.heads or "", row.tokens),
                    *map(_short, (row.median_ms, row.expected_ms, row.gbps, row.expected_gbps)),
                    *map(_short, (row.tflops, row.expected_tflops)),
                )
                for row in self.rows
            ],
        )
        if self.rows:
            console.table(
                "Ratios of medians",
                ("what", "over", "heads", "tokens ", "ratio "),
                [
                    (
                        *(part[key] for key in ("name", "over", "heads", "tokens")),
                        _short(part["ratio"]),
                    )
                    for part in self.ratios()
                ],
            )


def _short(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


if __name__ == "__main__":
    sys.exit(main())
