"""The token in a prompt that stands for audio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.engine.client.json_file import read_json
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

_TEXT = "<|audio|>"  # if the tokenizer has none for the placeholder


def check_placeholder(token: Any, vocab: int) -> int:
    """Return the placeholder token of a config, if it is one.

    Raises:
        UnsupportedModel: it is not a token of the vocabulary.
    """
    if type(token) is not int or not 0 <= token < vocab:
        raise UnsupportedModel(f"audio_token_id is {token!r}, which is not a token of the vocabulary")
    return token


def text_of(folder: Path, token: int) -> str:
    """The text of a special token."""
    added = read_json(folder / "tokenizer.json", BrokenFolder).get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("id") == token and isinstance(entry.get("content"), str):
            return str(entry["content"])
    return _TEXT
