"""Small language models that read audio, with random weights, and what transformers generates with them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import AutoConfig, WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank

from quire.engine.client.audio import AudioInfo
from quire.engine.client.protocol import AudioItem
from quire.multimodal.audio.items import audio_items, token_count
from tests.support.models import draw_weights
from tests.support.tiny_configs import TEXT

KINDS = ("qwen2_audio", "voxtral", "qwen3_asr", "granite_speech", "granite_speech_plus", "phi4_multimodal")
PLACEHOLDER, MELS = 290, 16
RATE, SECOND = 16_000, 16_000
_STACKED = ("granite_speech", "granite_speech_plus")
Samples = NDArray[np.float32]

_ENCODER = {"num_mel_bins": MELS, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4}
ADAPTED = {  # Granite Speech Plus has no adapter here
    "granite_speech": ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
    "phi4_multimodal": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}
_CONFORMER = {
    "input_dim": MELS,
    "num_layers": 3,
    "hidden_dim": 32,
    "feedforward_mult": 2,
    "num_heads": 4,
    "dim_head": 6,
    "output_dim": 10,
    "context_size": 20,
    "max_pos_emb": 24,
    "conv_kernel_size": 6,
    "conv_expansion_factor": 2,
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
}
_QUERIES = {
    "model_type": "blip_2_qformer",
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    # Windows of a second: 50 positions become 25 tokens, 12 here for each item and less for shorter audio.
    "qwen2_audio": {
        "audio_config": {**_ENCODER, "encoder_ffn_dim": 48, "max_source_positions": 50},
        "text_config": {"model_type": "qwen2", **TEXT},
        "audio_token_index": PLACEHOLDER,
    },
    "voxtral": {
        "audio_config": {
            "num_mel_bins": MELS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_source_positions": 50,
        },
        "text_config": {"model_type": "llama", **TEXT},
        "audio_token_id": PLACEHOLDER,
    },
    "qwen3_asr": {
        "audio_config": {
            **_ENCODER,
            "encoder_ffn_dim": 48,
            "n_window": 50,
            "n_window_infer": 200,
            "output_dim": 64,
            "downsample_hidden_size": 24,
        },
        "text_config": {"model_type": "qwen3", **TEXT},
        "audio_token_id": PLACEHOLDER,
        "tie_word_embeddings": True,
        "eos_token_id": 255,
        "pad_token_id": 255,
    },
    # A second of audio has 50 positions, in blocks of 20, and 12 tokens.
    "granite_speech": {
        "encoder_config": _CONFORMER,
        "projector_config": {**_QUERIES, "cross_attention_frequency": 1, "encoder_hidden_size": 32},
        "text_config": {"model_type": "granite", **TEXT, **_GRANITE},
        "audio_token_index": PLACEHOLDER,
    },
    "granite_speech_plus": {
        "encoder_config": {**_CONFORMER, "cat_hidden_layers": [2, 0, 1]},
        "projector_config": {**_QUERIES, "cross_attention_frequency": 2, "encoder_hidden_size": 4 * 32},
        "text_config": {"model_type": "granite", **TEXT, **_GRANITE},
        "audio_token_index": PLACEHOLDER,
        "tie_word_embeddings": False,
    },
    # A second of audio has 13 positions; 40 seconds are a chunk.
    "phi4_multimodal": {
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_blocks": 2,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "input_size": MELS,
            "nemo_conv_channels": 12,
            "bias_max_distance": 30,
            "audio_token_id": PLACEHOLDER,
        },
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "crop_size": 28,
            "image_token_id": PLACEHOLDER + 1,
        },
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        **TEXT,
    },
}


def make_audio_model(
    kind: str, *, seed: int = 0, text: dict[str, Any] | None = None, placeholder: int = PLACEHOLDER, **changes: Any
) -> Any:
    """A model in float32, with weights large enough for distinct logits.

    Args:
        kind: its type.
        seed: of its weights.
        text: changes of the config of its language model.
        placeholder: the token that stands for audio.
        changes: of its config.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    fields = {**_CONFIGS[kind], **changes}
    if kind == "phi4_multimodal":
        fields["audio_config"] = {**fields["audio_config"], "audio_token_id": placeholder}
    else:
        name = "audio_token_id" if "audio_token_id" in fields else "audio_token_index"
        fields[name] = placeholder
    if "text_config" in fields:
        fields["text_config"] = {**fields["text_config"], **(text or {})}
    config = AutoConfig.for_model(kind, **(fields if "text_config" in fields else {**fields, **(text or {})}))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    draw_weights(model, kind)
    if kind in _STACKED:
        first = model.model.encoder.input_linear.weight.data  # of features that differ by a few percent
        first.copy_(30 * (first - first.mean(1, keepdim=True)))
        # transformers reads token 0 where the placeholder is generated, so it must not be
        model.get_output_embeddings().weight.data[model.config.audio_token_id] = 0.0
    if kind == "phi4_multimodal":
        draw_statistics(model)
    if getattr(model.config, "tie_word_embeddings", False):
        model.tie_weights()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    if kind in ADAPTED:
        model.adapted = (adapt(model, ADAPTED[kind]),)  # in a tuple, so that it is not a module of the model
    return model


