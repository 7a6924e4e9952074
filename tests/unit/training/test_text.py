"""Text is cleaned, repeated paragraphs are dropped, and any text survives the tokenizer."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from looped.books import r_books
from looped.corpus import PART, Corpus
from looped.markup import html_text
from looped.tokenizer import END, train

_TOKENIZER = train(["the quick brown fox jumps over the lazy dog\n    return 1234\n"] * 50, vocabulary=280)


def test_html_keeps_text_and_code_and_leaves_navigation_out() -> None:
    page = """<html><head><title>t</title></head><body><nav><div>go <div>away</div></div></nav>
    <h2><a class="permalink">Title</a><a class="headerlink" href="#x">¶</a></h2><h3></h3><p>One
    two <b>three</b>.</p><div class="sphinxsidebar"><div>menu</div> more</div>
    <ul><li><p>a</p></li><li>b</li></ul>
    <pre>if x:\n    y = 1\n\n\n\nz</pre>
    <table><tr><td>p</td><td><p>q</p></td></tr>
    <tr><td>r</td><td>s</td></tr></table></body></html>"""
    expected = "## Title\n\nOne two three.\n\n- a\n- b\n\nif x:\n    y = 1\n\nz\n\np | q\nr | s"
    assert html_text(page) == expected


def test_repeated_paragraphs_are_kept_once_and_boilerplate_never() -> None:
    corpus = Corpus()
    shared = "This long paragraph stands in every one of the documents, so that it must be kept only once. " * 2
    documents = [
        (f"d{i}", f"Home | Next page\n\n{shared}\n\n{f'Words of document {i} alone, {i} times. ' * 20}") for i in range(30)
    ]
    corpus.add("p", documents, quotable=True)
    text = "\n".join(part.text for part in corpus.parts)
    assert text.count(shared.strip()) == 1
    assert "Next page" not in text
    assert {part.name for part in corpus.parts} == {f"p/d{i}#0" for i in range(30)}


def test_long_documents_are_cut_and_few_parts_held_out() -> None:
    corpus = Corpus()
    corpus.add("p", [("d", "\n\n".join(f"Paragraph number {i} of a long book. " * 10 for i in range(20_000)))], quotable=True)
    assert all(len(part.text) < 1.2 * PART for part in corpus.parts)
    assert 0.01 < sum(part.held_out for part in corpus.parts) / len(corpus.parts) < 0.05


def test_r_books_reads_character_vectors(tmp_path: Path) -> None:
    lines = [b"EMMA", b"", b"By Jane Austen"]
    strings = b"".join(struct.pack(">II", 0x00040009, len(line)) + line for line in lines)
    raw = b"X\n" + struct.pack(">4I", 3, 0, 0, 5) + b"UTF-8" + struct.pack(">II", 16, len(lines)) + strings
    stream = zlib.compress(raw)
    (tmp_path / "Rdata.rdb").write_bytes((struct.pack(">I", len(raw)) + stream) * 2)
    assert list(r_books(tmp_path / "Rdata.rdb")) == ["EMMA\n\nBy Jane Austen"] * 2


@settings(max_examples=200)
@given(st.text())
def test_tokenizer_gives_any_text_back(text: str) -> None:
    assert _TOKENIZER.decode(_TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_end_of_text_is_the_first_entry() -> None:
    assert _TOKENIZER.token_to_id(END) == 0
    assert _TOKENIZER.get_vocab_size() == 280
