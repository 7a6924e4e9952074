"""DLPack: what a tensor of another library says of its memory. Needs none of those libraries.

The structures are those of DLPack's `dlpack.h`, versions 0.x (capsules `dltensor`) and 1.x (`dltensor_versioned`).
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

from ouro_build.artifacts.errors import UsageError

CUDA = 2
"""kDLCUDA, the only type of device whose memory a worker can use as its pools."""
_MAJOR = 1
_READ_ONLY = 1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)  # libraries free Python objects in it


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_KINDS: dict[bytes, tuple[type[_Managed] | type[_Versioned], ctypes.c_char_p]] = {
    b"dltensor": (_Managed, ctypes.c_char_p(b"used_dltensor")),
    b"dltensor_versioned": (_Versioned, ctypes.c_char_p(b"used_dltensor_versioned")),
}
"""Structure by capsule name, and the name of a capsule that was taken: it must outlive the capsule."""


class Span(NamedTuple):
    """Contiguous memory: its address, its bytes, and the DLPack device (type, number) that it is on."""

    address: int
    bytes: int
    device: tuple[int, int]


class Taken:
    """A tensor that was taken out of its capsule: `span` is its memory, which lives until `release`."""

    def __init__(self, capsule: Any, where: str) -> None:
        api = ctypes.pythonapi
        api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, (ctypes.py_object,)
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
        api.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
        name = api.PyCapsule_GetName(capsule) or b""
        if name not in _KINDS:
            raise UsageError(f"a capsule named {name.decode()!r} holds no DLPack tensor that can still be taken", where=where)
        kind, used = _KINDS[name]
        managed = kind.from_address(api.PyCapsule_GetPointer(capsule, name))
        self.span = _span(managed, where)
        api.PyCapsule_SetName(capsule, used)
        self._managed: _Managed | _Versioned | None = managed

    def release(self) -> None:
        """Give the tensor back to the library that it came from."""
        managed, self._managed = self._managed, None
        if managed is not None and managed.deleter:
            managed.deleter(ctypes.addressof(managed))


def take(tensor: object, where: str) -> Taken:
    """Take the memory of a DLPack capsule, or of an object with `__dlpack__`. Raises UsageError for what is neither.

    Memory that is not contiguous, or may not be written, is refused too. `where` names it in errors.
    """
    if type(tensor).__name__ == "PyCapsule":
        return Taken(tensor, where)
    export = getattr(tensor, "__dlpack__", None)
    if export is None:
        hint = "Give (address, bytes), a DLPack capsule, or an object with __dlpack__."
        raise UsageError(f"{type(tensor).__name__} is no memory that can be taken", where=where, hint=hint)
    try:
        capsule = export()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"{type(tensor).__name__} cannot be exported: {error}", where=where) from error
    return Taken(capsule, where)


def _span(managed: _Managed | _Versioned, where: str) -> Span:
    if isinstance(managed, _Versioned):
        if managed.major != _MAJOR:
            raise UsageError(f"DLPack version {managed.major}.{managed.minor} is not known, only {_MAJOR}.x", where=where)
        if managed.flags & _READ_ONLY:
            raise UsageError("it is read-only", where=where, hint="A worker writes its pools.")
    tensor = managed.tensor
    shape = [int(tensor.shape[i]) for i in range(tensor.ndim)]
    if tensor.strides and not _contiguous(shape, [int(tensor.strides[i]) for i in range(tensor.ndim)]):
        raise UsageError(f"a tensor of shape {shape} with gaps or in another order", where=where, hint="Give a contiguous one.")
    size = math.prod(shape) * tensor.bits * tensor.lanes // 8
    return Span((tensor.data or 0) + int(tensor.byte_offset), size, (int(tensor.device_type), int(tensor.device_id)))


def _contiguous(shape: list[int], strides: list[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
