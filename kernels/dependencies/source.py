"""Programmatic dependencies: the two ends of an edge, as Triton functions. Without PROGRAMMATIC they are nothing at all."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def release(PROGRAMMATIC: tl.constexpr):
    """Let dependent launches start. They read nothing of this launch before it has ended: `wait` sees to that."""
    if PROGRAMMATIC:
        gdc_launch_dependents()


@triton.jit
def wait(PROGRAMMATIC: tl.constexpr):
    """Wait until the launches before have ended and their writes are visible. Only what the kernel declares as `early` may be
    read before this."""
    if PROGRAMMATIC:
        gdc_wait()
