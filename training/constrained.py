"""Holds answers of a local model to JSON schemas, with the grammars of Quire's server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from quire.engine.client.grammar import GrammarTokens
from quire.parsing.grammar_writer import GrammarWriter


class SchemaProcessor(LogitsProcessor):  # type: ignore[misc]
    """Mask the tokens that the schemas of a batch do not allow; rows without a schema stay free."""

    def __init__(self, tokens: GrammarTokens, schemas: list[dict[str, Any] | None], ends: list[int]) -> None:
        self.ends = ends
        self.matchers = [None if schema is None else tokens.matcher(grammar(schema, tokens)) for schema in schemas]
        self.started = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Take in the last tokens and mask the next ones."""
        for row, matcher in enumerate(self.matchers):
            if matcher is None:
                continue
            last = int(input_ids[row, -1])
            if self.started and last in self.ends:
                self.matchers[row] = None
                continue
            if self.started:
                matcher.consume_token(last)
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            scores[row].masked_fill_(torch.from_numpy(allowed[: scores.shape[1]] == 0), float("-inf"))
        self.started = True
        return scores


def grammar(schema: dict[str, Any], tokens: GrammarTokens) -> str:
    """Return the grammar of a schema, as the server writes it."""
    writer = GrammarWriter(tokens.special)
    return writer.finish(writer.json(schema))


def load_tokens(folder: Path) -> tuple[GrammarTokens, list[int]]:
    """Return a model folder's vocabulary for grammars, and its end tokens."""
    size = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    ends = json.loads((folder / "generation_config.json").read_text("utf-8"))["eos_token_id"]
    return GrammarTokens(folder, size, ends), ends
