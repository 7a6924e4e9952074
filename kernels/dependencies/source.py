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
def acquire(at, ACQUIRES: tl.constexpr):
    """The int32 at `at`, which a launch wrote that has ended, past the L1 cache. If ACQUIRES, what was written before it may
    then be read through that cache, before `wait` too: an acquiring load leaves nothing older there."""
    if ACQUIRES:
        word = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        word = tl.load(at, cache_modifier=".cg")
    return word


@triton.jit
def wait(PROGRAMMATIC: tl.constexpr):
    """Wait until the launches before have ended and their writes are visible. Only what the kernel declares as `early` may be
    read before this."""
    if PROGRAMMATIC:
        gdc_wait()