def draw_statistics(model: Any) -> None:
    """Give bands of features statistics, which are no parameters."""
    embedding = model.model.embed_tokens_extend.audio_embed.encoder.encoder_embedding
    embedding.global_mean.data = torch.linspace(5.0, 9.0, MELS)
    embedding.global_invstd.data = torch.linspace(0.2, 0.5, MELS)


def adapt(model: Any, modules: Sequence[str], *, rank: int = 4, seed: int = 9, alpha: float = 6.0) -> Any:
    """A model with an adapter of random weights for audio, which are in its `lora`, in PEFT's format.

    Returns:
        A copy of the model whose weights are those under the adapter.
    """
    adapted, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    model.lora = LoRA(config={"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules)})
    for name, module in adapted.named_modules():
        if name.rpartition(".")[2] not in modules or ".layers." not in name or "encoder" in name:
            continue
        outputs, inputs = module.weight.shape
        down, up = (torch.randn(*shape, generator=generator) * 0.2 for shape in ((rank, inputs), (outputs, rank)))
        module.weight.data += alpha / rank * up @ down
        model.lora.tensors[f"{name}.lora_A"], model.lora.tensors[f"{name}.lora_B"] = down, up
    return adapted


@dataclass
class LoRA:
    """An adapter: its config, and its weights by module and side."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the files that PEFT writes."""
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        names = {f"base_model.model.{name}.weight": tensor for name, tensor in self.tensors.items()}
        save_file(names, folder / "adapter_model.safetensors")


def save_audio_model(model: Any, folder: Path, **options: Any) -> Path:
    """Save a model with the config of its feature extractor, without a tokenizer."""
    model.save_pretrained(folder, **options)
    kind = model.config.model_type
    if kind in _STACKED:
        extractor = {"sampling_rate": RATE, "projector_window_size": 15, "projector_downsample_rate": 5}
    else:
        extractor = json.loads(feature_extractor(kind).to_json_string())
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    if hasattr(model, "lora"):
        model.lora.save(folder / "speech-lora" if kind == "phi4_multimodal" else folder)
    return folder


def config_fields(kind: str) -> dict[str, Any]:
    """The fields of the config of a tiny model."""
    return copy.deepcopy(_CONFIGS[kind])


@lru_cache
def feature_extractor(kind: str) -> Any:
    """transformers' feature extractor of a tiny model."""
    if kind == "qwen3_asr":
        from transformers import Qwen3ASRFeatureExtractor

        return Qwen3ASRFeatureExtractor(feature_size=MELS)
    if kind == "phi4_multimodal":
        from transformers import Phi4MultimodalFeatureExtractor

        return Phi4MultimodalFeatureExtractor(feature_size=MELS)
    return WhisperFeatureExtractor(feature_size=MELS, chunk_length=1)


def stacked_features(samples: Samples) -> torch.Tensor:
    """What transformers' GraniteSpeechFeatureExtractor makes of audio: (1, columns, rows). It needs torchaudio."""
    window = torch.hann_window(400)
    audio = torch.from_numpy(samples)
    power = torch.stft(audio, 512, 160, 400, window, pad_mode="reflect", return_complex=True).abs() ** 2
    filters = mel_filter_bank(257, MELS // 2, 0.0, 8000.0, RATE, mel_scale="htk").astype(np.float32)
    mels = (torch.from_numpy(filters).T @ power).T.clamp(min=1e-10).log10()
    scaled = torch.maximum(mels, mels.max() - 8.0) / 4 + 1
    return scaled[: len(scaled) // 2 * 2].reshape(1, -1, MELS)


def noise(seed: int, seconds: float) -> Samples:
    """Random samples."""
    generator = np.random.default_rng(seed)
    return generator.normal(0, 0.1, round(seconds * RATE)).astype(np.float32)


def span(samples: Samples, info: AudioInfo, start: int) -> list[AudioItem]:
    """The items of samples, whose placeholders begin at `start`."""
    return [msgspec.structs.replace(item, start=item.start + start) for item in audio_items(samples, info)]


def prompt_with(info: AudioInfo, *parts: Sequence[int] | Samples) -> tuple[list[int], tuple[AudioItem, ...]]:
    """The prompt of tokens and audio one behind the other, and its items."""
    tokens: list[int] = []
    items: list[AudioItem] = []
    for part in parts:
        if isinstance(part, np.ndarray):
            items += span(part, info, len(tokens))
            tokens += [info.placeholder] * token_count(len(part), info)
        else:
            tokens += part
    return tokens, tuple(items)


def transformers_inputs(kind: str, audios: Sequence[Samples]) -> dict[str, torch.Tensor]:
    """What transformers' processors make of audio."""
    if kind in _STACKED:
        (audio,) = audios
        return {"input_features": stacked_features(audio)}
    extract = feature_extractor(kind)
    if kind == "phi4_multimodal":
        (audio,) = audios
        return dict(extract(audio, sampling_rate=RATE))
    options: dict[str, Any] = {"sampling_rate": RATE, "return_tensors": "pt"}
    if kind == "qwen2_audio":
        extracted = extract(list(audios), padding="max_length", return_attention_mask=True, **options)
        return {"input_features": extracted["input_features"], "feature_attention_mask": extracted["attention_mask"]}
    if kind == "voxtral":
        chunks = []
        for audio in audios:
            features = extract(audio, padding=True, truncation=False, pad_to_multiple_of=RATE, **options)
            chunks.append(features["input_features"].reshape(MELS, -1, 100).transpose(0, 1))
        return {"input_features": torch.cat(chunks)}
    # Each by itself: of several, those that are not the longest would be followed by silence instead of zeros.
    extracted = [
        extract(audio, padding=True, truncation=False, return_attention_mask=True, **options) for audio in audios
    ]
    longest = max(features["input_features"].shape[-1] for features in extracted)

    def padded(name: str) -> torch.Tensor:
        parts = [features[name] for features in extracted]
        return torch.cat([torch.nn.functional.pad(part, (0, longest - part.shape[-1])) for part in parts])

    return {"input_features": padded("input_features"), "input_features_mask": padded("attention_mask")}


def expected_tokens(model: Any, prompt: Sequence[int], audios: Sequence[Samples], max_tokens: int) -> list[int]:
    """Greedy tokens of transformers' `generate`."""
    ids = torch.tensor([prompt])
    model = getattr(model, "adapted", (model,))[0] if audios else model
    kind = model.config.model_type
    if kind in (*_STACKED, "phi4_multimodal") and len(audios) > 1:
        return _of_embeddings(model, _merged_embeddings(model, ids, audios), max_tokens)
    inputs = transformers_inputs(kind, audios) if audios else {}
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            **inputs,
        )
    return [int(token) for token in out[0, len(prompt) :]]


def _merged_embeddings(model: Any, ids: torch.Tensor, audios: Sequence[Samples]) -> torch.Tensor:
    """The embeddings of a prompt, of which each piece of audio is encoded by itself.

    Of several together, transformers would encode the silence behind those that are not the longest.
    """
    if model.config.model_type == "phi4_multimodal":
        return _phi4_embeddings(model, ids, audios)
    with torch.inference_mode():
        inputs = [transformers_inputs(model.config.model_type, [audio]) for audio in audios]
        features = [model.get_audio_features(**model_inputs).pooler_output[0] for model_inputs in inputs]
        merged: torch.Tensor = model.model.get_merged_audio_embeddings(ids, torch.cat(features))
    return merged


def _phi4_embeddings(model: Any, ids: torch.Tensor, audios: Sequence[Samples]) -> torch.Tensor:
    embed = model.model.embed_tokens_extend.audio_embed
    with torch.inference_mode():
        merged: torch.Tensor = model.model.embed_tokens(ids)
        made = []
        for audio in audios:
            inputs = transformers_inputs("phi4_multimodal", [audio])
            encoded = embed.encoder(inputs["audio_input_features"], None)
            projected = embed.down_proj_for_speech(torch.nn.functional.gelu(embed.up_proj_for_speech(encoded)))
            made.append(projected[0, : int(inputs["audio_embed_sizes"][0])])
        merged[ids == model.config.audio_config.audio_token_id] = torch.cat(made)
    return merged


def _of_embeddings(model: Any, embeddings: torch.Tensor, max_tokens: int) -> list[int]:
    mask = torch.ones(embeddings.shape[:2], dtype=torch.long)
    with torch.inference_mode():
        out = model.generate(inputs_embeds=embeddings, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
    return [int(token) for token in out[0]]
