"""Tokenizers in Mistral's tekken.json: byte-level BPE by ranks, with special tokens as the first ids."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from quire.rendering.byte_level import byte_letters

FILE = "tekken.json"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def tekken_tokenizer(folder: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer of tekken.json; None if the folder has no such file. Takes a second or two.

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
