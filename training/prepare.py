"""Gathers the text, trains the tokenizer on it and writes both as tokens: what `train.py` needs, in one folder.

python training/prepare.py --cache ~/.cache/looped-text --data DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from looped.corpus import Corpus, Part
from looped.sources import SOURCES, documents
from looped.tokenizer import END, train
from rich.console import Console
from tokenizers import Tokenizer

_SEED = 20
_NOTE = """# Where the model's text comes from

The documents in these packages of Debian main, fetched with `apt-get download` and unpacked. Each package's
`/usr/share/doc/PACKAGE/copyright` holds its terms in full and every holder's name.

| package | version | licence of the text | copyright | M characters used |
|---|---|---|---|---|
"""
_LEAST_TOKENS = 1024  # of a stored held-out text: one full context


def main() -> None:
    """Write `tokenizer.json`, `train.npz`, `heldout.npz`, `quotable.json` and `SOURCES.md` into `--data`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="where Debian packages are kept, outside the repository")
    parser.add_argument("--data", type=Path, required=True, help="the folder to write")
    options = parser.parse_args()
    options.data.mkdir(parents=True, exist_ok=True)
    corpus, note = gather(options.cache)
    held = [part for part in corpus.parts if part.held_out]
    kept = [part for part in corpus.parts if not part.held_out]
    tokenizer = train(part.text for part in kept)
    tokenizer.save(str(options.data / "tokenizer.json"), pretty=False)
    np.savez_compressed(options.data / "train.npz", tokens=encode(tokenizer, kept))
    np.savez_compressed(options.data / "heldout.npz", tokens=encode(tokenizer, held))
    texts = {part.name: part.text for part in held if part.quotable}
    quotable = {name: ids.ids for name, ids in zip(texts, tokenizer.encode_batch(list(texts.values())), strict=True)}
    (options.data / "quotable.json").write_text(
        json.dumps({k: v[:_LEAST_TOKENS] for k, v in quotable.items() if len(v) >= _LEAST_TOKENS})
    )
    (options.data / "SOURCES.md").write_text(note, encoding="utf-8")


def gather(cache: Path) -> tuple[Corpus, str]:
    """The corpus of all sources, and the note that lists them."""
    console, corpus = Console(stderr=True), Corpus()
    rows = []
    for source in SOURCES:
        package, texts = documents(source, cache)
        size = corpus.add(source.package, texts, source.quotable)
        console.print(f"{source.package:24} {package.version:24} {len(texts):5} documents {size / 1e6:6.2f} M characters")
        rows.append(f"| {source.package} | {package.version} | {source.terms} | {source.holder} | {size / 1e6:.2f} |")
    return corpus, _NOTE + "\n".join(rows) + "\n"


def encode(tokenizer: Tokenizer, parts: list[Part]) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """All parts in a seeded order, each after an end-of-text token."""
    end = tokenizer.token_to_id(END)
    order = np.random.default_rng(_SEED).permutation(len(parts))
    encoded = tokenizer.encode_batch([parts[i].text for i in order])
    return np.concatenate([np.array([end, *one.ids], np.uint16) for one in encoded])


if __name__ == "__main__":
    main()
