"""Tokenizers of all decoder kinds tell what a single token stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.rendering.tokenizer import Tokenizer, TokenizerError
from tests.support.tokenizer import EOS, byte_tokenizer, write_tokenizer


def test_bytes_of_byte_level_tokens() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), {})
    text = "a \u20ac\n\x00"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_text(ids[2]) == "\ufffd"
    assert tokenizer.token_text(EOS) == "<|im_end|>"
    assert tokenizer.token_bytes(10_000) == b""


def test_bytes_of_sentencepiece_tokens() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"\u2581a": 0, "b": 1, "<0xE2>": 2, "<unk>": 3}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = Tokenizer(backend, {})
    assert [tokenizer.token_bytes(i) for i in range(3)] == [b" a", b"b", b"\xe2"]


def test_lengths_and_special_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.longest_token == len("<|endoftext|>")
    assert tokenizer.vocab_size == 261
    assert tokenizer.special == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert tokenizer.token_id("<|im_end|>") == EOS


def test_saved_truncation_and_padding_do_not_count(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    backend = byte_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=10)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("abcdef", add_special_tokens=False)) == 6


@pytest.mark.parametrize("content", ["{", "{}", None])
def test_folders_without_a_usable_tokenizer_say_so(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="tokenizer"):
        Tokenizer.load(tmp_path)
