"""Small models that transcribe audio while it arrives, with random weights, and what transformers makes of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoConfig, VoxtralRealtimeFeatureExtractor, VoxtralRealtimeForConditionalGeneration

from quire.engine.client.protocol import AudioItem
from quire.engine.client.streaming import DelayedStreamsInfo
from quire.engine.models.model_config import read_model_config
from tests.support.live import core_server
from tests.support.models import draw_weights
from tests.support.server import Server
from tests.support.tiny_configs import TEXT, VOCAB
from tests.support.tokenizer import byte_level

MELS, COLUMNS = 16, 8
START, PAD = 1, 32
WINDOW, ENCODER_WINDOW = 24, 18  # positions that decoder and encoder attend to; frames of audio, and quarters of them
FIRST_SPECIAL = 256  # token of the tokenizer
SPECIAL = ("<s>", "</s>", "[STREAMING_PAD]", "[STREAMING_WORD]")
END = FIRST_SPECIAL + SPECIAL.index("</s>")
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
        **TEXT,
        "sliding_window": WINDOW,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
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


def streaming_info(folder: Path) -> DelayedStreamsInfo:
    """The facts about a model that its folder contains."""
    info = read_model_config(folder).facts.streaming
    assert isinstance(info, DelayedStreamsInfo)
    return info


def features(seed: int, frames: int) -> Features:
    """Random features of so many frames."""
    features: Features = np.random.default_rng(seed).normal(0, 1, (MELS, COLUMNS * frames)).astype(np.float32)
    return features


def audio_of(part: Features) -> AudioItem:
    """The item of features."""
    return AudioItem(hash=b"", features=np.ascontiguousarray(part))


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


@lru_cache(maxsize=1)
def streaming_tokenizer() -> tokenizers.Tokenizer:
    """Bytes, then the special tokens."""
    return byte_level(SPECIAL)


def write_streaming_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files to a model folder; the model ends with its end token."""
    streaming_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))


def text_of(tokens: list[int]) -> str:
    """The text that a client gets for generated tokens."""
    shown = tokens[: tokens.index(END)] if END in tokens else tokens
    return streaming_tokenizer().decode([token for token in shown if token < FIRST_SPECIAL]).strip()


@asynccontextmanager
async def streaming_server(
    folder: Path, max_model_len: int | None = None, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Server]:
    """A server of a model of `save_streaming_model`; see `core_server`."""
    write_streaming_tokenizer(folder)
    async with core_server(folder, max_model_len, settings, **options) as server:
        yield server
