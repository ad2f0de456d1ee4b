"""What the kernels become on Hopper, compiled without a GPU, and what is documented of it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs" / "kernels.md"
SHARED_LIMIT = 227 * 1024  # bytes that a block of threads may have on an H100


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "kvhub.exporters.machine_code"]
    result = subprocess.run(
        [*command, "--json"], env=environment, check=True, capture_output=True, text=True
    )
    return json.loads(result.stdout)


def test_products_run_on_tensor_cores_from_asynchronous_copies(compiled):
    products = [kernel for kernel in compiled["kernels"] if kernel["name"].startswith("multiply")]
    assert {"all", "matched"} <= {word for kernel in products for word in kernel["name"].split()}
    for kernel in products:
        counts = kernel["instructions"]
        # Sums in float32; float16 is the operands' default type and not named.
        kind = "F32.BF16" if kernel["name"].endswith("bf16") else "F32"
        dots = [name for name in counts if name.startswith("HGMMA")]
        assert dots, kernel
        assert all(re.fullmatch(rf"HGMMA\.64x\d+x16\.{kind}", dot) for dot in dots)
        assert counts["UTMALDG.2D"] >= 6, kernel
        wide = 4 if " all " in kernel["name"] else 3
        assert kernel["stages"] == wide, kernel  # of the loop, none lost to a load in it


def test_nothing_spills_and_everything_fits(compiled):
    for kernel in compiled["kernels"]:
        assert kernel["spills"] == 0, kernel
        assert kernel["stack_bytes"] == 0, kernel
        assert kernel["registers"] <= 255, kernel
        assert kernel["shared_bytes"] <= SHARED_LIMIT, kernel


def test_pools_are_read_and_written_in_16_bytes(compiled):
    for kernel in compiled["kernels"]:
        counts = kernel["instructions"]
        narrow = [name for name in counts if re.match(r"(LDG|STG)\.E\.U", name)]
        assert not narrow, kernel
        assert counts["STG.E.128"] >= 4, kernel


def test_the_documents_say_so(compiled):
    sections = dict(re.findall(r"## Triton (\S+)\n\n((?:\|.*\n)+)", DOCS.read_text("utf-8")))
    assert compiled["triton"] in sections, "add a table: python -m kvhub.exporters.machine_code"
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in sections[compiled["triton"]].splitlines()[2:]
    ]
    for row, kernel in zip(rows, compiled["kernels"], strict=True):
        memory = f"{kernel['shared_bytes'] / 1024:.0f} KiB"
        counts = [kernel["registers"], kernel["spills"], memory, kernel["stages"] or ""]
        assert row[:5] == [kernel["name"], *map(str, counts)]
