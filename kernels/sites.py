"""Where launch rules look configurations up: the kernel, its shape and rows, as told from buffers or from a recorded launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.plan import Buffer, Launch
from ouro_build.artifacts.tuning import FORMS, Fragments
from ouro_build.kernels.paged_kv import page_shape

_TALL, _NARROW = 8192, 4096


class Site(NamedTuple):
    """Where a configuration is wanted: a kernel, bits of an element, bucket, exact sizes and the kind that they are of."""

    kernel: str
    bits: Literal[16, 32]
    rows: int
    sizes: tuple[int, ...]
    kind: str

    @property
    def name(self) -> str:
        """For people: kernel, sizes, rows."""
        return f"{self.kernel} {'×'.join(map(str, self.sizes))}, {self.rows} rows"


def matrix_site(kernel: str, bucket: int, size: int, width: int, dtype: str) -> Site:
    """Of a kernel that multiplies `bucket` rows with a weight [size, width] of `dtype`."""
    return Site(kernel, bits_of(dtype), bucket, (size, width), _kind(size, width))


def attention_site(kernel: str, bucket: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> Site:
    """Of an attention kernel over `bucket` rows, with keys of `dtype`."""
    kind = "single" if heads == kv_heads else "grouped"
    return Site(kernel, bits_of(dtype), bucket, (heads, kv_heads, head_dim), kind)


def site_of(launch: Launch) -> Site | None:
    """Where the rule of a recorded launch looked; None for what no table configures, such as few rows in float32."""
    kernel, named = launch.specialization.kernel, dict(launch.buffers())
    if kernel not in FORMS:
        return None
    if kernel.startswith("attention"):
        bucket, heads, head_dim = named["q"].sizes
        return attention_site(kernel, bucket, heads, page_shape(named["kv"])[0], head_dim, named["kv"].dtype)
    x = named["x"]
    site = matrix_site(kernel, named["rows"].sizes[0], _weight_rows(kernel, named), x.sizes[1], x.dtype)
    return None if FORMS[kernel] is Fragments and site.bits == 32 else site


def _weight_rows(kernel: str, named: Mapping[str, Buffer]) -> int:
    """Rows of the weight: a weight's own shape is that of its blocks."""
    if kernel == "linear_rope":
        _, heads, head_dim = named["q"].sizes
        return (heads + 2 * page_shape(named["kv"])[0]) * head_dim
    return named["out"].sizes[1] * (2 if kernel == "linear_silu" else 1)


def _kind(size: int, width: int) -> str:
    if size >= _TALL:
        return "tall"
    if width > _NARROW:
        return "deep"
    return "narrow" if size <= _NARROW else "middle"


def bits_of(dtype: str) -> Literal[16, 32]:
    """Bits of an element, as tables tell them apart."""
    return 32 if DTYPES[dtype].bytes == 4 else 16
