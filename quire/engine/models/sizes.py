"""Sizes: what prompts and results depend on of a model's sizes, read without its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.engine.client.json_file import read_json
from quire.engine.models.config.rope import max_positions
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.family import Spec
from quire.engine.models.specs.decoder import CTCSpec, TransducerSpec
from quire.engine.models.specs.dual_encoder import DualEncoderSpec


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model.

    Attributes:
        vocab: tokens of its vocabulary.
        hidden: elements of its hidden states, or of what it embeds pictures and texts in.
        positions: tokens of the longest input that it has positions for; None: the config does not say.
        input_limit: tokens of the longest input that sentence-transformers gives it; None: it does not say.
    """

    vocab: int
    hidden: int
    positions: int | None
    input_limit: int | None = None

    @property
    def longest(self) -> int | None:
        """Tokens of the longest input; None: the config does not say."""
        if self.positions is None or self.input_limit is None:
            return self.positions
        return min(self.positions, self.input_limit)

    def with_limit_in(self, folder: Path) -> Sizes:
        """Return the sizes with the limit of sentence-transformers in a folder, which may have none."""
        max_tokens = read_json(folder / "sentence_bert_config.json", BrokenFolder).get("max_seq_length")
        return replace(self, input_limit=max_tokens) if type(max_tokens) is int and max_tokens > 0 else self


UNKNOWN_SIZES = Sizes(0, 0, None)


def sizes_of(spec: Spec) -> Sizes:
    """Return the sizes of a model that Quire's implementation runs."""
    match spec:
        case CTCSpec():
            return Sizes(spec.vocab, spec.encoder.hidden, spec.encoder.max_positions)
        case TransducerSpec():
            return Sizes(spec.vocab, spec.hidden, spec.encoder.max_positions)
        case DualEncoderSpec():
            return Sizes(spec.vocab, spec.size, spec.max_positions)
        case _:
            return Sizes(spec.vocab, spec.hidden, spec.max_positions)


def sizes_in_transformers(config: Any) -> Sizes:
    """Return the sizes of a model that transformers' implementation runs.

    Raises:
        UnsupportedModel: the config has a value of a wrong type.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    try:
        return Sizes(getattr(text, "vocab_size", 0), getattr(text, "hidden_size", 0), _positions(text))
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"the model's config.json cannot be used: {type(error).__name__}: {error}") from error


def _positions(config: Any) -> int | None:
    """The context length of a config that may say it in one of several ways."""
    if getattr(config, "rope_parameters", None) and hasattr(config, "max_position_embeddings"):
        return max_positions(config)
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    return None
