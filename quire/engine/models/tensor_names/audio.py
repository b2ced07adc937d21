"""Names of the tensors of language models that read audio."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire.engine.models.specs.decoder import AudioEncoderSpec
from quire.engine.models.tensor_names.granite_speech import granite_speech_names, split_keys
from quire.engine.models.tensor_names.llama import LLAMA
from quire.engine.models.tensor_names.phi4_multimodal import join_biases, phi4_multimodal_names
from quire.engine.models.tensor_names.rules import KIND, WeightNames, linear_weight
from quire.engine.models.tensor_names.whisper import encoder_rules

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


_CAUSAL_LAYER, _CAUSAL_TO = _TOWER + r"layers\.(?P<index>\d+)\.", "encoder.layers.{index}."
_CAUSAL = (
    (_TOWER + r"embedder\.conv(?P<conv>1|2)" + KIND, "encoder.stem.conv{conv}.{kind}"),
    (_CAUSAL_LAYER + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, _CAUSAL_TO + "attn.qkv.{kind}"),
    (_CAUSAL_LAYER + r"self_attn\.o_proj" + KIND, _CAUSAL_TO + "attn.out.{kind}"),
    (_CAUSAL_LAYER + r"self_attn_layer_norm\.weight", _CAUSAL_TO + "attn_norm.weight"),
    (_CAUSAL_LAYER + r"mlp\.(?P<part>gate|up)_proj\.weight", _CAUSAL_TO + "ffn.gate_up.weight"),
    (_CAUSAL_LAYER + r"mlp\.down_proj" + KIND, _CAUSAL_TO + "ffn.down.{kind}"),
    (_CAUSAL_LAYER + r"final_layer_norm\.weight", _CAUSAL_TO + "ffn_norm.weight"),
    (_TOWER + r"norm\.weight", "encoder.norm.weight"),
)
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
_VOXTRAL_REALTIME = WeightNames(
    (*LLAMA.rules, *_CAUSAL, *_PROJECTOR),
    prefixes=_PREFIXES,
    ignored=_IGNORED,
    convert={f"encoder.stem.conv{index}.weight": linear_weight for index in (1, 2)},
    zero_keys=r"encoder\.layers\.\d+\.attn\.qkv\.bias",
)
_AUDIO_NAMES = {
    "qwen2_audio": _WHISPER_LIKE,
    "qwen3_asr": _QWEN3_ASR,
    "voxtral": _WHISPER_LIKE,
    "voxtral_realtime": _VOXTRAL_REALTIME,
}
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
