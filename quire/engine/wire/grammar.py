"""Grammars that an output is held to, as llguidance reads them: a JSON text of named Lark grammars and JSON schemas.

The front end checks a grammar before a request begins; the core compiles it again and walks along it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# A third of a second of building and ten milliseconds a token at worst, whatever a client sends.
LIMITS = LLParserLimits(
    max_grammar_size=100_000,
    initial_lexer_fuel=5_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)


class GrammarError(Exception):
    """The grammar is none, is unsatisfiable, needs what llguidance lacks, or is too large."""


class GrammarTokens:
    """A model's vocabulary as grammars see it."""

    def __init__(self, folder: Path, vocab_size: int, ends: Sequence[int]) -> None:
        """Read the folder's tokenizer, which takes half a second for a large vocabulary.

        Args:
            folder: of the model.
            vocab_size: rows of its logits.
            ends: tokens that may come where the grammar is satisfied; at least one.

        Raises:
            GrammarError: there is no tokenizer.json, or it is of a kind that cannot be used.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise GrammarError("structured outputs need a model with a tokenizer.json")
        if not ends:
            raise GrammarError("structured outputs need a model with an end-of-sequence token")
        content = path.read_text("utf-8")
        try:
            self.backend = LLTokenizer(content, n_vocab=vocab_size, eos_token=list(ends))
        except ValueError as error:
            raise GrammarError(f"the model's tokenizer cannot be used for structured outputs: {error}") from error
        added = {entry["content"]: entry["id"] for entry in json.loads(content).get("added_tokens", ())}
        # Ids of the tokens that no text makes up, by what they are called.
        self.special = {text: token for text, token in added.items() if self._is_sign(token)}

    def _is_sign(self, token: int) -> bool:
        return token < self.backend.vocab_size and self.backend.is_special_token(token)

    def matcher(self, grammar: str) -> LLMatcher:
        """A walk along the grammar, at its start.

        Raises:
            GrammarError: it cannot be compiled.
        """
        matcher = LLMatcher(self.backend, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what it costs at its start is part of what it costs
        if matcher.is_error():
            raise GrammarError(matcher.get_error().partition("\n   1 | ")[0])  # without the grammar's own text
        return matcher
