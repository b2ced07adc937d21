"""Byte-level tokenizers with a few special tokens; every text round-trips."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # of which each character stands for a byte
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>")
VOCAB_SIZE = 256 + len(SPECIAL) + len(THINK)
EOS = VOCAB_SIZE - len(THINK) - 1
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(special: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """Build a tokenizer with ids 0..255 in the order of the byte-level alphabet, then special tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE({char: token for token, char in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


def with_placeholders(special: Sequence[str], placeholders: Mapping[int, str], vocab: int) -> tokenizers.Tokenizer:
    """The same with `vocab` ids, of which some that are not in use otherwise have the texts of placeholders."""
    names = [*special, *(f"<unused{index}>" for index in range(vocab - len(ALPHABET) - len(special)))]
    for token, text in placeholders.items():
        names[token - len(ALPHABET)] = text
    return byte_level(names)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Build a tokenizer of bytes, the special tokens, and those of reasoning."""
    tokenizer = byte_level(SPECIAL)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in THINK])
    return tokenizer


def pair_tokenizer() -> tokenizers.Tokenizer:
    """The same with special tokens around texts and pairs, and the second text of a pair of type 1, as BERT has it."""
    tokenizer = byte_tokenizer()
    first, last = SPECIAL[1:]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in (first, last)],
    )
    return tokenizer


def write_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, joins: bool = False) -> None:
    """Write the tokenizer's files to a model folder. `joins`: as `pair_tokenizer`."""
    folder.mkdir(parents=True, exist_ok=True)
    (pair_tokenizer() if joins else byte_tokenizer()).save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": None, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
