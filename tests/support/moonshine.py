"""Small Moonshines with random weights, and what transformers computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import GenerationConfig, MoonshineConfig, MoonshineForConditionalGeneration, Wav2Vec2FeatureExtractor

from tests.support.models import draw_weights

VOCAB, START, END, CONTEXT = 300, 1, 2, 48


def make_moonshine(*, seed: int = 0, **changes: Any) -> Any:
    """A Moonshine in float32, with weights large enough for distinct logits."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 3,
        "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "decoder_start_token_id": START,
        "bos_token_id": START,
        "eos_token_id": END,
        "pad_token_id": END,
    }
    config = MoonshineConfig(**{**sizes, **changes})
    config._attn_implementation = "eager"
    model: Any = MoonshineForConditionalGeneration(config).eval()
    draw_weights(model, "moonshine")
    model.generation_config = GenerationConfig(
        decoder_start_token_id=START, eos_token_id=END, bos_token_id=START, pad_token_id=END
    )
    return model


def save_moonshine(model: Any, folder: Path) -> Path:
    """Save a model with the settings of its features, without a tokenizer."""
    model.save_pretrained(folder)
    Wav2Vec2FeatureExtractor(do_normalize=False).save_pretrained(folder)
    return folder


def generated(model: Any, samples: NDArray[np.float32], max_tokens: int, **options: Any) -> Sequence[int]:
    """The tokens of transformers' greedy `generate`, without the start token."""
    with torch.inference_mode():
        out = model.generate(torch.from_numpy(samples)[None], do_sample=False, max_new_tokens=max_tokens, **options)
    tokens: list[int] = out[0].tolist()
    return tokens[1:]
