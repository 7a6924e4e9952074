"""Proves from an image's PTX that it may start beside its predecessors.

The rule: before its wait a kernel reads only weights and what it declares as `early`, and writes nothing; and every program of
its grid waits before it exits. The L1 cache may hold what was there before launches that have ended wrote `early`: it is read
past that cache, or after a load that acquires, which leaves nothing older there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

_WAIT = "griddepcontrol.wait"
_ANY = "griddepcontrol"
# Inline assembly may name registers of its own, without a %.
_REGISTER = re.compile(r"(?<![\w.%$])[%$]?[A-Za-z_]\w*")
_GUARD = re.compile(r"@!?[%$]?\w+\s+")
_OPENING = re.compile(r"([{}]|[$%\w]+:)\s*")  # a scope's brace or a label: neither is a part of what follows it
_PARAMETER = re.compile(r"\[\s*\w+_param_(\d+)")
_SKIPPED = re.compile(r"(//.*)|(\.loc\b.*)")
# Leaving the straight line: what follows would not be reached by every program.
_LEAVES = ("bra", "brx", "ret", "exit", "call", "trap")
# Reads and writes of memory that other programs see. Shared memory is a program's own.
_READS = ("ld", "ldu", "cp", "prefetch", "tex", "suld")
_WRITES = ("st", "atom", "red", "sust", "multimem")
_OWN = (".shared", ".param", ".local", ".const")

_Origins = dict[str, frozenset[int]]
"""The parameters that a register's value comes from, and under `_STORED` those of all that was put into memory of its own."""
_STORED = ""


class _Pointers(NamedTuple):
    """The parameters that are pointers, by when they may be read."""

    weights: frozenset[int]
    early: frozenset[int]
    late: frozenset[int]


def violations(ptx: str, weights: Collection[int], early: Collection[int], late: Collection[int]) -> list[str]:
    """What is wrong with a kernel that is declared programmatic: of its parameters that are pointers it may read `weights`
    before it waits, and past the L1 cache or after an acquiring load `early`, but not `late`."""
    before, found = [], False
    for line in _instructions(ptx):
        if line.startswith(_WAIT):
            found = True
            break
        before.append(line)
    if not found:
        return ["it has no wait that every program reaches"]
    return list(_early(before, _Pointers(frozenset(weights), frozenset(early), frozenset(late))))


def mentions(ptx: str) -> bool:
    """Whether the kernel takes part in programmatic dependencies at all."""
    return any(_ANY in line for line in _instructions(ptx))


def _instructions(ptx: str) -> Iterator[str]:
    """The instructions of the kernel's body, one a string, without comments, labels, braces and debug information."""
    body = ptx.partition(".entry")[2].partition("{")[2]
    text = "\n".join(_SKIPPED.sub("", line) for line in body.splitlines())
    for statement in text.split(";"):
        line = " ".join(statement.split())
        while (opening := _OPENING.match(line)) is not None:
            line = line[opening.end() :]
        if line and not line.startswith("."):
            yield line


def _early(lines: list[str], pointers: _Pointers) -> Iterator[str]:
    """Violations among the instructions before the wait."""
    origins: _Origins = {}
    fresh = False  # the L1 cache holds nothing older than what launches wrote that have ended
    for line in lines:
        unguarded = _GUARD.sub("", line, count=1) if line.startswith("@") else line
        opcode, _, operands = unguarded.partition(" ")
        name = opcode.split(".")[0]
        breaches = _breaches(origins, name, opcode, operands, pointers, fresh)
        yield from (f"{what} before the wait: {line}" for what in breaches)
        # A guarded one may acquire nothing.
        fresh = fresh or (unguarded == line and _acquires(opcode) and bool(_read_from(origins, operands) & pointers.early))
        results, found = _data_flow(origins, name, opcode, operands)
        for register in results:
            # Where the guard is false, the register keeps what it held.
            origins[register] = found | origins.get(register, frozenset()) if unguarded != line else found


def _breaches(origins: _Origins, name: str, opcode: str, operands: str, pointers: _Pointers, fresh: bool) -> Iterator[str]:
    """What an instruction does that may not be done."""
    own = _own(name, opcode)
    if name in _LEAVES:
        yield "a program may leave"
    if (name in _WRITES and not own) or ".global.shared" in opcode:
        yield "it writes"
    elif "[" in operands and not own:
        sources = _read_from(origins, operands)
        if name not in _READS:
            yield "it uses memory in a way that is not known"
        elif not sources & (pointers.weights | pointers.early) or sources & pointers.late:
            yield "it reads what is not early"
        elif sources & pointers.early and not _past_l1(opcode) and not (fresh and _coherent(opcode)):
            yield "it reads through the L1 cache what launches wrote"


def _data_flow(origins: _Origins, name: str, opcode: str, operands: str) -> tuple[list[str], frozenset[int]]:
    """The registers that an instruction writes, and the parameters that their values come from."""
    results, parameter = _results(operands), _PARAMETER.search(operands)
    if name == "ld" and ".param" in opcode and parameter is not None:
        return results, frozenset([int(parameter[1])])
    registers, own = _REGISTER.findall(operands), _own(name, opcode)
    if name in _READS and not own:
        return [] if operands.startswith("[") else results, frozenset()
    if operands.startswith("["):
        return [_STORED], _sources(origins, [_STORED, *registers])
    return results, _sources(origins, registers[len(results) :] + [_STORED] * own)


def _past_l1(opcode: str) -> bool:
    """Whether a read does not ask the L1 cache."""
    return "cg" in opcode.split(".") or _acquires(opcode)


def _acquires(opcode: str) -> bool:
    """Whether an instruction is a load after which the L1 cache holds nothing older than what it found."""
    name, *parts = opcode.split(".")
    return name == "ld" and {"acquire", "global"} <= {*parts} and not {"gpu", "sys"}.isdisjoint(parts)


def _coherent(opcode: str) -> bool:
    """Whether a read is one that acquiring orders: textures and what is said not to change are cached apart."""
    name, *parts = opcode.split(".")
    return name in ("ld", "cp") and "nc" not in parts


def _read_from(origins: _Origins, operands: str) -> frozenset[int]:
    """The parameters that an address comes from: a copy's source is its last; one without addresses only orders others."""
    return _sources(origins, _REGISTER.findall(operands[operands.rfind("[") :]))


def _own(name: str, opcode: str) -> bool:
    """Whether an instruction uses memory that other launches do not see."""
    return any(space in opcode for space in _OWN) and name != "cp"


def _results(operands: str) -> list[str]:
    """The registers an instruction writes: its first operand, a vector perhaps."""
    head = operands[: operands.find("}")] if operands.startswith("{") else operands.partition(",")[0]
    return _REGISTER.findall(head)


def _sources(origins: _Origins, registers: list[str]) -> frozenset[int]:
    return frozenset().union(*(origins.get(r, frozenset()) for r in registers))
