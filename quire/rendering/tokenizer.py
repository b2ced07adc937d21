"""The tokenizer of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tokenizers

from quire.multimodal.errors import ModelFileError
from quire.rendering.sentence_transformers_files import colbert_markers, static_folder
from quire.rendering.vocabularies import SPECIAL, bytes_of_letters, character_tokenizer, tekken_tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LFS_POINTER = b"version https://git-lfs"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ModelFileError):
    """The model has no tokenizer, or one that cannot be read."""


class Tokenizer:
    """Turn text into tokens and back.

    Attributes:
        backend: the tokenizer of the `tokenizers` library.
        special: texts of special tokens by their names in chat templates, such as `eos_token`.
        config: contents of tokenizer_config.json.
        in_file: the model has a file from which `backend` was read; otherwise it was converted.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], *, in_file: bool = False) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.config = config
        self.in_file = in_file
        # The caches have at most an entry for each token of the vocabulary.
        self.token_bytes = cache(self._token_bytes)
        self.token_text = cache(self._token_text)
        self.special = {name: text for name in _SPECIAL if (text := _token_text(config.get(name))) is not None}

    @property
    def pad_id(self) -> int | None:
        """The id of the padding token; None if there is none."""
        token = self.special.get("pad_token")
        token_id: int | None = None if token is None else self.backend.token_to_id(token)
        return token_id

    @classmethod
    def load(cls, folder: Path, backend: tokenizers.Tokenizer | None = None) -> Tokenizer:
        """Read the tokenizer of a model. `backend`: if it has been loaded or converted already.

        Raises:
            TokenizerError: there is no tokenizer, or it cannot be read.
        """
        path = folder / "tokenizer_config.json"
        static = static_folder(folder)
        try:
            config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if backend is not None:
                return cls(backend, config)
            if (file := (static or folder) / "tokenizer.json").exists():
                _refuse_lfs_pointer(file)
                loaded = tokenizers.Tokenizer.from_file(str(file))
                if static is not None:
                    loaded.post_processor = None  # special tokens would take part in the mean
                for token in colbert_markers(folder).values():
                    if loaded.token_to_id(token) is not None:  # a word of the vocabulary, which texts would not become
                        loaded.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
                return cls(loaded, config, in_file=True)
            if not isinstance(config, dict):
                raise TokenizerError(f"{path} must contain a JSON object")
            if (characters := character_tokenizer(folder, config)) is not None:
                return cls(characters, config)
            if (tekken := tekken_tokenizer(folder)) is not None:
                return cls(tekken, {**SPECIAL, **config})
        except TokenizerError:
            raise
        except Exception as error:
            raise TokenizerError(f"the tokenizer in {folder} cannot be read: {error}") from error
        return cls(_converted(folder), config)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize a text. `add_special_tokens`: add those that the model expects at the start and end."""
        # `encode` would hold the GIL; a batch of one does not.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokenize a text; return the tokens, and where the characters of each begin and end."""
        encoding = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return encoding.ids, encoding.offsets

    def encode_without(self, text: str, character: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize a text, and leave out the tokens of a character, which keeps others apart."""
        encoding = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        left_out = (start < end and text[start:end] == character for start, end in encoding.offsets)
        return [token for token, leave_out in zip(encoding.ids, left_out, strict=True) if not leave_out]

    def offsets(self, text: str, tokens: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return where the characters of a text's tokens begin and end; None: the text alone gives other tokens.

        Special tokens that are not in the text have (0, 0).
        """
        for add_special_tokens in (False, True):
            encoding = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
            if encoding.ids == list(tokens):
                return encoding.offsets
        return None

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of tokens."""
        return self.backend.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)[0]

    def token_id(self, text: str) -> int | None:
        """Id of the token with this text; None if there is none."""
        return self.backend.token_to_id(text)

    def token_name(self, token: int) -> str:
        """The token as the vocabulary has it. That may not be its text: byte-level BPE writes bytes as letters."""
        return self.backend.id_to_token(token) or ""

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of special tokens by their texts."""
        added = self.backend.get_added_tokens_decoder()
        return {entry.content: token for token, entry in added.items() if entry.special}

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def longest_token(self) -> int:
        """Length of the longest token in characters, which bounds the number of tokens of a text from below."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def separates_words(self) -> bool:
        """Whether any token begins or ends with white space, so that it stands between words."""
        contents = (self.token_bytes(token) for token in range(self.vocab_size))
        return any(content[:1].isspace() or content[-1:].isspace() for content in contents)

    def _token_bytes(self, token: int) -> bytes:
        """Bytes of a token, which may be a part of a character."""
        text = self.backend.id_to_token(token)
        if text is None:
            return b""
        if token in self._added:
            return text.encode()
        if self._byte_level:
            table = bytes_of_letters()
            return b"".join(bytes([table[char]]) if char in table else char.encode() for char in text)
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.replace("\u2581", " ").encode()

    def _token_text(self, token: int) -> str:
        """Text of a token, with a replacement character for an incomplete character."""
        return self.token_bytes(token).decode(errors="replace")

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def _byte_level(self) -> bool:
        decoder = self.backend.decoder
        return decoder is not None and b"ByteLevel" in decoder.__getstate__()


def _token_text(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _refuse_lfs_pointer(path: Path) -> None:
    """Raise ValueError for what a clone without Git LFS has in place of a file."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ValueError(f"{path.name} is a Git LFS pointer; run `git lfs pull` where it was cloned")


def _converted(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a model without tokenizer.json, converted by transformers."""
    from transformers import AutoTokenizer  # noqa: PLC0415 takes seconds, and most folders do not need it

    try:
        backend = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    except Exception as error:  # transformers has many kinds of errors for broken files
        raise TokenizerError(
            f"{folder} has no tokenizer.json and no tokenizer that can be converted to one: {error}"
        ) from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise TokenizerError(f"the tokenizer in {folder} is of a type that is not supported")
    return backend
