"""Tokenizers from other vocabularies than tokenizer.json: characters of CTC models (vocab.json), and tekken.json."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

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
    shown = {text: text.lower() if lower else text for text in set(tokens) - special}
    if delimiter in shown:
        shown[delimiter] = space
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


@lru_cache(maxsize=1)
def byte_letters() -> tuple[str, ...]:
    """The character of each byte in byte-level BPE (Radford et al. 2019).

    Printable bytes are themselves, others are characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(substitutes)) for byte in range(0x100))


@lru_cache(maxsize=1)
def bytes_of_letters() -> dict[str, int]:
    """Bytes by their characters."""
    return {letter: byte for byte, letter in enumerate(byte_letters())}


FILE = "tekken.json"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def tekken_tokenizer(folder: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer of Mistral's tekken.json; None if the folder has no such file. Takes a second or two.

    It is byte-level BPE by ranks, with special tokens as the first ids.

    Raises:
        OSError, ValueError, KeyError, TypeError: the file cannot be used.
    """
    path = folder / FILE
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    config = content["config"]
    count, size = config["default_num_special_tokens"], config["default_vocab_size"]
    if not 0 <= count < size:
        raise ValueError(f"{FILE} has {count} special tokens among {size} tokens")
    words = [base64.b64decode(entry["token_bytes"], validate=True) for entry in content["vocab"][: size - count]]
    ranks = {word: rank for rank, word in enumerate(words)}
    letters = byte_letters()
    shown = ["".join(letters[byte] for byte in word) for word in words]
    special = _special(content, count)
    vocabulary = {text: token for token, text in enumerate(special)} | {
        text: count + rank for rank, text in enumerate(shown)
    }
    merges = [(shown[left], shown[right]) for left, right in _merges(words, ranks)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    start = SPECIAL["bos_token"]
    if start in special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, special.index(start))]
        )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def _special(content: dict[str, Any], count: int) -> list[str]:
    """Texts of the special tokens, which have the first ids."""
    listed = content.get("special_tokens")
    if not listed:
        raise ValueError(f"{FILE} does not list its special tokens; tokenizer.json is needed beside it")
    special = [f"<SPECIAL_{token}>" for token in range(count)]
    for entry in listed:
        special[entry["rank"]] = entry["token_str"]
    if len(set(special)) < count:
        raise ValueError(f"{FILE} has a special token twice")
    return special


def _merges(words: Sequence[bytes], ranks: dict[bytes, int]) -> Iterator[tuple[int, int]]:
    """The merges of BPE, in the order of the ranks of their results: pairs of tokens that make another one."""
    for word in words:
        pairs = [
            (left, right)
            for at in range(1, len(word))
            if (left := ranks.get(word[:at])) is not None and (right := ranks.get(word[at:])) is not None
        ]
        yield from sorted(pairs)
