"""Small transducers that transcribe audio in chunks, with random weights, and what transformers makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import NemotronAsrStreamingConfig, NemotronAsrStreamingFeatureExtractor, NemotronAsrStreamingForRNNT

from quire.engine.client.protocol import AudioItem
from quire.engine.client.streaming import TransducerInfo
from quire.engine.execution.cache_layout import CacheLayout
from quire.engine.execution.state_slots import StateSlots, slot_bytes
from quire.engine.execution.states import StateCaches
from quire.engine.models.model_config import read_model_config
from quire.engine.models.networks.transducer import TransducerModel
from tests.support.models import draw_weights

MELS, FACTOR = 16, 8  # rows of features, and columns of a frame
LOOKAHEAD, WINDOW = 3, 13  # frames
CHUNK = LOOKAHEAD + 1
MAX_SYMBOLS = 3
PIECES = ["<unk>", *(f"\u2581{letter}" for letter in "abcdefghijkl"), *"abcdefghijklmnopqrst", "<blank>"]
BLANK = len(PIECES) - 1
Features = NDArray[np.float32]


def make_transducer(*, seed: int = 1, encoder: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A model in float32, whose weights are large enough for distinct tokens.

    Args:
        seed: of its weights.
        encoder: changes of the config of its encoder.
        changes: of its config.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    encoder_config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "subsampling_conv_channels": 8,
        "conv_kernel_size": 5,
        "num_mel_bins": MELS,
        "sliding_window": WINDOW,
        "default_num_lookahead_tokens": LOOKAHEAD,
        **(encoder or {}),
    }
    config = NemotronAsrStreamingConfig(
        **{
            "vocab_size": len(PIECES),
            "blank_token_id": BLANK,
            "decoder_hidden_size": 24,
            "max_symbols_per_step": MAX_SYMBOLS,
            "encoder_config": encoder_config,
            **changes,
        }
    )
    model: Any = NemotronAsrStreamingForRNNT(config).eval()
    draw_weights(model, "nemotron_asr_streaming")
    model.generation_config.decoder_start_token_id = BLANK
    _spread(model)
    return model


def _spread(model: Any) -> None:
    """Change the biases so that about half of the tokens are blanks, and the others differ."""
    model.joint.head.weight.data *= 3
    audio = features(99, 400, model.config.encoder_config.num_mel_bins)
    with torch.inference_mode():
        encoded = model.get_audio_features(**offline(audio)).pooler_output[0]
        first = model.decoder(torch.tensor([[BLANK]]))[0]
        logits = model.joint(first, encoded)
        model.joint.head.bias.data -= logits.mean(0)
        spare = (logits - logits.mean(0)).max(1).values
        model.joint.head.bias.data[BLANK] += 1.2 * float(spare.mean())
        model.joint.head.bias.data[0] = -100.0  # no text that is not shown


def offline(audio: Features) -> dict[str, torch.Tensor]:
    """Features of whole audio as transformers' extractor gives them: with a column of zeros that is masked."""
    padded = torch.from_numpy(np.concatenate((audio, np.zeros((len(audio), 1), np.float32)), 1)).T[None].clone()
    mask = torch.ones(padded.shape[:2], dtype=torch.long)
    mask[:, -1] = 0
    return {"input_features": padded, "attention_mask": mask}


def states_of_one_sequence(model: TransducerModel) -> StateCaches:
    """The states of a sequence in row 0."""
    kinds = CacheLayout({}, model.cache_groups()).states
    return StateCaches(StateSlots(torch.zeros(1, slot_bytes(kinds), dtype=torch.uint8), kinds), 1)


def save_transducer(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model with its tokenizer and the config of its feature extractor."""
    model.save_pretrained(folder, **options)
    transducer_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>"}))
    extractor = NemotronAsrStreamingFeatureExtractor(feature_size=model.config.encoder_config.num_mel_bins)
    processor = {
        "feature_extractor": json.loads(extractor.to_json_string()),
        "blank_token": "<blank>",
        "supported_num_lookahead_tokens": [13, 6, LOOKAHEAD, 1, 0],
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


@lru_cache(maxsize=1)
def transducer_tokenizer() -> tokenizers.Tokenizer:
    """Pieces that begin with a mark where a word begins, as of sentencepiece."""
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({text: token for token, text in enumerate(PIECES)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<blank>")])
    return tokenizer


def transducer_info(folder: Path) -> TransducerInfo:
    """The facts about a model that its folder contains."""
    info = read_model_config(folder).facts.streaming
    assert isinstance(info, TransducerInfo)
    return info


def features(seed: int, columns: int, mels: int = MELS) -> Features:
    """Random features of so many columns."""
    features: Features = np.random.default_rng(seed).normal(-6, 4, (mels, columns)).astype(np.float32)
    return features


def audio_of(part: Features) -> AudioItem:
    """The item of features."""
    return AudioItem(hash=b"", features=np.ascontiguousarray(part))


def expected_tokens(model: Any, audio: Features) -> list[int]:
    """Greedy tokens of transformers' `generate` for whole audio, with the blanks."""
    with torch.inference_mode():
        out = model.generate(**offline(audio), num_lookahead_tokens=_lookahead(model), max_new_tokens=1 << 20)
    return [int(token) for token in out.sequences[0, 1:]]


def expected_live_tokens(model: Any, audio: Features) -> list[int]:
    """Those for audio that arrives in chunks, which transformers accepts only whole."""
    lookahead = _lookahead(model)

    def chunks() -> Iterator[torch.Tensor]:
        at, size = 0, 1 + FACTOR * lookahead
        while at < audio.shape[1]:
            yield torch.from_numpy(audio[:, at : at + size]).T[None]
            at, size = at + size, FACTOR * (lookahead + 1)

    with torch.inference_mode():
        out = model.generate(input_features=chunks(), num_lookahead_tokens=lookahead, max_new_tokens=1 << 20)
    return [int(token) for token in out.sequences[0, 1:]]


def _lookahead(model: Any) -> int:
    lookahead: int = model.config.encoder_config.default_num_lookahead_tokens
    return lookahead


def text_of(tokens: list[int]) -> str:
    """The text that a client gets for generated tokens."""
    return transducer_tokenizer().decode([token for token in tokens if token != BLANK]).strip()
