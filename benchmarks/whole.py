"""What a whole process takes: memory of a calibration, start-up of the command."""

import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from common import Result, seconds

FAMILY = Path(__file__).resolve().parents[1] / "examples" / "tiny_family"
CALIBRATE = """
from kvhub import calibrate
from kvhub.data import token_batches
from kvhub.models import load_model, load_tokenizer

source, target = load_model({middle!r}), load_model({large!r})
tokenizer = load_tokenizer({large!r})
batches = token_batches(tokenizer, "stdlib", sequences={sequences}, length=128)
calibrate(source, target, batches)
# Not getrusage: a child's ru_maxrss starts at what its parent held.
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""
LOADED = """
import sys, kvhub.cli
print(sum(name in sys.modules for name in ("torch", "transformers")))
"""


def memory() -> Iterator[Result]:
    """Peak memory of calibrations of 500 and of 50 sequences, each in its own process."""
    peaks = []
    for sequences in (50, 500):
        code = CALIBRATE.format(
            middle=str(FAMILY / "middle"), large=str(FAMILY / "large"), sequences=sequences
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout) * 1024)
    yield Result(
        "Peak memory, 500 sequences against 50",
        "1.02x: sums do not grow",
        f"{peaks[1] / 1e6:.0f} MB against {peaks[0] / 1e6:.0f} MB",
        peaks[1] / peaks[0],
        1.1,
    )


def start_up() -> Iterator[Result]:
    """`kvhub --help`, and what importing the command loads."""
    command = [Path(sys.executable).parent / "kvhub", "--help"]

    def run() -> None:
        subprocess.run(command, capture_output=True, check=True)

    run()
    time = statistics.median(seconds(run) for _ in range(5))
    yield Result("kvhub --help", "0.3 s, most of it Typer", f"{time:.2f} s", time, 0.4, "s")
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    )
    yield Result(
        "Heavy packages loaded by the command's import",
        "none",
        f"{int(done.stdout)} of torch and transformers",
        float(done.stdout),
        0.0,
        "",
    )
