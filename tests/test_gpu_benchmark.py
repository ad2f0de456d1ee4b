"""`benchmarks/gpu.py` at toy size: all of it runs, and no kernel that computes wrongly is timed."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kvhub.exporters.triton_map import TritonMap

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="would run at full size")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TIMED = {
    "gather kernel",
    "multiply kernel",
    "map",
    "map, launched",
    "map, called",
    "bare products",
    "torch's map_paged",
}
OTHERS = {
    "copy, device to device",
    "copy, host to device, pinned",
    "copy, host to device, pageable",
    "prefill",
}


@pytest.fixture
def gpu(monkeypatch):
    """The benchmark with one small check of the kernels and one at its toy's full size."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu
    import gpu_checks

    cases = [case for case in gpu_checks.small_cases(gpu.TOY) if case.dtype == torch.float16]
    monkeypatch.setattr(gpu_checks, "small_cases", lambda _: cases[:1])
    return gpu


@pytest.mark.slow
def test_all_of_it_runs_without_a_gpu(tmp_path):
    path = tmp_path / "gpu.json"
    result = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py", "--json", path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(path.read_text())
    assert report["environment"]["toy"]
    assert report["error"] is None
    assert "no figure here means anything" in result.stdout
    names = {check["name"].split(":")[0] for check in report["correctness"]}
    assert names == {
        "map_paged against float64",
        "kernels against float64",
        "kernels against map_paged",
    }
    assert all(check["passed"] and check["untouched"] for check in report["correctness"])
    assert [line for line in report["skipped"] if "torch.bfloat16" not in line] == []
    found = {(row["name"], row["heads"]) for row in report["rows"]}
    assert found == {(name, heads) for name in TIMED for heads in ("all", "matched")} | {
        (name, None) for name in OTHERS
    }
    for row in report["rows"]:
        assert 0 < row["best_ms"] <= row["median_ms"]
        assert row["setting"]
        if row["name"] == "map":
            assert {"gbps", "expected_gbps", "tflops", "expected_tflops"} <= row.keys()
            expected = row["median_ms"] / row["expected_ms"]
            assert math.isclose(row["found_over_expected"], expected)
    assert {(part["name"], part["over"]) for part in report["ratios"]} >= {
        ("map", "prefill"),
        ("multiply kernel", "bare products"),
    }


def test_without_time_everything_but_correctness_is_skipped(gpu, tmp_path, capfd):
    path = tmp_path / "gpu.json"
    assert gpu.main(["--json", str(path), "--minutes", "0"]) == 0
    report = json.loads(path.read_text())
    assert len(report["correctness"]) == 4
    assert report["rows"] == []
    for what in ("maps of all heads", "maps of matched heads", "copies", "the target's prefill"):
        assert any(line.startswith(what) for line in report["skipped"])


def change_a_number(target):
    """By a 64th, in the last layer's values of the last token."""
    row = len(target.lengths) - 1
    token = int(target.lengths[row]) - 1
    size = target.pool.shape[4]
    block = target.block_table[row, token // size]
    cells = target.pool[block, -1, 1, -1, token % size]
    largest = cells.abs().argmax()
    cells[largest] += cells[largest].abs() / 64 + 0.125


def write_elsewhere(target):
    """After the last token of the longest row, where its block goes on."""
    row = int(target.lengths.argmax())
    token = int(target.lengths[row])
    size = target.pool.shape[4]
    target.pool[target.block_table[row, token // size], 0, 0, 0, token % size, 0] = 0.0


def write_a_nan(target):
    target.pool[target.block_table[0, 0], 0, 0, 0, 0, 0] = float("nan")


@pytest.mark.parametrize("corrupt", [change_a_number, write_elsewhere, write_a_nan])
def test_wrong_kernels_fail_and_are_not_timed(gpu, tmp_path, monkeypatch, capfd, corrupt):
    enqueue = TritonMap.enqueue

    def corrupted(self, source, target, tokens):
        enqueue(self, source, target, tokens)
        corrupt(target)

    monkeypatch.setattr(TritonMap, "enqueue", corrupted)
    path = tmp_path / "gpu.json"
    assert gpu.main(["--json", str(path), "--only", "map"]) == 1
    report = json.loads(path.read_text())
    kernels = [part for part in report["correctness"] if part["name"].startswith("kernels")]
    assert len(kernels) == 3
    assert not any(part["passed"] for part in kernels)
    assert all(part["untouched"] == (corrupt is not write_elsewhere) for part in kernels)
    assert report["rows"] == []
