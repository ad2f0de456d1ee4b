"""Time and memory against what they are compared with, in one run; exit status 1 on a miss.

python benchmarks/run.py [--only NAME] [--json FILE]
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from paged import paged
from speed import closed_form, greedy_selection, mapping, statistics_update
from whole import memory, start_up

from kvhub import console

BENCHMARKS = {
    "statistics": statistics_update,
    "closed-form": closed_form,
    "greedy": greedy_selection,
    "mapping": mapping,
    "paged": paged,
    "memory": memory,
    "start-up": start_up,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=BENCHMARKS, help="one benchmark instead of all")
    parser.add_argument("--json", type=Path, help="write the results there as well")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    names = [arguments.only] if arguments.only else list(BENCHMARKS)
    results = []
    for name in names:
        console.say(f"{name} ...")
        results += BENCHMARKS[name]()
    console.table(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads",
        ("what", "expected", "found", "value ", "limit ", "verdict"),
        [
            (
                result.name,
                result.expected,
                result.found,
                f"{result.value:.2f}{result.unit}",
                "" if result.limit is None else f"{result.limit:g}{result.unit}",
                "pass" if result.passed else "MISS",
            )
            for result in results
        ],
    )
    if arguments.json is not None:
        rows = [{**asdict(result), "passed": result.passed} for result in results]
        arguments.json.write_text(json.dumps({"results": rows}, indent=2) + "\n", encoding="utf-8")
    sys.exit(not all(result.passed for result in results))


if __name__ == "__main__":
    main()
