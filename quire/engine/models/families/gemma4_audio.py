"""Audio of Gemma 4: a conformer with local attention, or, in the unified models, a projection of samples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client.audio import AudioInfo, AudioLengths
from quire.engine.client.json_file import read_json
from quire.engine.client.protocol import AudioItem
from quire.engine.models.config.feature_extractor import SAMPLE_RATE, Extractor, check_extractor, read_extractor
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.family import AudioTower, Composite
from quire.engine.models.specs.decoder import DecoderSpec

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_READ = re.compile(r"(?:model\.)?(?P<name>(?:audio_tower|embed_audio)\..*)")
_EMBEDDER = re.compile(r"(?:model\.)?(?P<name>embed_audio\..*)")
_BANDS = 128  # of features, if the config of the extractor does not say
# What other values would change is not implemented.
_FIXED: dict[str, Any] = {
    "sampling_rate": SAMPLE_RATE,
    "frame_length_ms": 20.0,
    "hop_length_ms": 10.0,
    "min_frequency": 0.0,
    "max_frequency": 8000.0,
    "preemphasis": 0.0,
    "fft_overdrive": False,
    "dither": 0.0,
    "input_scale_factor": 1.0,
    "mel_floor": 1e-3,
    "per_bin_mean": None,
    "per_bin_stddev": None,
}
_HALVINGS = 2  # of columns and of rows, by the convolutions in front of the conformer
_MOST_TOKENS = 750  # of a piece of audio, if the config of the processor does not say
_MOST_SECONDS = 30  # of audio, which transformers' extractor cuts off


def _module_name(name: str) -> str | None:
    """The name of a tensor in transformers' model; None if it belongs to another part."""
    match = _READ.fullmatch(name)
    return None if match is None else match["name"]


def _embedder_name(name: str) -> str | None:
    match = _EMBEDDER.fullmatch(name)
    return None if match is None else match["name"]


def _encode(model: Any, features: Tensor, _: AudioItem) -> Tensor:
    """The conformer's layers are called one by one: its own mask depends on the implementation of attention."""
    tower = model.audio_tower
    x, _mask = tower.subsample_conv_projection(features.T[None])
    hidden, distances = _hidden(tower.config, x.shape[1], x), tower.rel_pos_enc(x)
    for layer in tower.layers:
        x = layer(x, attention_mask=hidden, position_embeddings=distances)
    embeddings: Tensor = model.embed_audio(inputs_embeds=tower.output_proj(x))[0]
    return embeddings


def _hidden(config: Any, length: int, x: Tensor) -> Tensor:
    """Which positions queries do not see: (1, 1, blocks, queries of a block, positions around it)."""
    import torch  # noqa: PLC0415 families are read without it

    block, before, after = (
        config.attention_chunk_size,
        config.attention_context_left - 1,
        config.attention_context_right,
    )
    starts = torch.arange(0, length, block, device=x.device)[:, None, None]
    queries = starts + torch.arange(block, device=x.device)[:, None]
    keys = starts + torch.arange(-before, block + after, device=x.device)
    distances = queries - keys
    # The window does not reach as far as the positions around a block, on neither side.
    is_seen = (distances < before) & ((distances >= 0) | (-distances < after)) & (keys >= 0) & (keys < length)
    hidden: Tensor = ~is_seen[None, None]
    return hidden


def _encode_frames(model: Any, features: Tensor, _: AudioItem) -> Tensor:
    # transformers' embedder looks at the weight of its linear layer, which is packed here.
    embedder = model.embed_audio
    embeddings: Tensor = embedder.embedding_projection(embedder.embedding_pre_projection_norm(features.T))
    return embeddings


def _facts(folder: Path, config: Any, spec: DecoderSpec) -> AudioInfo | None:
    if config.audio_config is None:
        return None
    _check(config.audio_config)
    extractor = read_extractor(folder)
    check_extractor(extractor, _FIXED)
    bands, channels = _number(extractor, "feature_size", _BANDS), config.audio_config.subsampling_conv_channels
    if -(-bands // 4) != channels[0] // 4:
        raise UnsupportedModel(f"the feature extractor makes {bands} rows, but the encoder reads {channels[0]}")
    columns = min(_tokens(folder) << _HALVINGS, 100 * _MOST_SECONDS)
    return AudioInfo(
        **_shared_facts(folder, config, spec),
        features="semicausal_log_mel",
        num_mel_bins=bands,
        item_columns=columns,
        lengths=AudioLengths(columns, _HALVINGS, 1),
    )


def _facts_of_frames(folder: Path, config: Any, spec: DecoderSpec) -> AudioInfo | None:
    if config.audio_config is None:
        return None
    extractor = read_extractor(folder)
    size = config.audio_config.audio_embed_dim
    check_extractor(extractor, {"sampling_rate": SAMPLE_RATE, "audio_samples_per_token": size, "feature_size": size})
    if type(size) is not int or size < 1:
        raise UnsupportedModel(f"audio_config: audio_embed_dim is {size!r}, not a positive number")
    columns = _tokens(folder)
    return AudioInfo(
        **_shared_facts(folder, config, spec),
        features="sample_frames",
        num_mel_bins=size,
        column_samples=size,
        item_columns=columns,
        lengths=AudioLengths(columns, 0, 1),
    )


def _shared_facts(folder: Path, config: Any, spec: DecoderSpec) -> dict[str, Any]:
    placeholder = check_placeholder(config.audio_token_id, spec.vocab)
    return {
        "kind": "gemma4",
        "placeholder": placeholder,
        "placeholder_text": text_of(folder, placeholder),
        "before": text_of(folder, config.boa_token_id, "<|audio>"),
        "after": text_of(folder, config.eoa_token_index, "<audio|>"),
        "sample_rate": SAMPLE_RATE,
        "max_items": 1,
    }


def _tokens(folder: Path) -> int:
    """Most tokens of a piece of audio."""
    return _number(read_json(folder / "processor_config.json", BrokenFolder), "audio_seq_length", _MOST_TOKENS)


def _number(config: Extractor, name: str, default: int) -> int:
    value = config.get(name, default)
    if type(value) is not int or value < 1:
        raise UnsupportedModel(f"the config of the processor: {name} is {value!r}, not a positive number")
    return value


def _check(audio: Any) -> None:
    """Raise UnsupportedModel if the encoder cannot run."""
    least = {"attention_chunk_size": 1, "attention_context_left": 2, "attention_context_right": 0}
    least |= {"conv_kernel_size": 1, "num_attention_heads": 1, "num_hidden_layers": 1, "hidden_size": 2}
    for name, bound in least.items():
        value = getattr(audio, name)
        if type(value) is not int or value < bound:
            raise UnsupportedModel(f"audio_config: {name} is {value!r}; supported are numbers from {bound}")
    hidden, heads = audio.hidden_size, audio.num_attention_heads
    if hidden % heads or hidden % 2:
        raise UnsupportedModel(f"audio_config: a hidden size of {hidden} cannot be split into {heads} heads and halves")
    if len(audio.subsampling_conv_channels) != _HALVINGS or min(audio.subsampling_conv_channels) < 1:
        raise UnsupportedModel(
            f"audio_config: subsampling_conv_channels is {audio.subsampling_conv_channels!r}, not two positive numbers"
        )


FAMILIES: tuple[Composite, ...] = ()  # those of `gemma4_vision` have these parts
CONFORMER = AudioTower(facts=_facts, encode=_encode, module_name=_module_name, modules=("audio_tower", "embed_audio"))
FRAMES = AudioTower(facts=_facts_of_frames, encode=_encode_frames, module_name=_embedder_name, modules=("embed_audio",))
