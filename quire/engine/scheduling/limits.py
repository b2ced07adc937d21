"""SchedulerLimits: limits of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quire.engine.client.convolutions import Convolution

Bidirectional = Literal["pictures", "prompt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of a step. The budget of tokens is at least `max_num_seqs`, so that every running sequence can advance.

    Attributes:
        max_draft: longest draft of a sequence in tokens; 0 for no speculation.
        max_drafting: most sequences of a step that have drafts; None: any number.
        rope_switch: see `LanguageModel.rope_switch`.
        convolutions: steps from the columns of an item's features to its encoded positions; empty if the model has
            none, or if items have placeholder tokens.
        encoder_compute_budget: tokens whose computation takes as long as the encoding of a step's items, if they are
            several (vLLM's max_num_encoder_input_tokens). An embedding counts as a token at least.
        pixel_cost: tokens whose computation takes as long as the encoding of a pixel.
        encoder_cache_size: embeddings of items with placeholder tokens that are kept; 0 if the model reads no such
            items.
        lora_digests: digests of the content of the model's adapters (LoRA), by their ids.
        item_lora_id: adapter that requests with such items are computed with; None: with the model's weights alone.
        picture_lora_id: the same of those with pictures, whether they have audio or not.
        marks_audio: audio in prompts with pictures is encoded in another way than elsewhere.
        bidirectional: which tokens attend to each other in both directions, and are therefore computed in one step:
            those of each picture, or those of the prompt; None: no tokens do.
        max_further_steps: most steps that follow a step before its tokens are known to the scheduler.
        stages: pipeline stages, each of which computes another step at the same time.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_draft: int = 0
    max_drafting: int | None = None
    rope_switch: int | None = None
    convolutions: tuple[Convolution, ...] = ()
    encoder_compute_budget: int = 0
    pixel_cost: float = 0.0
    encoder_cache_size: int = 0
    lora_digests: Mapping[int, bytes] = field(default_factory=dict)
    item_lora_id: int | None = None
    picture_lora_id: int | None = None
    marks_audio: bool = False
    bidirectional: Bidirectional | None = None
    max_further_steps: int = 0
    stages: int = 1

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
