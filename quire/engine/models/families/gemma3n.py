"""Gemma 3n: MobileNet V5 for pictures, and a conformer with local attention for audio.

Tokens behind those of text have embeddings of their own, as the ends of pictures and audio do.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client.audio import AudioInfo, WindowLengths
from quire.engine.client.json_file import read_json
from quire.engine.client.pictures import PictureInfo
from quire.engine.client.protocol import AudioItem, PictureItem
from quire.engine.models.config.feature_extractor import SAMPLE_RATE, check_extractor, read_extractor
from quire.engine.models.config.image_processor import ImageProcessor
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.families.vision_language import vision_language_model
from quire.engine.models.family import AudioTower, PictureFacts, Tower
from quire.engine.models.specs.decoder import DecoderSpec

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_SEEN = re.compile(r"(?:model\.)?(?P<name>(?:vision_tower|embed_vision|embed_audio)\..*)")
_HEARD = re.compile(r"(?:model\.)?(?P<name>audio_tower\..*)")
_ARCHITECTURE = "mobilenetv5_300m_enc"
_FEATURES = 2048  # channels of its result
_RESOLUTION = 16  # rows and columns of it, if the config does not say
# What other values would change is not implemented.
_FIXED: dict[str, Any] = {
    "sampling_rate": SAMPLE_RATE,
    "frame_length_ms": 32.0,
    "hop_length_ms": 10.0,
    "min_frequency": 125.0,
    "max_frequency": 7600.0,
    "preemphasis": 0.97,
    "preemphasis_htk_flavor": True,
    "fft_overdrive": True,
    "dither": 0.0,
    "input_scale_factor": 1.0,
    "mel_floor": 1e-5,
    "per_bin_mean": None,
    "per_bin_stddev": None,
}
_SUBSAMPLED = 4  # columns that become a position of the conformer
_MOST_SECONDS = 30  # of audio, which transformers' extractor cuts off


def _module_name(name: str) -> str | None:
    """The name of a tensor in transformers' model; None if pictures and texts do not need it."""
    match = _SEEN.fullmatch(name)
    return None if match is None else match["name"]


def _audio_name(name: str) -> str | None:
    match = _HEARD.fullmatch(name)
    return None if match is None else match["name"]


def _encode(model: Any, pixels: Tensor, _: PictureItem) -> Tensor:
    features = model.vision_tower.timm_model(pixels).flatten(2).transpose(1, 2)
    scaled = features * model.config.vision_config.hidden_size**0.5
    embeddings: Tensor = model.embed_vision(inputs_embeds=scaled).flatten(0, 1)
    return embeddings


def _encode_audio(model: Any, features: Tensor, item: AudioItem) -> Tensor:
    """The number of tokens is always the same: those behind the audio have the last token's embedding."""
    import torch  # noqa: PLC0415 families are read without it

    is_padding = torch.zeros(1, features.shape[1], dtype=torch.bool, device=features.device)
    encoded = model.audio_tower(features.T[None], is_padding).last_hidden_state
    embedded = model.embed_audio(inputs_embeds=encoded)[0]
    last = torch.tensor([[model.config.text_config.vocab_size - 1]], device=features.device)
    padding = model.embed_audio(input_ids=last)[0]
    return torch.cat((embedded, padding.expand(item.length - len(embedded), -1)))


def _token_embeddings(model: Any) -> tuple[int, Tensor]:
    """The first token that is not one of text, and the embeddings of this and all later ones."""
    import torch  # noqa: PLC0415 families are read without it

    parts = []
    for embedder in (model.embed_vision, model.embed_audio):
        tokens = torch.arange(embedder.vocab_size, device=embedder.embedding.weight.device)
        parts.append(embedder(input_ids=tokens + embedder.vocab_offset))
    return model.embed_vision.vocab_offset, torch.cat(parts)


