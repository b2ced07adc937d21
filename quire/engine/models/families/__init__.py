"""Architectures: for each `model_type`, a function from a Hugging Face config to a spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.audio import qwen2_audio, qwen3_asr, voxtral
from quire.engine.models.families.bert import (
    albert,
    bert,
    deberta_v2,
    distilbert,
    electra,
    ernie,
    mpnet,
    roberta,
    xlm_roberta_xl,
)
from quire.engine.models.families.ctc import hubert, parakeet, wav2vec2
from quire.engine.models.families.gemma import gemma2, gemma3
from quire.engine.models.families.granite_speech import granite_speech
from quire.engine.models.families.layer_norm_decoders import (
    bloom,
    cohere,
    falcon,
    gpt2,
    gpt_neo,
    gpt_neox,
    gptj,
    opt,
    phi,
    stablelm,
    starcoder2,
)
from quire.engine.models.families.llama import granite, llama, mistral, olmo2, phi3, qwen2, qwen3, smollm3
from quire.engine.models.families.moe import deepseek_v3, gpt_oss, mixtral, qwen3_moe
from quire.engine.models.families.moonshine import moonshine
from quire.engine.models.families.phi4_multimodal import phi4_multimodal
from quire.engine.models.families.rope_encoders import (
    as_encoder,
    eurobert,
    gte,
    is_bidirectional,
    jina_embeddings_v3,
    modernbert,
    nomic_bert,
)
from quire.engine.models.families.transducer import nemotron_asr_streaming
from quire.engine.models.families.voxtral_realtime import voxtral_realtime
from quire.engine.models.families.whisper import whisper
from quire.engine.models.specs.decoder import CTCSpec, DecoderSpec, EncoderSpec, TransducerSpec

ARCHITECTURES: dict[str, Callable[[Any], DecoderSpec]] = {
    "bloom": bloom,
    "cohere": cohere,
    "deepseek_v3": deepseek_v3,
    "falcon": falcon,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gpt2": gpt2,
    "gpt_neo": gpt_neo,
    "gpt_neox": gpt_neox,
    "gpt_oss": gpt_oss,
    "gptj": gptj,
    "granite": granite,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "moonshine": moonshine,
    "olmo2": olmo2,
    "opt": opt,
    "phi": phi,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "smollm3": smollm3,
    "stablelm": stablelm,
    "starcoder2": starcoder2,
    "voxtral_realtime": voxtral_realtime,
    "whisper": whisper,
}
# Given the config of the whole model, and the spec of its language model.
AUDIO_MODELS: dict[str, Callable[[Any, DecoderSpec], DecoderSpec]] = {
    "granite_speech": granite_speech,
    "granite_speech_plus": granite_speech,
    "phi4_multimodal": phi4_multimodal,
    "qwen2_audio": qwen2_audio,
    "qwen3_asr": qwen3_asr,
    "voxtral": voxtral,
}
ENCODERS: dict[str, Callable[[Any], EncoderSpec]] = {
    "albert": albert,
    "bert": bert,
    "camembert": roberta,
    "data2vec-text": roberta,
    "deberta-v2": deberta_v2,
    "distilbert": distilbert,
    "electra": electra,
    "ernie": ernie,
    "eurobert": eurobert,
    "gte": gte,
    "jina_embeddings_v3": jina_embeddings_v3,
    "modernbert": modernbert,
    "mpnet": mpnet,
    "nomic_bert": nomic_bert,
    "roberta": roberta,
    "xlm-roberta": roberta,
    "xlm-roberta-xl": xlm_roberta_xl,
}
CTC_MODELS: dict[str, Callable[[Any], CTCSpec]] = {
    "hubert": hubert,
    "parakeet_ctc": parakeet,
    "wav2vec2": wav2vec2,
}
TRANSDUCERS: dict[str, Callable[[Any], TransducerSpec]] = {
    "nemotron_asr_streaming": nemotron_asr_streaming,
}


def spec_of(config: Any) -> DecoderSpec | EncoderSpec:
    """The spec of a config whose `model_type` is in `ARCHITECTURES`, `AUDIO_MODELS` or `ENCODERS`."""
    if (encoder := ENCODERS.get(config.model_type)) is not None:
        return encoder(config)
    if (tower := AUDIO_MODELS.get(config.model_type)) is not None:
        # The config of Phi-4 Multimodal is that of its language model, which is Phi-3's.
        text = config if config.model_type == "phi4_multimodal" else config.text_config
        kind = "phi3" if text is config else text.model_type
        if kind not in ARCHITECTURES:
            raise UnsupportedModel(f"a language model of type {kind!r} is not supported here")
        return tower(config, ARCHITECTURES[kind](text))
    spec = ARCHITECTURES[config.model_type](config)
    return as_encoder(spec, config) if is_bidirectional(config) else spec
