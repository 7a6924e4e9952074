"""The text files that an artifact carries."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from ouro_build.artifacts.errors import CheckpointError, MissingExtraError
from ouro_build.builder.tokenizer_files import tokenizer_files
from tests.unit.artifacts.checkpoints import GOLDEN

WORDS = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "hello": 5, "world": 6}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(GOLDEN / "mha-fp32" / "config.json", tmp_path)
    return tmp_path


def with_tokenizer(folder: Path) -> bytes:
    tokenizer = Tokenizer(models.WordLevel(WORDS, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return (folder / "tokenizer.json").read_bytes()


def test_a_checkpoint_without_text(folder: Path) -> None:
    assert tokenizer_files(folder) == {"config.json": (folder / "config.json").read_bytes()}


def test_all_files_are_the_checkpoints_own(folder: Path) -> None:
    wanted = {"tokenizer.json": with_tokenizer(folder), "config.json": (folder / "config.json").read_bytes()}
    for name, text in (
        ("generation_config.json", '{"eos_token_id": 2}'),
        ("tokenizer_config.json", '{ "model_max_length": 10 }'),
        ("chat_template.jinja", "{{ messages }}"),
        ("chat_template.json", '{"chat_template": "x"}'),
    ):
        (folder / name).write_text(text)
        wanted[name] = text.encode()
    (folder / "README.md").write_text("not carried")
    found = tokenizer_files(folder)
    assert found == wanted
    assert list(found) == sorted(found)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("config.json", "_name_or_path"),
        ("tokenizer_config.json", "name_or_path"),
        ("tokenizer_config.json", "tokenizer_file"),
        ("tokenizer_config.json", "special_tokens_map_file"),
    ],
)
def test_no_folder_of_another_machine_is_carried(folder: Path, name: str, key: str) -> None:
    with_tokenizer(folder)
    kept = json.loads((folder / "config.json").read_bytes())
    (folder / name).write_text(json.dumps({**kept, key: "/home/someone/model"}))
    raw = tokenizer_files(folder)[name]
    assert b"/home/someone" not in raw
    assert json.loads(raw) == kept


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "chat_template.json", "tokenizer.json"])
def test_damaged_files(folder: Path, name: str) -> None:
    (folder / name).write_text('{"half":')
    with pytest.raises(CheckpointError, match=name):
        tokenizer_files(folder)


def other_tokenizer(folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')


def test_other_tokenizers_are_converted(folder: Path) -> None:
    pytest.importorskip("transformers")
    other_tokenizer(folder)
    found = tokenizer_files(folder)["tokenizer.json"]
    assert Tokenizer.from_buffer(found).encode("hello world", add_special_tokens=False).ids == [5, 6]
    assert tokenizer_files(folder)["tokenizer.json"] == found


def test_converting_needs_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_tokenizer(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ouro-build\[build\]'"):
        tokenizer_files(folder)


def test_a_tokenizer_that_cannot_be_converted(folder: Path) -> None:
    pytest.importorskip("transformers")
    (folder / "tokenizer.model").write_bytes(b"\x00not a model")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(CheckpointError, match=r"no tokenizer.json can be made of this tokenizer"):
        tokenizer_files(folder)
