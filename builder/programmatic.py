"""Proves from an image's PTX that it may start beside its predecessors.

The rule: before its wait a kernel reads only weights and writes nothing, and every program of its grid waits before it exits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

_WAIT = "griddepcontrol.wait"
_ANY = "griddepcontrol"
_REGISTER = re.compile(r"%[A-Za-z_]\w*")
_PARAMETER = re.compile(r"\[\s*\w+_param_(\d+)")
_SKIPPED = re.compile(r"(//.*)|(\.loc\b.*)")
# Leaving the straight line: what follows would not be reached by every program.
_LEAVES = ("bra", "brx", "ret", "exit", "call", "trap")
# Reads and writes of memory that other programs see. Shared memory is a program's own.
_READS = ("ld", "ldu", "cp", "prefetch", "tex", "suld")
_WRITES = ("st", "atom", "red", "sust", "multimem")
_OWN = (".shared", ".param", ".local", ".const")


def violations(ptx: str, weights: Collection[int]) -> list[str]:
    """What is wrong with a kernel that is declared programmatic; `weights` are its parameters that point to weights."""
    before, found = [], False
    for line in _instructions(ptx):
        if line.startswith(_WAIT):
            found = True
            break
        before.append(line)
    if not found:
        return ["it has no wait that every program reaches"]
    return list(_early(before, weights))


def mentions(ptx: str) -> bool:
    """Whether the kernel takes part in programmatic dependencies at all."""
    return any(_ANY in line for line in _instructions(ptx))


def _instructions(ptx: str) -> Iterator[str]:
    """The instructions of the kernel's body, one a string, without comments, labels and debug information."""
    body = ptx.partition(".entry")[2].partition("{")[2]
    text = "\n".join(_SKIPPED.sub("", line) for line in body.splitlines())
    for statement in text.split(";"):
        line = " ".join(statement.split())
        while (label := re.match(r"[$\w]+:\s*", line)) is not None:
            line = line[label.end() :]
        if line and not line.startswith((".", "}", "{ .")):
            yield line


def _early(lines: list[str], weights: Collection[int]) -> Iterator[str]:
    """Violations among the instructions before the wait."""
    origins: dict[str, frozenset[int]] = {}
    for line in lines:
        unguarded = re.sub(r"^@!?%\w+\s+", "", line)
        opcode, _, operands = unguarded.partition(" ")
        name = opcode.split(".")[0]
        registers = _REGISTER.findall(operands)
        if name in _LEAVES:
            yield f"a program may leave before the wait: {line}"
        shared = any(space in opcode for space in _OWN) and name != "cp"
        if (name in _WRITES and not shared) or ".global.shared" in opcode:
            yield f"it writes before the wait: {line}"
        parameter = _PARAMETER.search(operands)
        if name == "ld" and ".param" in opcode and parameter is not None:
            _set(origins, registers, frozenset([int(parameter[1])]))
        elif name in _READS and not shared:
            # A copy's source is its last address; one without addresses only orders others.
            sources = _sources(origins, _REGISTER.findall(operands[operands.rfind("[") :]))
            if "[" in operands and (not sources or not sources <= frozenset(weights)):
                yield f"it reads what is not a weight before the wait: {line}"
            _set(origins, _results(operands), frozenset())
        else:
            results = _results(operands)
            _set(origins, results, _sources(origins, registers[len(results) :]))


def _results(operands: str) -> list[str]:
    """The registers an instruction writes: its first operand, a vector perhaps."""
    head = operands[: operands.find("}")] if operands.startswith("{") else operands.partition(",")[0]
    return _REGISTER.findall(head)


def _sources(origins: dict[str, frozenset[int]], registers: list[str]) -> frozenset[int]:
    return frozenset().union(*(origins.get(r, frozenset()) for r in registers))


def _set(origins: dict[str, frozenset[int]], registers: list[str], found: frozenset[int]) -> None:
    for register in registers:
        origins[register] = found
