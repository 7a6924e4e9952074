"""What DLPack capsules of other libraries say of their memory, and that it is let go once."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from ouro_build.artifacts.errors import UsageError
from ouro_build.runtime import dlpack
from ouro_build.runtime.dlpack import take

CPU = (1, 0)


class Owned(np.ndarray):
    """An array whose end can be seen."""


def owned(size: int) -> Owned:
    return np.arange(size, dtype=np.float32).view(Owned)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32, torch.int64])
def test_a_torch_tensor(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5, dtype=dtype)
    taken = take(tensor, "here")
    assert taken.span == (tensor.data_ptr(), tensor.nbytes, CPU)
    taken.release()


def test_part_of_a_tensor_begins_where_it_does() -> None:
    tensor = torch.zeros(64, dtype=torch.float32)[16:32]
    taken = take(tensor, "here")
    assert taken.span == (tensor.data_ptr(), 64, CPU)
    taken.release()


def test_a_numpy_array_lives_until_it_is_released() -> None:
    array = owned(10)
    address, gone = array.ctypes.data, weakref.ref(array)
    taken = take(array, "here")
    del array
    gc.collect()
    assert gone() is not None
    assert taken.span == (address, 40, CPU)
    assert (np.ctypeslib.as_array((ctypes.c_float * 10).from_address(address)) == np.arange(10)).all()
    taken.release()
    gc.collect()
    assert gone() is None
    taken.release()


def test_a_capsule_can_be_taken_once() -> None:
    capsule = owned(4).__dlpack__()
    taken = take(capsule, "here")
    with pytest.raises(UsageError, match="here: a capsule named 'used_dltensor' holds no DLPack tensor"):
        take(capsule, "here")
    taken.release()
    del capsule  # its own end must not let the tensor go a second time
    gc.collect()


def test_a_capsule_of_version_1() -> None:
    tensor = torch.zeros(7, dtype=torch.int32)
    try:
        capsule = tensor.__dlpack__(max_version=(1, 0))
    except TypeError:
        pytest.skip("this torch makes no capsules of version 1")
    if "versioned" not in repr(capsule):
        pytest.skip("this torch makes no capsules of version 1")
    taken = take(capsule, "here")
    assert taken.span == (tensor.data_ptr(), 28, CPU)
    taken.release()


@pytest.mark.parametrize(("major", "flags", "what"), [(2, 0, r"version 2\.3 is not known"), (1, 1, "read-only")])
def test_versioned_tensors_that_cannot_be_used(major: int, flags: int, what: str) -> None:
    managed = dlpack._Versioned(major=major, minor=3, flags=flags)
    new: Any = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    name = ctypes.c_char_p(b"dltensor_versioned")
    capsule = new(ctypes.addressof(managed), name, None)
    with pytest.raises(UsageError, match=what):
        take(capsule, "here")
    del capsule


@pytest.mark.parametrize("tensor", [torch.zeros(4, 4).t(), torch.zeros(8)[::2], torch.zeros(4, 4)[:, :2]])
def test_tensors_with_gaps_or_in_another_order_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="with gaps or in another order"):
        take(tensor, "here")


def test_dimensions_of_one_may_have_any_stride() -> None:
    tensor = torch.zeros(4, 8)[:, None, :].transpose(0, 1)
    taken = take(tensor, "here")
    assert taken.span.bytes == 128
    taken.release()


@pytest.mark.parametrize("value", [7, "memory", bytearray(8), None])
def test_what_is_no_memory_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match=rf"here: {type(value).__name__} is no memory"):
        take(value, "here")


def test_why_a_tensor_cannot_be_exported_is_told() -> None:
    with pytest.raises(UsageError, match="Parameter cannot be exported: "):
        take(torch.nn.Parameter(torch.zeros(3)), "here")
