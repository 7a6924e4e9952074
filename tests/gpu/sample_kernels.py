"""Two kernels with every kind of argument that plans have, one of them for programmatic dependencies."""

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@triton.jit
def affine(x, w, out, n, scale, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n) * scale + tl.load(w + at, mask=at < n) + stride.to(tl.float32)
    tl.store(out + at, value, mask=at < n)


@triton.jit
def turn(x, w, out, n, scale, stride, BLOCK: tl.constexpr):
    """Each block reads what another block of the launch before it wrote, as soon as that launch lets it start."""
    tl_cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    other = (tl.num_programs(0) - 1 - block) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(w + at, mask=at < n)
    tl_cuda.gdc_wait()
    tl.store(out + at, tl.load(x + other, mask=other < n) * scale + weight + stride.to(tl.float32), mask=at < n)
