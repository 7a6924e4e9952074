"""The Debian packages that the text comes from, and how the documents in each are read."""

from __future__ import annotations

import gzip
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from looped.books import bible_chapters, r_books, sword_books
from looped.debian import Package, unpack
from looped.markup import html_text

Documents = Iterator[tuple[str, str]]
"""Pairs of a name that is stable across machines and a document's text."""


@dataclass(frozen=True)
class Source:
    """Text of one package.

    `read` yields its documents, given the package and a function that unpacks helper packages. `holder` is whom the text's
    copyright names. `quotable` marks sources under permissive terms or in the public domain: only they are quoted in files
    that ship with the model.
    """

    package: str
    terms: str
    holder: str
    read: Callable[[Package, Callable[[str], Package]], Documents]
    quotable: bool = True


def _pages(folder: str, only: str = r".*\.html?", without: str = r"(?!)") -> Callable[..., Documents]:
    """A reader of the HTML pages below `folder` whose path there matches `only` whole and `without` nowhere."""

    def read(package: Package, _: Callable[[str], Package]) -> Documents:
        root = package.root / folder
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_file() and re.fullmatch(only, name) and not re.search(without, name):
                yield name, html_text(_text(path))

    return read


def _manual_pages(package: Package, helper: Callable[[str], Package]) -> Documents:
    mandoc = helper("mandoc").root / "usr/bin/mandoc"
    for path in sorted((package.root / "usr/share/man").glob("man*/*")):
        roff = _text(path)
        if path.is_symlink() or roff.startswith(".so "):
            continue  # another name of a page that is read under its own
        page = subprocess.run([mandoc, "-Thtml", "-Ofragment"], input=roff, capture_output=True, text=True, check=False)
        yield path.name.removesuffix(".gz"), html_text(page.stdout)


def _pod(package: Package, _: Callable[[str], Package]) -> Documents:
    for path in sorted(package.root.glob("usr/share/perl/*/pod/*.pod")):
        command = ["pod2text", "--width=100000", "--utf8", str(path)]
        yield path.name, subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _king_james(package: Package, helper: Callable[[str], Package]) -> Documents:
    program = helper("bible-kjv").root / "usr/bin/bible"
    for number, chapter in enumerate(bible_chapters(program, package.root / "usr/lib")):
        yield f"chapter-{number}", chapter


def _world_english(package: Package, _: Callable[[str], Package]) -> Documents:
    (folder,) = (package.root / "usr/share/sword/modules/texts/ztext").iterdir()
    yield from ((f"book-{number}", _unwrapped(book)) for number, book in enumerate(sword_books(folder)))


def _austen(package: Package, _: Callable[[str], Package]) -> Documents:
    (database,) = package.root.glob("usr/lib/R/site-library/*/data/Rdata.rdb")
    yield from ((f"novel-{number}", _unwrapped(book)) for number, book in enumerate(r_books(database)))


def _unwrapped(book: str) -> str:
    """One line a paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", book))


def _text(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8", "replace")


_NO_INDEX = r"(^|/)(genindex|search|_modules|_sources|_static|py-modindex|contents|copyright|license|ix|bookindex)"
_DOC = "usr/share/doc"

SOURCES = (
    Source(
        "python3.11-doc",
        "PSF-2.0",
        "Python Software Foundation",
        _pages(f"{_DOC}/python3.11/html", without=_NO_INDEX + "|whatsnew/changelog"),
    ),
    Source("perl-doc", "Artistic-1.0-Perl or GPL-1+", "Larry Wall and others", _pod),
    Source("manpages", "various free licences, page by page", "the authors named in each page", _manual_pages, quotable=False),
    Source(
        "manpages-dev", "various free licences, page by page", "the authors named in each page", _manual_pages, quotable=False
    ),
    Source("bible-kjv-text", "public domain", "none", _king_james),
    Source("sword-text-web", "public domain", "none", _world_english),
    Source("r-cran-janeaustenr", "public domain (novels), MIT (packaging)", "none (novels); Julia Silge (packaging)", _austen),
    Source(
        "postgresql-doc-15",
        "PostgreSQL",
        "PostgreSQL Global Development Group, Regents of the University of California",
        _pages(f"{_DOC}/postgresql-doc-15/html", without=_NO_INDEX + "|release|features"),
    ),
    Source(
        "sqlite3-doc", "public domain", "none", _pages(f"{_DOC}/sqlite3", without=_NO_INDEX + "|hlr|keyword_index|requirements")
    ),
    Source(
        "python-django-doc",
        "BSD-3-Clause",
        "Django Software Foundation and contributors",
        _pages(f"{_DOC}/python-django-doc/html", without=_NO_INDEX),
    ),
    Source(
        "python-sqlalchemy-doc",
        "MIT",
        "the SQLAlchemy authors and contributors",
        _pages(f"{_DOC}/python-sqlalchemy-doc/html", without=_NO_INDEX),
    ),
    Source("sphinx-doc", "BSD-2-Clause", "the Sphinx team", _pages(f"{_DOC}/sphinx-doc/html", without=_NO_INDEX)),
    Source(
        "apache2-doc",
        "Apache-2.0",
        "The Apache Software Foundation",
        _pages(f"{_DOC}/apache2-doc/manual/en", without=_NO_INDEX + "|quickreference|directives"),
    ),
    Source("nodejs-doc", "MIT", "Node.js contributors", _pages(f"{_DOC}/nodejs/api", without=_NO_INDEX + "|all.html")),
    Source(
        "llvm-15-doc",
        "Apache-2.0 with LLVM exception",
        "the LLVM contributors",
        _pages(f"{_DOC}/llvm-15-doc/html", without=_NO_INDEX + "|AMDGPU"),
    ),
    Source("cmake-doc", "BSD-3-Clause", "Kitware, Inc. and contributors", _pages(f"{_DOC}/cmake-data/html", without=_NO_INDEX)),
    Source("git-doc", "GPL-2", "Linus Torvalds and others", _pages(f"{_DOC}/git-doc", without="RelNotes"), quotable=False),
    Source(
        "debian-policy",
        "GPL-2+",
        "Ian Jackson, Christian Schwarz, David A. Morris and others",
        _pages(f"{_DOC}/debian-policy/policy.html", without=_NO_INDEX),
        quotable=False,
    ),
    Source(
        "developers-reference",
        "GPL-2+",
        "the Debian Developer's Reference authors",
        _pages("usr/share/developers-reference", without=_NO_INDEX),
        quotable=False,
    ),
    Source("debian-reference-en", "GPL-2+", "Osamu Aoki", _pages("usr/share/debian-reference"), quotable=False),
    Source(
        "debian-handbook",
        "CC-BY-SA-3.0 or GPL-2+",
        "Raphaël Hertzog, Roland Mas",
        _pages(f"{_DOC}/debian-handbook/html/en-US", without=_NO_INDEX),
        quotable=False,
    ),
)


def documents(source: Source, cache: Path) -> tuple[Package, list[tuple[str, str]]]:
    """The package of `source`, and its documents as (name, text); packages are kept below `cache`."""
    package = unpack(source.package, cache)
    return package, list(source.read(package, lambda name: unpack(name, cache)))
