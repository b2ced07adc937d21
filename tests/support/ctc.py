"""Small CTC models with random weights, and what transformers computes with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    HubertConfig,
    HubertForCTC,
    ParakeetCTCConfig,
    ParakeetFeatureExtractor,
    ParakeetForCTC,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
)

from tests.support.audio import voice
from tests.support.models import draw_weights

# The vocabulary of wav2vec 2.0: special tokens, the space, letters.
CHARACTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ETAONIHSRDLUMWCFGYPBVK'XJQZ"]
PIECES = ["<unk>", "<s>", "</s>", *(f"\u2581{letter}" for letter in "abcdefgh"), *"abcdefghijklmnopqrst", "<pad>"]
BANDS = 16
_WAVE: dict[str, Any] = {
    "vocab_size": len(CHARACTERS),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 24, 16),
    "conv_kernel": (10, 8, 5),
    "conv_stride": (10, 8, 4),
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 4,
}
_STABLE = {
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
    "conv_bias": True,
    "num_conv_pos_embeddings": 7,
    "feat_extract_activation": "relu",
}
_CONFORMER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "subsampling_conv_channels": 8,
    "num_mel_bins": BANDS,
}
KINDS = ("wav2vec2", "wav2vec2, norms first", "hubert", "parakeet", "parakeet without biases")


def make_ctc(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """A model of one of `KINDS` in float32, with weights large enough for distinct logits."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    model: Any
    match kind:
        case "wav2vec2":
            model = Wav2Vec2ForCTC(Wav2Vec2Config(**{**_WAVE, **changes}))
        case "wav2vec2, norms first":
            model = Wav2Vec2ForCTC(Wav2Vec2Config(**{**_WAVE, **_STABLE, **changes}))
        case "hubert":
            model = HubertForCTC(HubertConfig(**{**_WAVE, "feat_proj_layer_norm": False, **changes}))
        case _:
            without = {"attention_bias": False, "convolution_bias": False, "scale_input": False}
            encoder = {**_CONFORMER, **(without if "without" in kind else {}), **changes}
            config = ParakeetCTCConfig(vocab_size=len(PIECES), pad_token_id=len(PIECES) - 1, encoder_config={**encoder})
            model = ParakeetForCTC(config)
    model = model.eval()
    draw_weights(model, kind)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            torch.nn.init.normal_(buffer, std=0.2)
        if name.endswith("running_var"):
            torch.nn.init.uniform_(buffer, 0.5, 2.0)
    head = model.ctc_head if "parakeet" in kind else model.lm_head
    head.weight.data *= 3
    head.bias.data -= _logits(model, voice(1.0)).mean(0)  # else one token would be the likeliest everywhere
    words = PIECES if "parakeet" in kind else CHARACTERS
    for token, text in enumerate(words):  # no text that is not shown
        if text in ("<s>", "</s>", "<unk>"):
            head.bias.data[token] = -100.0
    return model


def save_ctc(model: Any, folder: Path) -> Path:
    """Save a model with its tokenizer and the settings of its features."""
    model.save_pretrained(folder)
    if isinstance(model, ParakeetForCTC):
        _piece_tokenizer().save(str(folder / "tokenizer.json"))
        extractor: Any = ParakeetFeatureExtractor(feature_size=BANDS)
    else:
        (folder / "vocab.json").write_text(json.dumps({text: token for token, text in enumerate(CHARACTERS)}))
        extractor = Wav2Vec2FeatureExtractor()
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "unk_token": "<unk>"}))
    extractor.save_pretrained(folder)
    return folder


def _piece_tokenizer() -> Tokenizer:
    """Pieces that begin with a mark where a word begins, as of sentencepiece."""
    tokenizer = Tokenizer(models.WordLevel({text: token for token, text in enumerate(PIECES)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>", "<pad>")])
    return tokenizer


def expected_positions(model: Any, samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """The likeliest token of each position and its log-probability, by transformers: (positions, 2)."""
    logprobs, tokens = _logits(model, samples).log_softmax(-1).max(-1)
    return torch.stack((tokens.float(), logprobs), 1).numpy()


def _logits(model: Any, samples: NDArray[np.float32]) -> torch.Tensor:
    """(positions, tokens)."""
    with torch.inference_mode():
        if not isinstance(model, ParakeetForCTC):
            values = Wav2Vec2FeatureExtractor()(samples, sampling_rate=16_000, return_tensors="pt").input_values
            logits: torch.Tensor = model(values).logits[0].clone()
            return logits
        features = ParakeetFeatureExtractor(feature_size=BANDS)(samples, sampling_rate=16_000)
        logits = model(**features).logits[0].clone()
        return logits[: int(model._get_subsampling_output_length(features["attention_mask"].sum(-1)))]
