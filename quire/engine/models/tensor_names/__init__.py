"""Names of tensors in checkpoints, mapped to parameters of Quire's models."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.models.specs.decoder import DecoderSpec, EncoderSpec, TransformerSpec
from quire.engine.models.specs.pooler import PoolerSpec
from quire.engine.models.tensor_names.audio import audio_names
from quire.engine.models.tensor_names.bert import bert_like
from quire.engine.models.tensor_names.layer_norm_decoders import layer_norm_decoder_names
from quire.engine.models.tensor_names.llama import LLAMA, LLAMA_OUTPUT_NORMS, LM_HEAD
from quire.engine.models.tensor_names.moonshine import MOONSHINE
from quire.engine.models.tensor_names.rope_encoders import rope_encoder_names
from quire.engine.models.tensor_names.rules import WeightNames
from quire.engine.models.tensor_names.whisper import WHISPER

_STATIC = WeightNames(((r"embed\.weight", "embed.weight"),))


def weight_names_of(model_type: str, spec: TransformerSpec, pooler: PoolerSpec | None) -> WeightNames:
    """How the checkpoints of an architecture name their tensors."""
    if isinstance(spec, DecoderSpec) and spec.encoder is not None:
        if not spec.has_cross_attention:
            return audio_names(model_type, spec.encoder)
        return MOONSHINE if model_type == "moonshine" else WHISPER
    steps = 0 if pooler is None else len(pooler.classify)
    if not spec.layers:
        return _STATIC
    if (names := rope_encoder_names(model_type, steps)) is not None:
        return names
    is_bert = model_type == "xlm-roberta-xl" or any(layer.post_ln for layer in spec.layers)
    if isinstance(spec, EncoderSpec) and is_bert:
        return bert_like(steps, ups_first=any(layer.inner_post_ln for layer in spec.layers))
    llama = LLAMA_OUTPUT_NORMS if any(layer.branch_output_norm for layer in spec.layers) else LLAMA
    names = layer_norm_decoder_names(model_type, spec) or llama
    # A decoder that attends in both directions may have been published with the head of a language model.
    return (
        replace(names, ignored=rf"{names.ignored}|{LM_HEAD}|lm_head\.bias") if isinstance(spec, EncoderSpec) else names
    )
