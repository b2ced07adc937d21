"""Mistral's own tokenizer files: tokens are those of merging by rank, and broken files are refused."""

from __future__ import annotations

import base64
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from quire.rendering.tokenizer import Tokenizer, TokenizerError

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = ("th", "the", "in", "ing", " t", " th", " the", "er", "re", "ther", "gi", "é", "日", "nging")
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]"]
COUNT = 8  # special tokens


def content(**changes: Any) -> dict[str, Any]:
    """A small tekken.json; one word more than there is room for."""
    words = [bytes([byte]) for byte in range(256)]
    words += [word.encode() for word in WORDS] + [b"beyond"]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(word).decode()} for rank, word in enumerate(words)]
    config = {"pattern": PATTERN, "default_vocab_size": COUNT + len(vocab) - 1, "default_num_special_tokens": COUNT}
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)]
    return {"config": config, "vocab": vocab, "special_tokens": special, **changes}


def written(folder: Path, **changes: Any) -> Path:
    (folder / "tekken.json").write_text(json.dumps(content(**changes)))
    return folder


def by_rank(piece: bytes) -> list[bytes]:
    """The pair whose result has the lowest rank is merged, again and again; a piece that is a token stays whole."""
    words = [base64.b64decode(entry["token_bytes"]) for entry in content()["vocab"][:-1]]
    ranks = {word: rank for rank, word in enumerate(words)}
    if piece in ranks:
        return [piece]
    parts = [piece[at : at + 1] for at in range(len(piece))]
    while True:
        candidates = [(ranks[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not candidates:
            return parts
        at = min(candidates)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_tokens_are_those_of_merging_by_rank(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(written(tmp_path))
    rng = random.Random(0)
    for _ in range(200):
        piece = "".join(rng.choice("therinégi日") for _ in range(rng.randint(1, 12)))
        for text in (piece, f" {piece}"):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            assert [tokenizer.token_bytes(token) for token in tokens] == by_rank(text.encode())
            assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_special_tokens(tmp_path: Path) -> None:
    """They come first; those without a name are not missing, and the start is added where it is wanted."""
    tokenizer = Tokenizer.load(written(tmp_path))
    assert [tokenizer.token_id(text) for text in SPECIAL] == [0, 1, 2, 3]
    assert tokenizer.token_id("the") == COUNT + 257
    assert tokenizer.vocab_size == COUNT + 256 + len(WORDS)
    assert len(tokenizer.special_tokens) == COUNT
    assert tokenizer.special["eos_token"] == "</s>"
    assert tokenizer.encode("[INST]the", add_special_tokens=True) == [1, 3, COUNT + 257]
    assert tokenizer.decode([1, 3, COUNT + 257, 2], skip_special_tokens=True) == "the"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[INST]"}))
    assert Tokenizer.load(tmp_path).special["eos_token"] == "[INST]"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"special_tokens": None}, "does not list its special tokens"),
        ({"special_tokens": [{"rank": 0, "token_str": "a"}, {"rank": 1, "token_str": "a"}]}, "twice"),
        ({"special_tokens": [{"rank": 99, "token_str": "a"}]}, "cannot be read"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}]}, "cannot be read"),
        ({"config": {}}, "cannot be read"),
        ({"config": {**content()["config"], "default_num_special_tokens": 9999}}, "9999 special tokens"),
        ({"config": {**content()["config"], "pattern": "("}}, "cannot be read"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TokenizerError, match=text):
        Tokenizer.load(written(tmp_path, **changes))
