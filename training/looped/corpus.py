"""From documents to a corpus: cleaned, without repetitions, cut into parts, some of them held out."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

PART = 12_000
"""Characters after which a document is cut, at the next paragraph; parts are held out one by one."""
HELD_OUT = 0.025
"""Share of parts held out."""
_LEAST = 300  # characters below which a document says too little to be worth its place
_UNIQUE = 60  # characters from which a paragraph is kept only where it is first met
_FREQUENT = 0.05  # share of a source's documents from which a shorter paragraph is boilerplate
_FEW = 12


@dataclass(frozen=True)
class Part:
    """A piece of a document; `name` is `package/document#number`."""

    name: str
    text: str
    quotable: bool

    @property
    def held_out(self) -> bool:
        """Decided by a digest of the name, so that it stays so whatever else the corpus holds."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big") < HELD_OUT * 2**32


class Corpus:
    """Collects parts; paragraphs already met are dropped, which also keeps held-out text out of the training text."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._seen: set[bytes] = set()

    def add(self, package: str, documents: Iterable[tuple[str, str]], quotable: bool) -> int:
        """Add a package's documents, (name, text) each; the number of characters kept."""
        split = [(name, _paragraphs(text)) for name, text in documents]
        boilerplate = _boilerplate([paragraphs for _, paragraphs in split])
        before = len(self.parts)
        for name, paragraphs in split:
            kept = [p for p in paragraphs if p not in boilerplate and self._first(p)]
            if sum(map(len, kept)) >= _LEAST and _english(kept):
                pieces = enumerate(_pieces(kept))
                self.parts += [Part(f"{package}/{name}#{number}", text, quotable) for number, text in pieces]
        return sum(len(part.text) for part in self.parts[before:])

    def _first(self, paragraph: str) -> bool:
        if len(paragraph) < _UNIQUE:
            return True
        digest = hashlib.blake2b(" ".join(paragraph.split()).encode(), digest_size=12).digest()
        new = digest not in self._seen
        self._seen.add(digest)
        return new


def _paragraphs(text: str) -> list[str]:
    clean = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text.replace("\ufffd", ""))
    lines = "\n".join(line.rstrip() for line in clean.split("\n"))
    return [p.strip("\n") for p in re.split(r"\n{2,}", lines) if p.strip()]


def _boilerplate(documents: list[list[str]]) -> set[str]:
    met = Counter(paragraph for paragraphs in documents for paragraph in set(paragraphs) if 8 <= len(paragraph) < _UNIQUE)
    limit = max(_FEW, _FREQUENT * len(documents))
    return {paragraph for paragraph, times in met.items() if times > limit}


def _english(paragraphs: list[str]) -> bool:
    text = "".join(paragraphs)
    return sum(c > "\u024f" and not "\u2010" <= c <= "\u2030" for c in text) < 0.02 * len(text)


def _pieces(paragraphs: list[str]) -> list[str]:
    pieces: list[str] = []
    current: list[str] = []
    for paragraph in paragraphs:
        current.append(paragraph)
        if sum(map(len, current)) >= PART:
            pieces.append("\n\n".join(current))
            current = []
    if sum(map(len, current)) >= _LEAST or not pieces:
        pieces.append("\n\n".join(current))
    elif current:
        pieces[-1] += "\n\n" + "\n\n".join(current)
    return pieces
