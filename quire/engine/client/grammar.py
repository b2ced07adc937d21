"""Grammars that constrain an output, in llguidance's format: a JSON text of named Lark grammars and JSON schemas.

The front end validates a grammar before a request starts. The core compiles it again and matches tokens against it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CLIENT_GRAMMAR = "client_grammar"  # key of a client's text, Lark or GBNF, which llguidance cannot read as it is

_MAX_ERROR = 500  # characters; messages quote the grammar

# Bounds for any grammar that a client sends: a third of a second to compile, ten milliseconds per token.
LIMITS = LLParserLimits(
    max_grammar_size=100_000,
    initial_lexer_fuel=5_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)


class GrammarError(Exception):
    """The grammar is invalid, unsatisfiable, too large, or uses features that llguidance does not support."""


class GrammarTokens:
    """A model's vocabulary in the form that llguidance needs.

    Attributes:
        special: ids of special tokens by their texts; they match only where a grammar refers to them.
        forces_tokens: where a grammar allows one text only, masks allow only the tokens that it is tokenized to.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Load the folder's tokenizer; takes half a second for a large vocabulary.

        Args:
            folder: the model's folder.
            vocab_size: size of the model's logits.
            eos_token_ids: tokens that are allowed where the grammar is complete; at least one.

        Raises:
            GrammarError: there is no tokenizer.json, or llguidance does not support it.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise GrammarError("structured outputs need a model with a tokenizer.json")
        if not eos_token_ids:
            raise GrammarError("structured outputs need a model with an end-of-sequence token")
        tokenizer = json.loads(path.read_bytes())
        added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", ())}
        self.forces_tokens = hide_special_tokens(tokenizer)
        try:
            self.backend = LLTokenizer(json.dumps(tokenizer), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise GrammarError(f"the model's tokenizer cannot be used for structured outputs: {error}") from error
        self.special = {text: token for text, token in added.items() if self._is_special(token)}

    def _is_special(self, token: int) -> bool:
        return token < self.backend.vocab_size and self.backend.is_special_token(token)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the start of the grammar.

        Raises:
            GrammarError: the grammar cannot be compiled.
        """
        if not self.forces_tokens:
            grammar = _without_forcing(grammar)
        matcher = LLMatcher(self.backend, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask may exceed the limits too
        if matcher.is_error():
            raise GrammarError(problem_of(matcher))
        return matcher


def problem_of(matcher: LLMatcher) -> str:
    """What is wrong with a matcher, in one line without an excerpt of the grammar."""
    error = matcher.get_error().partition("\n   1 | ")[0].removesuffix("\n<non-verbose/>")
    return error if len(error) <= _MAX_ERROR else f"{error[:_MAX_ERROR]}..."


def hide_special_tokens(tokenizer: dict[str, Any]) -> bool:
    """Change a tokenizer.json so that no text is tokenized as special tokens; returns whether that was possible.

    Where a grammar allows one text only, llguidance tokenizes that text and allows nothing but its tokens. A special
    token in it would not match the grammar, which expects the text's bytes. So special tokens are moved from the added
    tokens, which are searched for in texts, to the vocabulary, with the byte 0xFF in front by which llguidance knows
    special tokens. No text contains that byte. Only byte-level tokenizers can express it, and only for tokens that are
    not merged from others as well.
    """
    model, decoder = tokenizer.get("model", {}), tokenizer.get("decoder") or {}
    if model.get("type") != "BPE" or decoder.get("type") != "ByteLevel":
        return False
    added = tokenizer.get("added_tokens", ())
    special = {entry["content"]: entry["id"] for entry in added if _is_taken_for_special(entry)}
    vocabulary = model["vocab"]
    if not special.keys().isdisjoint(vocabulary) and not special.keys().isdisjoint(_merged(model)):
        return False
    for text, token in special.items():
        vocabulary.pop(text, None)
        vocabulary["".join(_BYTE_LEVEL[byte] for byte in (0xFF, *text.encode()))] = token
    tokenizer["added_tokens"] = [entry for entry in added if entry["content"] not in special]
    return True


def _is_taken_for_special(entry: dict[str, Any]) -> bool:
    """Whether llguidance treats an added token as special: those in angle brackets, independent of the tokenizer."""
    text = str(entry["content"])
    return bool(entry.get("special")) or (text.startswith("<") and text.endswith(">"))


def _merged(model: dict[str, Any]) -> Iterator[str]:
    """The tokens of all merges: both parts of each, and the merged token."""
    for merge in model.get("merges", ()):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        yield from (*parts, "".join(parts))


def _without_forcing(grammar: str) -> str:
    """The grammar with all tokenizations of a text allowed, also where it allows one text only."""
    content = json.loads(grammar)
    first = content["grammars"][0]
    first["lark_grammar"] = f'%llguidance {{"no_forcing": true}}\n{first["lark_grammar"]}'
    return json.dumps(content)


def _byte_level_alphabet() -> list[str]:
    """The character of each byte in the vocabularies of byte-level tokenizers, as in GPT-2."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = (byte for byte in range(0x100) if byte not in printable)
    moved = {byte: 0x100 + index for index, byte in enumerate(unprintable)}
    return [chr(moved.get(byte, byte)) for byte in range(0x100)]


_BYTE_LEVEL = _byte_level_alphabet()