def _facts(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    tokens = _tokens_of_a_picture(config)
    _check_vocabulary(config)
    processor = ImageProcessor.read(folder, "siglip")
    placeholder = _placeholder(config, spec, "image_token_id")
    begin, end = (
        text_of(folder, config.boi_token_id, "<start_of_image>"),
        text_of(folder, config.eoi_token_id, "<end_of_image>"),
    )
    info = PictureInfo(
        placeholder=placeholder,
        placeholder_text=text_of(folder, placeholder, "<image_soft_token>"),
        geometry=processor.fixed_size(tokens),
        before=f"\n\n{begin}",
        after=f"{end}\n\n",
    )
    return PictureFacts(info=info, normalization=processor.normalization())


def _tokens_of_a_picture(config: Any) -> int:
    vision, tokens = config.vision_config, config.vision_soft_tokens_per_image
    if vision.architecture != _ARCHITECTURE:
        raise UnsupportedModel(
            f"vision_config: architecture is {vision.architecture!r}; supported is {_ARCHITECTURE!r}"
        )
    if vision.hidden_size != _FEATURES:
        raise UnsupportedModel(f"vision_config: hidden_size is {vision.hidden_size!r}; supported is {_FEATURES}")
    fields = dict(vision.model_args or {})
    multiplier, edge = fields.pop("channel_multiplier", 1.0), fields.pop("msfa_output_resolution", _RESOLUTION)
    if fields:
        raise UnsupportedModel(f"vision_config: model_args has {sorted(fields)[0]!r}, which is not supported")
    if type(multiplier) not in (int, float) or not 0 < multiplier <= 1:
        raise UnsupportedModel(f"vision_config: channel_multiplier is {multiplier!r}; supported are numbers up to 1")
    if type(edge) is not int or edge < 1 or edge**2 != tokens:
        raise UnsupportedModel(
            f"vision_soft_tokens_per_image is {tokens!r}, but the tower makes {edge!r} rows and columns of them"
        )
    return edge**2


def _check_vocabulary(config: Any) -> None:
    """Raise UnsupportedModel unless tokens of text, of pictures and of audio follow each other."""
    vision, audio, vocab = config.vision_config, config.audio_config, config.text_config.vocab_size
    end = audio.vocab_offset + audio.vocab_size
    if vision.vocab_offset + vision.vocab_size != audio.vocab_offset or vision.vocab_offset < 1 or end != vocab:
        raise UnsupportedModel(
            f"the tokens of pictures begin at {vision.vocab_offset}, those of audio at {audio.vocab_offset}, and end "
            f"at {end}: they must follow each other, and end with the vocabulary, at {vocab}"
        )


def _placeholder(config: Any, spec: DecoderSpec, name: str) -> int:
    placeholder = check_placeholder(getattr(config, name), spec.vocab, name)
    if placeholder < config.text_config.vocab_size_per_layer_input:
        raise UnsupportedModel(f"{name} is {placeholder}, which has inputs of layers as a token of text")
    return placeholder


def _audio_facts(folder: Path, config: Any, spec: DecoderSpec) -> AudioInfo:
    audio, tokens = config.audio_config, config.audio_soft_tokens_per_image
    _check_encoder(audio)
    extractor = read_extractor(folder)
    check_extractor(extractor, {**_FIXED, "feature_size": audio.input_feat_size})
    configured = read_json(folder / "processor_config.json", BrokenFolder).get("audio_seq_length", tokens)
    if type(tokens) is not int or tokens < 1 or configured != tokens:
        raise UnsupportedModel(
            f"audio_soft_tokens_per_image is {tokens!r}, and audio_seq_length of the processor {configured!r}; "
            "supported are equal positive numbers"
        )
    columns = min(tokens * _SUBSAMPLED * audio.conf_reduction_factor, 100 * _MOST_SECONDS)
    placeholder = _placeholder(config, spec, "audio_token_id")
    return AudioInfo(
        kind="gemma3n",
        placeholder=placeholder,
        placeholder_text=text_of(folder, placeholder, "<audio_soft_token>"),
        before=f"\n\n{text_of(folder, config.boa_token_id, '<start_of_audio>')}",
        after=f"{text_of(folder, config.eoa_token_id, '<end_of_audio>')}\n\n",
        sample_rate=SAMPLE_RATE,
        features="preemphasized_log_mel",
        num_mel_bins=audio.input_feat_size,
        item_columns=columns,
        lengths=WindowLengths(columns, tokens),
        max_items=1,
    )


def _check_encoder(audio: Any) -> None:
    """Raise UnsupportedModel if the encoder cannot run."""
    least = {"conf_attention_chunk_size": 1, "conf_attention_context_left": 1, "conf_attention_context_right": 0}
    least |= {"conf_num_attention_heads": 1, "conf_conv_kernel_size": 1, "conf_reduction_factor": 1}
    for name, bound in least.items():
        value = getattr(audio, name)
        if type(value) is not int or value < bound:
            raise UnsupportedModel(f"audio_config: {name} is {value!r}; supported are numbers from {bound}")
    hidden, heads = audio.hidden_size, audio.conf_num_attention_heads
    if hidden % heads or hidden % 2:
        raise UnsupportedModel(f"audio_config: a hidden size of {hidden} cannot be split into {heads} heads and halves")
    for name, value in (("sscp_conv_kernel_size", [[3, 3]] * 2), ("sscp_conv_stride_size", [[2, 2]] * 2)):
        if [list(pair) for pair in getattr(audio, name)] != value:
            raise UnsupportedModel(f"audio_config: {name} is {getattr(audio, name)!r}; supported is {value}")


_AUDIO = AudioTower(facts=_audio_facts, encode=_encode_audio, module_name=_audio_name, modules=("audio_tower",))
_TOWER = Tower(
    language_model="language_model",
    facts=_facts,
    encode=_encode,
    module_name=_module_name,
    audio=_AUDIO,
    token_embeddings=_token_embeddings,
)
FAMILIES = (vision_language_model("gemma3n", _TOWER),)
