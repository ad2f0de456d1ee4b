"""What the Triton kernels become on Hopper: compiled for sm_90a here, without a GPU, and read.

`python -m kvhub.exporters.machine_code` prints the table of docs/kernels.md for the Triton that is
installed; `--json` the same as JSON.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kvhub.exporters.map_plan import MapPlan, RopeTable
from kvhub.exporters.triton_map import (
    BLOCK_TOKENS,
    GATHER_OPTIONS,
    block_features,
    block_outputs,
    gather_constants,
    multiply_constants,
    multiply_options,
)

from kvhub.errors import UsageError

__all__ = ["Kernel", "compile_all"]

SM_90A = ("cuda", 90, 32)  # Triton compiles for 9.0 with the instructions of sm_90a
KV_HEADS, TOP_K, TOKENS_PER_BLOCK = 8, 8, 32
POINTERS = {
    **{"cells": "*i64", "slots": "*i64", "layers": "*i32", "flag": "*i32"},
    **{"cos": "*fp32", "sin": "*fp32", "biases": "*fp32"},
}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Case:
    """A kernel to compile: Qwen3-14B to 32B with k = 8, or a variation of it."""

    kernel: str
    kind: str
    heads: str = "all"
    head_dim: int = 128
    rotary_dim: int = 128
    interleaved: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        parts = [self.kernel, self.kind]
        parts += [self.heads] if self.kernel == "multiply" else []
        parts += [f"head_dim {self.head_dim}"] if self.head_dim != 128 else []
        parts += ["partial RoPE"] if self.rotary_dim < self.head_dim else []
        parts += ["interleaved"] if self.interleaved else []
        return " ".join([*parts, NAMES[self.dtype]])


CASES = [
    Case("gather", "keys"),
    Case("gather", "values"),
    Case("gather", "keys", rotary_dim=64),
    Case("gather", "keys", rotary_dim=64, interleaved=True),
    *(Case("multiply", kind, heads) for heads in ("all", "matched") for kind in ("keys", "values")),
    *(Case("multiply", "keys", heads, head_dim=64, rotary_dim=64) for heads in ("all", "matched")),
    Case("multiply", "keys", rotary_dim=64),
    Case("multiply", "keys", rotary_dim=64, interleaved=True),
    Case("multiply", "keys", dtype=torch.float16),
    Case("multiply", "values", "matched", dtype=torch.float16),
]


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes
    ----------
    registers
        Per thread.
    stack_bytes, spills
        Local memory per thread, and the instructions that read or write it.
    shared_bytes
        Per block of threads.
    stages
        Tiles that the product's loop has in flight; 0 where there is none.
    instructions
        Counts, by name, of matrix products, asynchronous copies, and global loads and stores.
    """

    name: str
    registers: int
    stack_bytes: int
    spills: int
    shared_bytes: int
    stages: int
    instructions: dict[str, int]


def compile_all() -> list[Kernel]:
    """Compile every case with the installed Triton, some seconds each.

    Raises
    ------
    UsageError
        Triton is not installed, or runs as its interpreter.
    """
    try:
        import triton
    except ImportError as error:
        raise UsageError(
            "Compiling the kernels needs Triton, which is not installed.",
            'Run pip install "kvhub[triton]".',
        ) from error
    if triton.knobs.runtime.interpret:
        raise UsageError("Triton runs as its interpreter.", "Unset TRITON_INTERPRET.")
    return [_compile(case) for case in CASES]


