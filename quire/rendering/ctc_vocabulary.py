"""Vocabularies of CTC models that are a list of characters: vocab.json without tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

_SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def character_tokenizer(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer | None:
    """The tokenizer of a vocabulary of characters; None if the folder has no such vocabulary.

    Tokens have the text that they stand for: a space for the token between words, and lower case if the config says so.

    Args:
        folder: the model's directory.
        config: contents of tokenizer_config.json.

    Raises:
        OSError, ValueError: a file cannot be used.
    """
    path = folder / "vocab.json"
    if not path.exists() or (folder / "merges.txt").exists():
        return None
    tokens = _ids(json.loads(path.read_text(encoding="utf-8")), "vocab.json")
    added = folder / "added_tokens.json"
    if added.exists():
        tokens |= _ids(json.loads(added.read_text(encoding="utf-8")), "added_tokens.json")
    special = {_content(config.get(name)) or text for name, text in _SPECIAL.items()}
    for text, token, is_special in _added(config):
        tokens.setdefault(text, token)
        special |= {text} if is_special else set()
    delimiter = _content(config.get("word_delimiter_token")) or "|"
    special.discard(delimiter)
    space = _content(config.get("replace_word_delimiter_char")) or " "
    lower = config.get("do_lower_case") is True
    shown = {text: space if text == delimiter else text.lower() if lower else text for text in set(tokens) - special}
    vocabulary = {text: token for text, token in tokens.items() if shown.get(text, text) == text}
    named = set(vocabulary.values())
    for text, token in tokens.items():
        if token not in named:  # of two tokens with the same text, one keeps its name
            named.add(token)
            vocabulary[shown[text] if shown[text] not in vocabulary else text] = token
    unknown = _content(config.get("unk_token")) or _SPECIAL["unk_token"]
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    known = [text for text in sorted(special, key=lambda text: vocabulary.get(text, -1)) if text in vocabulary]
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in known])
    return tokenizer


def _ids(content: Any, name: str) -> dict[str, int]:
    if not isinstance(content, dict):
        raise ValueError(f"{name} must contain an object")
    if any(isinstance(value, dict) for value in content.values()):
        raise ValueError(f"{name} has a vocabulary for each of several languages, which is not supported")
    if not all(type(token) is int and token >= 0 for token in content.values()):
        raise ValueError(f"{name} must map tokens to their ids")
    return dict(content)


def _added(config: Mapping[str, Any]) -> Iterator[tuple[str, int, bool]]:
    """Text and id of each token of `added_tokens_decoder`, and whether it is special."""
    entries = config.get("added_tokens_decoder")
    for token, entry in entries.items() if isinstance(entries, dict) else ():
        text = _content(entry)
        if text is not None and str(token).isdecimal():
            yield text, int(token), isinstance(entry, dict) and entry.get("special") is True


def _content(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) and text else None
