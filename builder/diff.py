"""What differs between two artifacts, field by field and file by file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.text import Text

from ouro_build.artifacts.reader import Artifact
from ouro_build.builder.output import stack, table

_LABELS = ("name", "path", "part", "pool", "key")
_SHOWN = 60
_WIDTH = 48


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """A field, or a file by its digest, in both artifacts; None where one has none."""

    what: str
    a: Any
    b: Any


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Two artifacts compared. Fields are those of the manifest and of the plan indices."""

    equal: bool
    identities: tuple[str, str]
    fields: tuple[Changed, ...]
    files: tuple[Changed, ...]


def difference(a: Artifact, b: Artifact) -> Difference:
    """Compare two artifacts. Raises ArtifactError if the plans of one are damaged."""
    files = [{f.path: f.sha256 for f in x.manifest.files} for x in (a, b)]
    return Difference(
        equal=a.identity == b.identity,
        identities=(a.identity, b.identity),
        fields=_changed(_fields(a), _fields(b)),
        files=_changed(*files),
    )


def draw(found: Difference) -> RenderableType:
    """The difference for people; long lists are cut, and say so."""
    if found.equal:
        return Text(f"equal: both are {found.identities[0]}")
    parts: list[RenderableType] = [Text(f"a  {found.identities[0]}\nb  {found.identities[1]}")]
    for title, changed in (("fields", found.fields), ("files", found.files)):
        if changed:
            rows = [(c.what, _cut(c.a), _cut(c.b)) for c in changed[:_SHOWN]]
            parts.append(table(f"{title}: {len(changed)} differ", (title, "a", "b"), rows))
        if len(changed) > _SHOWN:
            parts.append(Text(f"… {len(changed) - _SHOWN} more {title}; --json lists them all"))
    return stack(*parts)


def _fields(artifact: Artifact) -> dict[str, Any]:
    manifest = msgspec.to_builtins(artifact.manifest)
    del manifest["files"], manifest["seal"]  # compared as files; follows from the rest
    found = dict(_flat(manifest, ""))
    for target in artifact.manifest.targets:
        index, _ = artifact.plans(target)
        found.update(_flat(msgspec.to_builtins(index), target.plan_index + ":"))
    return found


def _flat(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Every leaf with its path; members of lists go by their name where they have one of their own, else by their place."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{at}.{name}" if at and not at.endswith(":") else at + name)
    elif isinstance(value, list | tuple) and any(isinstance(v, dict | list | tuple) for v in value):
        labels = [_label(inner, i) for i, inner in enumerate(value)]
        counts = Counter(labels)
        for i, (inner, label) in enumerate(zip(value, labels, strict=True)):
            yield from _flat(inner, f"{at}[{label}]" if counts[label] == 1 else f"{at}[{label}, {i}]")
    else:
        yield at, value


def _label(value: Any, place: int) -> str:
    found = next((value[name] for name in _LABELS if name in value), place) if isinstance(value, dict) else place
    if isinstance(found, dict):
        return str(found.get("name") or "/".join(str(v) for v in found.values() if v != ""))
    return str(found)


def _changed(a: dict[str, Any], b: dict[str, Any]) -> tuple[Changed, ...]:
    names = dict.fromkeys((*a, *b))
    return tuple(Changed(what=n, a=a.get(n), b=b.get(n)) for n in names if a.get(n) != b.get(n))


def _cut(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