def _compile(case: Case) -> Kernel:
    import triton
    from kvhub.exporters import triton_kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(triton_kernels, case.kernel)
    plan, keys = _plan(case), case.kind == "keys"
    shape = (1, 1, 2, KV_HEADS, TOKENS_PER_BLOCK, case.head_dim)
    pool = torch.empty(shape, dtype=case.dtype, device="meta")
    name = NAMES[case.dtype]
    types = {**POINTERS, "pool": f"*{name}", "tokens": "i32", "scratch_rows": "i32"}
    constants: dict[str, Any]
    if case.kernel == "gather":
        constants = gather_constants(plan, pool, keys=keys)
        options = GATHER_OPTIONS
        types["scratch"] = f"*{name}"
    else:
        constants = multiply_constants(plan, pool, keys=keys)
        options = multiply_options(plan)
        features, outputs = block_features(plan), block_outputs(plan)
        types["scratch"] = f"tensordesc<{name}[{BLOCK_TOKENS}, {features}]>"
        types["weights"] = f"tensordesc<{name}[{features}, {outputs}]>"
    arguments = function.arg_names
    signature = {argument: types.get(argument, "constexpr") for argument in arguments}
    # What a launch finds out about the pointers that it is given.
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, argument in enumerate(arguments)
        if signature[argument].startswith("*")
    }
    compiled = triton.compile(
        ASTSource(function, signature, constants, aligned),
        target=GPUTarget(*SM_90A),
        options=options,
    )
    return _read(str(case), compiled)


def _plan(case: Case) -> MapPlan:
    """A plan of the case's shapes without numbers."""
    groups = 1 if case.heads == "all" else KV_HEADS
    features = TOP_K * KV_HEADS // groups * case.head_dim
    outputs = KV_HEADS // groups * case.head_dim

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=case.dtype, device="meta")

    rope = RopeTable(
        inv_freq=empty(case.rotary_dim // 2),
        attention_scaling=1.0,
        rotary_dim=case.rotary_dim,
        interleaved=case.interleaved,
    )
    return MapPlan(
        heads=case.heads,
        groups=groups,
        top_k=TOP_K,
        source_layers=40,
        target_layers=64,
        source_kv_heads=KV_HEADS,
        source_head_dim=case.head_dim,
        target_kv_heads=KV_HEADS,
        target_head_dim=case.head_dim,
        gather=torch.empty((64, TOP_K), dtype=torch.int32, device="meta"),
        key_weight=empty(64, groups, features, outputs),
        value_weight=empty(64, groups, features, outputs),
        key_bias=empty(64, groups, outputs),
        value_bias=empty(64, groups, outputs),
        source_rope=rope,
        target_rope=rope,
    )


def _read(name: str, compiled: Any) -> Kernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    operations = Counter(re.findall(r"\b[A-Z]+(?:\.[A-Z0-9_x]+)*\b", code))
    kept = ("HGMMA", "UTMALDG", "LDG", "STG")
    copies = sum(n for operation, n in operations.items() if operation.startswith("UTMALDG"))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise UsageError(f"cuobjdump says nothing of registers: {usage.strip()!r}.")
    return Kernel(
        name=name,
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        spills=sum(n for op, n in operations.items() if op.startswith(("LDL", "STL"))),
        shared_bytes=compiled.metadata.shared,
        stages=copies // 2,  # one copy each of features and of weights
        instructions={op: n for op, n in sorted(operations.items()) if op.split(".")[0] in kept},
    )


def _tool(name: str, *arguments: str) -> str:
    """Run one of NVIDIA's tools, which come with Triton."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def table(kernels: list[Kernel]) -> str:
    """The table of docs/kernels.md."""
    columns = ("kernel", "registers", "spills", "shared memory", "stages", "instructions")
    lines = [columns, ("---",) * len(columns)]
    for kernel in kernels:
        counts = ", ".join(f"{n} {op}" for op, n in kernel.instructions.items())
        memory = f"{kernel.shared_bytes / 1024:.0f} KiB"
        numbers = (kernel.registers, kernel.spills, memory, kernel.stages or "")
        lines.append((kernel.name, *map(str, numbers), counts))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Print the table, or JSON."""
    import triton

    kernels = compile_all()
    if "--json" in sys.argv[1:]:
        result = {"triton": triton.__version__, "kernels": [asdict(kernel) for kernel in kernels]}
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        sys.stdout.write(f"## Triton {triton.__version__}\n\n{table(kernels)}")


if __name__ == "__main__":
    main()
