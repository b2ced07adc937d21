"""Vocabularies of characters: tokens have the text that transformers gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Wav2Vec2CTCTokenizer

from quire.rendering.tokenizer import Tokenizer, TokenizerError
from tests.support.ctc import CHARACTERS

HELLO = [CHARACTERS.index(char) for char in "HE"]
HELLO += [CHARACTERS.index("L"), 0, CHARACTERS.index("L"), CHARACTERS.index("O"), 4, CHARACTERS.index("W")]


def write(folder: Path, vocabulary: Any = None, config: Any = None) -> Path:
    known = {text: token for token, text in enumerate(CHARACTERS)} if vocabulary is None else vocabulary
    (folder / "vocab.json").write_text(json.dumps(known))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return folder


@pytest.mark.parametrize("lower", [False, True])
def test_text_is_that_of_transformers(tmp_path: Path, lower: bool) -> None:
    """Doubled letters stay, since the front end has removed repetitions and blanks already."""
    write(tmp_path, config={"do_lower_case": lower})
    reference = Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"), do_lower_case=lower)
    tokenizer = Tokenizer.load(tmp_path)
    shown = [token for token in HELLO if token != 0]
    text = tokenizer.decode(shown, skip_special_tokens=True)
    assert text == reference.decode(HELLO)
    assert text == ("hello w" if lower else "HELLO W")
    assert b"".join(map(tokenizer.token_bytes, shown)).decode() == text
    assert {"<pad>", "<s>", "</s>", "<unk>"} == set(tokenizer.special_tokens)
    assert tokenizer.vocab_size == len(CHARACTERS)
    assert tokenizer.decode([0, 1, *shown, 2], skip_special_tokens=True) == text


def test_a_folder_that_transformers_has_saved(tmp_path: Path) -> None:
    write(tmp_path)
    Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"), word_delimiter_token="|").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode([token for token in HELLO if token], skip_special_tokens=True) == "HELLO W"
    assert tokenizer.special_tokens["<pad>"] == 0


def test_other_delimiters_and_added_tokens(tmp_path: Path) -> None:
    config = {
        "word_delimiter_token": {"content": "_"},
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "added_tokens_decoder": {"5": {"content": "<s>", "special": True}, "6": {"content": "ch", "special": False}},
    }
    write(tmp_path, {"a": 0, "_": 1, "b": 2, "[UNK]": 3, "[PAD]": 4}, config)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode([0, 1, 2, 6, 5, 4, 3], skip_special_tokens=True) == "a bch"
    assert tokenizer.special_tokens == {"[UNK]": 3, "[PAD]": 4, "<s>": 5}


@pytest.mark.parametrize("texts", ["Aa", "aA"])
def test_of_tokens_with_one_text_in_lower_case_each_keeps_one(tmp_path: Path, texts: str) -> None:
    write(tmp_path, {texts[0]: 0, texts[1]: 1, "|": 2, "<pad>": 3, "B": 4}, {"do_lower_case": True})
    tokenizer = Tokenizer.load(tmp_path)
    assert [tokenizer.token_text(token) for token in (0, 1, 2, 4)] == [texts[0], texts[1], " ", "b"]
    assert tokenizer.separates_words


@pytest.mark.parametrize(
    ("vocabulary", "text"),
    [
        ({"eng": {"a": 0}, "deu": {"a": 0}}, "several languages"),
        (["a"], "must contain an object"),
        ({"a": "0"}, "ids"),
        ({"a": -1}, "ids"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, vocabulary: Any, text: str) -> None:
    with pytest.raises(TokenizerError, match=text):
        Tokenizer.load(write(tmp_path, vocabulary))


def test_other_vocabularies_are_not_taken_for_characters(tmp_path: Path) -> None:
    """A byte-level BPE has merges beside its vocabulary."""
    write(tmp_path, {"a": 0})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
