"""What a cubin says about the kernel in it, read from the ELF file: no driver and no tool is needed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ouro_build.artifacts.errors import CompileError

# Attributes of the .nv.info sections, as `cuobjdump -elf` names them.
_FRAME_SIZE = 0x11
_PARAMETER = 0x17
_REGISTERS = 0x2F
_SIZED = 4  # format of an attribute that carries its length; the others carry two bytes

_SECTION = struct.Struct("<IIQQQQIIQQ")
_NO_BITS = 8


@dataclass(frozen=True)
class CubinInfo:
    """`registers` a thread, `stack` bytes a thread (spilled registers), and (offset, size) of every parameter in bytes."""

    registers: int
    stack: int
    parameters: tuple[tuple[int, int], ...]


def read_cubin(cubin: bytes, function: str) -> CubinInfo:
    """Read the record of `function`, the only kernel in `cubin`. Raises CompileError if the file is not as expected."""
    try:
        sections = dict(_sections(cubin))
        common = tuple(_attributes(sections[".nv.info"]))
        own = tuple(_attributes(sections[f".nv.info.{function}"]))
        return CubinInfo(_per_function(common, _REGISTERS), _per_function(common, _FRAME_SIZE), _parameters(own))
    except (KeyError, IndexError, ValueError, struct.error) as error:
        raise CompileError(f"the compiler's output cannot be read: {error!r}", where=function) from error


def _sections(raw: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, contents) of every section of a 64-bit little-endian ELF file."""
    if raw[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (start,) = struct.unpack_from("<Q", raw, 40)
    size, count, names_at = struct.unpack_from("<HHH", raw, 58)
    headers = [_SECTION.unpack_from(raw, start + i * size) for i in range(count)]
    names = raw[headers[names_at][4] :]
    for name, kind, _, _, offset, length, *_ in headers:
        contents = b"" if kind == _NO_BITS else raw[offset : offset + length]
        yield names[name : names.index(b"\0", name)].decode(), contents


def _attributes(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) pairs of an .nv.info section."""
    at = 0
    while at < len(raw):
        form, attribute, length = struct.unpack_from("<BBH", raw, at)
        at += 4
        if form == _SIZED:
            yield attribute, raw[at : at + length]
            at += length
        else:
            yield attribute, length.to_bytes(2, "little")


def _per_function(attributes: tuple[tuple[int, bytes], ...], wanted: int) -> int:
    """The largest value of an attribute that is given as (symbol, value) for every function of the file."""
    return max(int(struct.unpack("<II", value)[1]) for attribute, value in attributes if attribute == wanted)


def _parameters(attributes: tuple[tuple[int, bytes], ...]) -> tuple[tuple[int, int], ...]:
    found = {}
    for attribute, value in attributes:
        if attribute == _PARAMETER:
            _, ordinal, offset, flags = struct.unpack("<IHHI", value)
            found[ordinal] = (offset, flags >> 18)
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"parameters {sorted(found)} are not numbered one after another")
    return tuple(found[i] for i in range(len(found)))
