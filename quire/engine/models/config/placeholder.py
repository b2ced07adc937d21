"""The token in a prompt that stands for audio or a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.engine.client.json_file import read_json
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

_TEXT = "<|audio|>"  # if the tokenizer has none for the placeholder


def check_placeholder(token: Any, vocab: int, name: str = "audio_token_id") -> int:
    """Return the placeholder token of a config, if it is one.

    Args:
        token: the value in the config.
        vocab: number of tokens.
        name: of the config's field.

    Raises:
        UnsupportedModel: it is not a token of the vocabulary.
    """
    if type(token) is not int or not 0 <= token < vocab:
        raise UnsupportedModel(f"{name} is {token!r}, which is not a token of the vocabulary")
    return token


def text_of(folder: Path, token: int, default: str = _TEXT) -> str:
    """The text of a special token. `default`: its text if the tokenizer has none."""
    added = read_json(folder / "tokenizer.json", BrokenFolder).get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("id") == token and isinstance(entry.get("content"), str):
            return str(entry["content"])
    return default
