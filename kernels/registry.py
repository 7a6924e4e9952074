"""Kernels by name. A kernel's folder holds its declaration and launch rule, its Triton source and its torch reference."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from ouro_build.kernels.spec import Kernel

NAMES: tuple[str, ...] = (
    "advance",
    "argmax",
    "attention_capture",
    "attention_decode",
    "attention_merge",
    "attention_prefill",
    "attention_retained",
    "attention_select",
    "bind",
    "embedding",
    "exit_gate",
    "kv_copy",
    "linear_few",
    "linear_many",
    "linear_rope",
    "linear_silu",
    "locate",
    "read_pool",
    "residual_norm",
    "resolve",
    "retained_merge",
    "rms_norm",
    "rope_kv_write",
    "route_rows",
    "silu_mul",
    "split_contexts",
)


@cache
def kernel(name: str) -> Kernel:
    """The declaration of kernel `name`. Needs neither torch nor triton."""
    found: Kernel = import_module(f"ouro_build.kernels.{name}").KERNEL
    return found


@cache
def source(name: str) -> Any:
    """Its `triton.jit` function. Imports triton."""
    return getattr(import_module(f"ouro_build.kernels.{name}.source"), name)


@cache
def reference(name: str) -> tuple[Callable[..., None], tuple[str, ...]]:
    """Its torch reference and the parameters that it takes, by name. Imports torch."""
    function: Callable[..., None] = getattr(import_module(f"ouro_build.kernels.{name}.reference"), name)
    return function, tuple(inspect.signature(function).parameters)
