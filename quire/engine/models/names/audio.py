"""Names of the tensors of language models that read audio."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire.engine.models.names.granite_speech import granite_speech_names, split_keys
from quire.engine.models.names.llama import LLAMA
from quire.engine.models.names.phi4_multimodal import join_biases, phi4_multimodal_names
from quire.engine.models.names.rules import KIND, WeightNames, linear_weight
from quire.engine.models.names.whisper import encoder_rules
from quire.engine.models.spec import AudioEncoderSpec

_PROJECTOR = (
    (r"multi_modal_projector\.linear(?:_1)?" + KIND, "encoder.projector.linears.0.{kind}"),
    (r"multi_modal_projector\.linear_2" + KIND, "encoder.projector.linears.1.{kind}"),
)
_TOWER = r"audio_tower\."
_CHUNKED = (
    (_TOWER + r"conv2d(?P<conv>1|2|3)" + KIND, "encoder.stem.conv{conv}.{kind}"),
    (_TOWER + r"conv_out\.weight", "encoder.stem.out.weight"),
    (_TOWER + r"ln_post" + KIND, "encoder.norm.{kind}"),
)
# With and without the name of the model around all of it, as transformers has written them at different times.
_PREFIXES = r"(?:model\.)?language_model\.(?:model\.)?|model\.(?=audio_tower\.|multi_modal_projector\.)"
_IGNORED = rf"{LLAMA.ignored}|lm_head\.weight"


def _square_convolution(weight: Tensor) -> Tensor:
    """(outputs, inputs, height, width) as the weight of a linear layer, see `ChunkedConvStemLayer`."""
    return weight.permute(0, 2, 3, 1).flatten(1)


_WHISPER_LIKE = WeightNames(
    (*LLAMA.rules, *encoder_rules(_TOWER), *_PROJECTOR),
    prefixes=_PREFIXES,
    ignored=_IGNORED,
    convert={f"encoder.stem.conv{index}.weight": linear_weight for index in (1, 2)},
    zero_keys=r"encoder\.layers\.\d+\.attn\.qkv\.bias",
)
_QWEN3_ASR = WeightNames(
    (*LLAMA.rules, *encoder_rules(_TOWER), *_CHUNKED, *_PROJECTOR),
    prefixes=_PREFIXES,
    ignored=_IGNORED,
    convert={f"encoder.stem.conv{index}.weight": _square_convolution for index in (1, 2, 3)},
)
_AUDIO_NAMES = {"qwen2_audio": _WHISPER_LIKE, "voxtral": _WHISPER_LIKE, "qwen3_asr": _QWEN3_ASR}
_GRANITE = ("granite_speech", "granite_speech_plus")


def audio_names(model_type: str, encoder: AudioEncoderSpec) -> WeightNames:
    """How the checkpoints of a language model that reads audio name their tensors."""
    if model_type in _GRANITE:
        return granite_speech_names(encoder)
    return phi4_multimodal_names(encoder) if model_type == "phi4_multimodal" else _AUDIO_NAMES[model_type]


def audio_tensors(model_type: str, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """The tensors of a checkpoint, split or joined as the model's parameters are."""
    if model_type in _GRANITE:
        return split_keys(tensors)
    return join_biases(tensors) if model_type == "phi4_multimodal" else tensors
