"""Small models that transcribe audio while it arrives, with random weights, and what transformers makes of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoConfig, VoxtralRealtimeFeatureExtractor, VoxtralRealtimeForConditionalGeneration

from quire.engine.wire.protocol import MediaItem
from tests.support.models import draw_weights

VOCAB, MELS, COLUMNS = 300, 16, 8
START, PAD = 1, 32
WINDOW, ENCODER_WINDOW = 24, 18  # positions that decoder and encoder attend to; frames of audio, and quarters of them
Features = NDArray[np.float32]


def make_streaming_model(*, seed: int = 0, text: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A model in float32, with weights large enough for distinct logits.

    Args:
        seed: of its weights.
        text: changes of the config of its language model.
        changes: of its config.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    audio_config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
        "num_mel_bins": MELS,
        "sliding_window": ENCODER_WINDOW,
        "vocab_size": VOCAB,
    }
    text_config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "sliding_window": WINDOW,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "pad_token_id": None,
        "bos_token_id": START,
        "eos_token_id": 2,
        **(text or {}),
    }
    config = AutoConfig.for_model(
        "voxtral_realtime",
        **{"audio_config": audio_config, "text_config": text_config, "default_num_delay_tokens": 3, **changes},
    )
    config._attn_implementation = "eager"
    model: Any = VoxtralRealtimeForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
    draw_weights(model, "voxtral_realtime")
    model.tie_weights()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def save_streaming_model(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model with the config of its feature extractor, without a tokenizer."""
    model.save_pretrained(folder, **options)
    extractor = json.loads(VoxtralRealtimeFeatureExtractor(feature_size=MELS).to_json_string())
    extractor.pop("mel_filters", None)
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    return folder


def features(seed: int, frames: int) -> Features:
    """Random features of so many frames."""
    found: Features = np.random.default_rng(seed).normal(0, 1, (MELS, COLUMNS * frames)).astype(np.float32)
    return found


def audio_of(part: Features) -> MediaItem:
    """The item of features."""
    part = np.ascontiguousarray(part)
    return MediaItem(hash=hashlib.sha256(part.data).digest(), features=part)


def expected_tokens(model: Any, prompt: list[int], audio: Features) -> list[int]:
    """Greedy tokens of transformers' `generate`, one for each frame behind the prompt."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_features=torch.from_numpy(audio)[None],
            num_delay_tokens=model.config.default_num_delay_tokens,
            max_new_tokens=1 << 20,  # there are no more than frames
            do_sample=False,
        )
    return [int(token) for token in out[0, len(prompt) :]]
