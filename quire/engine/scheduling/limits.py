"""SchedulerLimits: limits of a step."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.wire.convolutions import Convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of a step. `max_tokens` is at least `max_seqs`, so that every running sequence can advance.

    Attributes:
        max_draft: longest draft of a sequence in tokens; 0 for no speculation.
        rope_switch: see `LanguageModel.rope_switch`.
        convolutions: steps from the columns of an item's features to its encoded positions; empty if the model has
            none, or if items have placeholder tokens.
        max_encoded: encoded positions of a step, if they are of more than one item.
        max_cached: embeddings of items with placeholder tokens that are kept; 0 if the model reads no such items.
        adapts_items: requests with such items are computed with the model's adapter.
    """

    max_seqs: int
    max_tokens: int
    max_model_len: int
    max_draft: int = 0
    rope_switch: int | None = None
    convolutions: tuple[Convolution, ...] = ()
    max_encoded: int = 0
    max_cached: int = 0
    adapts_items: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < self.max_seqs:
            raise ValueError("max_tokens must be at least max_seqs")
