"""Small whisper models with random weights, and what transformers computes with them."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

from quire.engine.client.protocol import AudioItem
from quire.engine.client.sampling_params import TimestampRule
from tests.support.models import draw_weights

# Tokens behind 80 of text.
TEXT = 80
END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS, BEGIN = range(TEXT, TEXT + 10)
MELS, POSITIONS, TARGETS = 16, 40, 64
VOCAB = BEGIN + POSITIONS + 1
SUPPRESS, BEGIN_SUPPRESS = [3, 7, START, PREVIOUS], [5, END]
RULE = TimestampRule(begin=BEGIN, no_timestamps=NO_TIMESTAMPS, end=END, max_initial=8)


def whisper_config(**changes: Any) -> WhisperConfig:
    """The config of a tiny whisper."""
    sizes = {
        "vocab_size": VOCAB,
        "num_mel_bins": MELS,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "max_source_positions": POSITIONS,
        "max_target_positions": TARGETS,
        "pad_token_id": END,
        "bos_token_id": END,
        "eos_token_id": END,
        "decoder_start_token_id": START,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    return WhisperConfig(**{**sizes, **changes})


def make_whisper(*, seed: int = 0, **changes: Any) -> Any:
    """A whisper in float32, with weights large enough for distinct logits."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    config = whisper_config(**changes)
    config._attn_implementation = "eager"
    model = WhisperForConditionalGeneration(config).eval()
    draw_weights(model, "whisper")
    generation = GenerationConfig(
        decoder_start_token_id=START,
        eos_token_id=END,
        pad_token_id=END,
        bos_token_id=END,
        max_length=config.max_target_positions,
    )
    facts = {
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
        "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": PREVIOUS,
        "max_initial_timestamp_index": 8,
        "suppress_tokens": SUPPRESS,
        "begin_suppress_tokens": BEGIN_SUPPRESS,
        "alignment_heads": [[1, 0], [2, 3], [2, 1]],
        "return_timestamps": False,
    }
    for name, value in facts.items():
        setattr(generation, name, value)
    model.generation_config = generation
    return model


def save_whisper(model: Any, folder: Path, *, without: Sequence[str] = ()) -> Path:
    """Save a model; `without`: what generation_config.json is to lack."""
    model.save_pretrained(folder)
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in generation.items() if name not in without}))
    return folder


def features(seed: int, positions: int = POSITIONS) -> NDArray[np.float32]:
    """Random features of one item."""
    generator = np.random.default_rng(seed)
    return generator.normal(0, 1, (MELS, 2 * positions)).astype(np.float32)


def item(seed: int, positions: int = POSITIONS) -> AudioItem:
    """The item of `features(seed, positions)`."""
    array = features(seed, positions)
    return AudioItem(hash=hashlib.sha256(array.tobytes()).digest(), features=array)


def shortened(model: Any, positions: int) -> Any:
    """The model with an encoder of fewer positions, which is all that transformers' takes."""
    short = copy.deepcopy(model)
    short.config.max_source_positions = positions
    encoder = short.model.encoder
    encoder.embed_positions = torch.nn.Embedding.from_pretrained(encoder.embed_positions.weight[:positions])
    return short


def expected_tokens(
    model: Any, seed: int, prompt: Sequence[int], max_tokens: int, positions: int = POSITIONS
) -> list[int]:
    """Greedy tokens after a prompt, until the end token: one forward call of transformers for each."""
    tokens = list(prompt)
    with torch.inference_mode():
        encoded = model.model.encoder(torch.from_numpy(features(seed, positions))[None])
        while len(tokens) < len(prompt) + max_tokens and (len(tokens) == len(prompt) or tokens[-1] != END):
            logits = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([tokens])).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def generated(model: Any, seed: int, **options: Any) -> list[int]:
    """The tokens of transformers' `generate` with its rules, without those of the prompt."""
    with torch.inference_mode():
        out = model.generate(
            torch.from_numpy(features(seed))[None], do_sample=False, force_unique_generate_call=True, **options
        )
    return [int(token) for token in out[0]]
