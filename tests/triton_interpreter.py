"""Triton's interpreter on the CPU, with its bfloat16 mended.

conftest.py turns it on, since Triton must know when it is imported.

As released, 3.5 to 3.9 multiply the bit patterns of bfloat16 numbers in `tl.dot`, and convert
float32 to bfloat16 by cutting bits off instead of rounding. Nothing warns of either. What the
interpreter cannot show: the order of sums on a GPU, asynchronous copies, registers.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

BFLOAT16 = tl.bfloat16


def to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16, ties to even."""
    rounded = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16)


def mend() -> None:
    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def create_dot(self, a, b, d, *options):
        if a.dtype.scalar == BFLOAT16:
            a, b = (interpreter.TensorHandle(to_float32(part.data), tl.float32) for part in (a, b))
        return dot(self, a, b, d, *options)

    def cast_impl(self, source, wanted):
        if source.dtype.scalar == tl.float32 and wanted.scalar == BFLOAT16:
            return interpreter.TensorHandle(to_bfloat16(source.data), BFLOAT16)
        return cast(self, source, wanted)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl


mend()
