"""Small models of Gemma that read audio and pictures, with random weights, and what transformers makes with them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import Gemma4UnifiedAudioFeatureExtractor

from quire.engine.client.protocol import MediaItem
from quire.multimodal.audio.items import token_count
from tests.support.audio_models import MELS, RATE, Samples, span
from tests.support.engine import Engine
from tests.support.tiny_configs import VOCAB
from tests.support.tokenizer import with_placeholders
from tests.support.vision_models import PICTURE, SEES, greedy_tokens, prompt_with_pictures, save_seeing

GEMMA_AUDIO = ("gemma4", "gemma4_unified", "gemma3n")  # cases of HEARING
AUDIO = 296  # placeholder token
LONGEST = {"gemma4": 50, "gemma4_unified": 50, "gemma3n": 10}  # tokens of a piece of audio
# The tokens around audio and pictures, with the placeholder between.
ENDS = {
    "gemma4": (295, AUDIO, 299, 297, PICTURE, 298),
    "gemma4_unified": (295, AUDIO, 299, 297, PICTURE, 298),
    "gemma3n": (279, AUDIO, 292, 278, PICTURE, 281),
}
_TEXTS = ("<|audio>", "<|audio|>", "<audio|>", "<|image>", "<|image|>", "<image|>")
_TYPES = {PICTURE: 1, AUDIO: 3}  # of tokens


@lru_cache
def feature_extractor(case: str) -> Any:
    """transformers' feature extractor."""
    if case == "gemma3n":
        return Gemma3nAudioFeatureExtractor(feature_size=MELS)
    if case == "gemma4":
        return Gemma4AudioFeatureExtractor(feature_size=MELS)
    return Gemma4UnifiedAudioFeatureExtractor()


def save_hearing(model: Any, case: str, folder: Path) -> Path:
    """Save a model with the configs of its processors, without a tokenizer."""
    save_seeing(model, case, folder)
    extractor = json.loads(feature_extractor(case).to_json_string())
    processor = {"feature_extractor": extractor, "audio_seq_length": LONGEST[case]}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def write_media_tokenizer(case: str, folder: Path) -> None:
    """Write a tokenizer of bytes and special tokens, and a chat template that writes one token for each medium."""
    tokenizer = with_placeholders(["<|im_start|>", "<|im_end|>"], dict(zip(ENDS[case], _TEXTS, strict=True)), VOCAB)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}<|image|>"
        "{% elif c.type == 'audio' %}<|audio|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    )


def audio_inputs(case: str, audios: Sequence[Samples]) -> dict[str, torch.Tensor]:
    """What transformers' feature extractor makes of audio, of which there is at least one piece."""
    extracted = feature_extractor(case)(list(audios), sampling_rate=RATE, return_tensors="pt")
    return {name: extracted[name] for name in ("input_features", "input_features_mask")}


def media_prompt(
    engine: Engine, *parts: Sequence[int] | Samples | Image.Image
) -> tuple[list[int], tuple[MediaItem, ...]]:
    """The prompt of tokens, audio and pictures one behind the other, and its items."""
    tokens: list[int] = []
    items: list[MediaItem] = []
    for part in parts:
        if isinstance(part, np.ndarray):
            items += span(part, engine.audio, len(tokens))
            tokens += [engine.audio.placeholder] * token_count(len(part), engine.audio)
        elif isinstance(part, Image.Image):
            own, pictures = prompt_with_pictures(engine.pictures, [0] * len(tokens), part)
            tokens += own[len(tokens) :]
            items += pictures
        else:
            tokens += part
    return tokens, tuple(items)


def expected_of_media(model: Any, case: str, prompt: Sequence[int], parts: Sequence[Any], max_tokens: int) -> list[int]:
    """Greedy tokens of transformers' `generate` for a prompt that `media_prompt` has made of `parts`."""
    ids = torch.tensor([prompt])
    audios = [part for part in parts if isinstance(part, np.ndarray)]
    pictures = [part for part in parts if isinstance(part, Image.Image)]
    types = torch.zeros_like(ids)
    for token, kind in _TYPES.items():
        types[ids == token] = kind
    inputs = {} if case == "gemma3n" else {"mm_token_type_ids": types}
    if audios:
        inputs |= audio_inputs(case, audios)
    if audios and case == "gemma3n":
        # Of several, transformers' extractor and encoder would hear what fills up those that are not the longest.
        encoded = [model.model.get_audio_features(**_inverted(audio_inputs(case, [audio]))) for audio in audios]
        model.model.get_audio_features = lambda *_, **__: _joined(encoded)
    if pictures:
        inputs |= SEES[case].inputs(SEES[case].processor, pictures)
    try:
        return greedy_tokens(model, ids, max_tokens, inputs)
    finally:
        vars(model.model).pop("get_audio_features", None)


def _inverted(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The arguments of Gemma 3n's encoder, whose mask tells what is not heard."""
    return {**inputs, "input_features_mask": ~inputs["input_features_mask"].bool()}


def _joined(encoded: Sequence[Any]) -> Any:
    """The output for several pieces of audio, which are filled up to the longest."""
    longest = max(output.pooler_output.shape[1] for output in encoded)
    joined = copy.copy(encoded[0])
    padded = [longest - output.pooler_output.shape[1] for output in encoded]
    joined.pooler_output = torch.cat(
        [F.pad(output.pooler_output, (0, 0, 0, count)) for output, count in zip(encoded, padded, strict=True)]
    )
    joined.audio_mel_mask = torch.cat(
        [F.pad(output.audio_mel_mask, (0, count), value=True) for output, count in zip(encoded, padded, strict=True)]
    )
    return joined


@torch.inference_mode()
def expected_encoding(model: Any, case: str, samples: Samples) -> torch.Tensor:
    """The embeddings of audio that transformers makes, without those that fill up its tokens."""
    inputs = audio_inputs(case, [samples])
    output = model.model.get_audio_features(**(_inverted(inputs) if case == "gemma3n" else inputs))
    valid = ~output.audio_mel_mask if case == "gemma3n" else output.attention_mask
    embeddings: torch.Tensor = output.pooler_output[valid]
    return embeddings
