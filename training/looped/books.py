"""Readers of the containers in which Debian packages carry whole books."""

from __future__ import annotations

import re
import struct
import subprocess
import zlib
from collections.abc import Iterator
from html import unescape
from pathlib import Path

_CHARSXP = 9
_STRSXP = 16


def r_books(database: Path) -> Iterator[str]:
    """The texts in an R package's lazy-load data: each character vector there is a book, its elements the book's lines."""
    raw, at = database.read_bytes(), 0
    while at < len(raw):
        inflate = zlib.decompressobj()
        data = inflate.decompress(raw[at + 4 :])  # four bytes of length come before each zlib stream
        at = len(raw) - len(inflate.unused_data)
        yield "\n".join(_strings(data))


def _strings(data: bytes) -> Iterator[str]:
    """The elements of the one character vector of a serialised R object."""
    start = data.index(struct.pack(">I", _STRSXP), 14)
    (count,) = struct.unpack_from(">I", data, start + 4)
    at = start + 8
    for _ in range(count):
        flags, size = struct.unpack_from(">Ii", data, at)
        if flags & 0xFF != _CHARSXP:
            raise ValueError(f"byte {at}: type {flags & 0xFF} where a string was expected")
        at += 8 + max(size, 0)
        yield data[at - max(size, 0) : at].decode("utf-8", "replace")


def sword_books(folder: Path) -> Iterator[str]:
    """The books of a SWORD module stored as compressed text, one block a book, without notes and word numbers."""
    for testament in ("ot", "nt"):
        index, blocks = (folder / f"{testament}.bzs").read_bytes(), (folder / f"{testament}.bzz").read_bytes()
        for offset, size, _ in struct.iter_unpack("<3I", index):
            if size:
                yield _osis_text(zlib.decompress(blocks[offset : offset + size]).decode("utf-8", "replace"))


def _osis_text(osis: str) -> str:
    text = re.sub(r"<note\b.*?</note>", " ", osis, flags=re.S)
    text = re.sub(r"<title\b[^>]*>(.*?)</title>", r"\n\n# \1\n\n", text, flags=re.S)
    text = re.sub(r'<chapter n="(\d+)"[^>]*>', r"\n\nChapter \1\n\n", text)
    text = re.sub(r'<(div [^>]*type="x-p"|lb|lg|l)\b[^>]*>', "\n\n", text)
    text = unescape(re.sub(r"<[^>]+>", "", text))
    return re.sub(r" +([,.;:!?])", r"\1", text)


def bible_chapters(program: Path, data: Path) -> Iterator[str]:
    """The King James Version, a chapter at a time, as `bible` prints it from the data folder `data`."""
    command = [str(program), "-p", f"{data}/", "-l1000", "gen1:1-rev22:21"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for chapter in re.split(r"\n(?=\S[^\n]* \d+\n\n)", text):
        yield re.sub(r"^ +", "", chapter.strip(), flags=re.M)
