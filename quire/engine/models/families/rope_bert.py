"""BERTs with a rope in place of learned positions: Nomic Embed, GTE, and Jina's embedder v3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.engine.models.config.bidirectional import fixed_positions
from quire.engine.models.config.rope import max_positions, rope_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.bert import (
    MASKED_LM,
    bert_head,
    bert_masked_lm,
    roberta_masked_lm,
    with_last_step,
)
from quire.engine.models.family import Facts, Family, RawConfig
from quire.engine.models.specs.decoder import (
    Embeddings,
    EncoderSpec,
    FeedForward,
    GatedMLP,
    GroupedQueryAttention,
    Layer,
    LayerNormSpec,
    MoE,
    PlainExperts,
    PlainMLP,
    SoftmaxRouter,
)
from quire.engine.models.specs.pooler import HeadReaders
from quire.engine.models.specs.rope import Rope
from quire.engine.models.specs.tensor_names import KIND, LAYER, WeightNames, swap_halves

Rules = tuple[tuple[str, str], ...]
_ENCODER_LAYER = LAYER.replace("layers", r"encoder\.layers?")
EMBEDDINGS = (
    (r"embeddings\.(?:word|tok)_embeddings\.weight", "embed.weight"),
    (r"embeddings\.token_type_embeddings\.weight", "embed_sum.types"),
    (r"(?:embeddings\.LayerNorm|embeddings\.norm|emb_ln)" + KIND, "embed_sum.norm.{kind}"),
)
COLBERT = ((r"linear\.weight", "heads.token_embed.0.weight"),)
_NOMIC = (
    (_ENCODER_LAYER + r"attn\.Wqkv" + KIND, "attn.qkv.{kind}"),
    (_ENCODER_LAYER + r"attn\.out_proj" + KIND, "attn.out.{kind}"),
    (_ENCODER_LAYER + r"norm1" + KIND, "attn_post_ln.{kind}"),
    (_ENCODER_LAYER + r"norm2" + KIND, "ffn_post_ln.{kind}"),
    (_ENCODER_LAYER + r"mlp\.fc(?P<part>11|12)" + KIND, "ffn.gate_up.{kind}"),
    (_ENCODER_LAYER + r"mlp\.fc1" + KIND, "ffn.up.{kind}"),
    (_ENCODER_LAYER + r"mlp\.fc2" + KIND, "ffn.down.{kind}"),
    (_ENCODER_LAYER + r"mlp\.router\.layer\.weight", "ffn.router.weight"),
    (_ENCODER_LAYER + r"mlp\.experts\.(?P<expert>\d+)\.up_proj\.weight", "ffn.experts.{expert}.gate_up.weight"),
    (_ENCODER_LAYER + r"mlp\.experts\.(?P<expert>\d+)\.down_proj\.weight", "ffn.experts.{expert}.down.weight"),
)
_GTE = (
    (_ENCODER_LAYER + r"attention\.qkv_proj" + KIND, "attn.qkv.{kind}"),
    (_ENCODER_LAYER + r"attention\.o_proj" + KIND, "attn.out.{kind}"),
    (_ENCODER_LAYER + r"attn_ln" + KIND, "attn_post_ln.{kind}"),
    (_ENCODER_LAYER + r"mlp_ln" + KIND, "ffn_post_ln.{kind}"),
    (_ENCODER_LAYER + r"mlp\.up_gate_proj" + KIND, "ffn.gate_up.{kind}"),
    (_ENCODER_LAYER + r"mlp\.down_proj" + KIND, "ffn.down.{kind}"),
)
# Jina's embedder v3: names of its authors, and of transformers.
_JINA = (
    (_ENCODER_LAYER + r"mixer\.Wqkv" + KIND, "attn.qkv.{kind}"),
    (_ENCODER_LAYER + r"mixer\.out_proj" + KIND, "attn.out.{kind}"),
    (_ENCODER_LAYER + r"norm1" + KIND, "attn_post_ln.{kind}"),
    (_ENCODER_LAYER + r"norm2" + KIND, "ffn_post_ln.{kind}"),
    (r"(?:encoder\.)?" + LAYER + r"mlp\.fc1" + KIND, "ffn.up.{kind}"),
    (r"(?:encoder\.)?" + LAYER + r"mlp\.fc2" + KIND, "ffn.down.{kind}"),
    (LAYER + r"self_attn\.(?P<part>q|k|v)_proj" + KIND, "attn.qkv.{kind}"),
    (LAYER + r"self_attn\.o_proj" + KIND, "attn.out.{kind}"),
    (LAYER + r"post_attention_layernorm" + KIND, "attn_post_ln.{kind}"),
    (LAYER + r"post_mlp_layernorm" + KIND, "ffn_post_ln.{kind}"),
    (r"classifier\.dense" + KIND, "heads.classify.0.{kind}"),
    (r"classifier\.out_proj" + KIND, "heads.classify.1.{kind}"),
)
_HEADS = (
    *COLBERT,
    (r"pooler\.dense" + KIND, "heads.classify.0.{kind}"),
    (r"classifier" + KIND, "heads.classify.{last}.{kind}"),
)
IGNORED = r"pooler\.dense\.\w+|cls\..*|lm_head\..*|head\..*|decoder\..*"


# Of Nomic's code: the name that transformers has, by Nomic's, and the values that transformers' implementation has.
_NOMIC_FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "max_trained_positions": "max_position_embeddings",
}
_NOMIC_NEEDED = {
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "causal", "use_rms_norm"), False),
    **dict.fromkeys(("parallel_block", "rotary_emb_interleaved"), False),
    "rotary_emb_fraction": 1.0,
    "rotary_emb_scale_base": None,
    "num_experts": 0,
}
_NOMIC_ACTS = {"swiglu": "silu", "geglu": "gelu"}
_GTE_NEEDED = {"layer_norm_type": "layer_norm", "position_embedding_type": "rope", "logn_attention_scale": False}


def nomic_bert(config: Any) -> EncoderSpec:
    """Nomic Embed: BERT with a rope and gated feed-forward layers, without biases; or v2, see `_nomic_moe`."""
    norm = LayerNormSpec(eps=config.layer_norm_eps)
    has_experts = bool(getattr(config, "moe_every_n_layers", 0))
    attn = rope_attention(config, _rope(config), bias=has_experts)
    gated = GatedMLP(size=config.intermediate_size, act=config.hidden_act)
    ffns = _nomic_moe(config) if has_experts else [gated] * config.num_hidden_layers
    layers = [Layer(attn=attn, ffn=ffn, pre_norm=False, post_ln=True) for ffn in ffns]
    embeddings = Embeddings(types=config.type_vocab_size, norm=norm)
    return rope_encoder(config, layers, norm, embeddings, final_norm=False)


def _nomic_moe(config: Any) -> list[FeedForward]:
    """The feed-forwards of Nomic Embed v2: experts in every `moe_every_n_layers`-th layer, from the second one.

    Its authors' checkpoints add a bias to the result of experts, which GGUF files lack.
    """
    every = config.moe_every_n_layers
    plain = PlainMLP(size=config.intermediate_size, act=config.hidden_act)
    experts = MoE(
        size=config.intermediate_size,
        experts=config.num_experts,
        top_k=config.moe_top_k,
        router=SoftmaxRouter(renormalize=False),
        expert=PlainExperts(act=config.hidden_act),
    )
    return [experts if index % every == 1 else plain for index in range(config.num_hidden_layers)]


def gte(config: Any) -> EncoderSpec:
    """GTE v1.5 and multilingual: BERT with a rope and gated feed-forward layers."""
    norm = LayerNormSpec(eps=config.layer_norm_eps)
    attn = rope_attention(config, _rope(config), bias=True)
    ffn = GatedMLP(size=config.intermediate_size, act=config.hidden_act, down_bias=True)
    embeddings = Embeddings(types=config.type_vocab_size, norm=norm)
    layers = [Layer(attn=attn, ffn=ffn, pre_norm=False, post_ln=True)] * config.num_hidden_layers
    return rope_encoder(config, layers, norm, embeddings, final_norm=False)


def jina_embeddings_v3(config: Any) -> EncoderSpec:
    """Jina's embedder v3: XLM-RoBERTa with a rope in place of learned positions."""
    norm = LayerNormSpec(eps=config.layer_norm_eps)
    attn = rope_attention(config, _rope(config), bias=True)
    ffn = PlainMLP(size=config.intermediate_size, act=config.hidden_act)
    layers = [Layer(attn=attn, ffn=ffn, pre_norm=False, post_ln=True)] * config.num_hidden_layers
    return rope_encoder(config, layers, norm, Embeddings(types=config.type_vocab_size, norm=norm), final_norm=False)


def rope_attention(config: Any, rope: Rope, *, bias: bool, window: int | None = None) -> GroupedQueryAttention:
    """Attention of an encoder with a rope."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return GroupedQueryAttention(
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        scale=dim**-0.5,
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        window=window,
    )


def _rope(config: Any) -> Rope:
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return rope_of(config, dim)


def rope_encoder(
    config: Any, layers: list[Layer], norm: LayerNormSpec, embeddings: Embeddings, *, final_norm: bool
) -> EncoderSpec:
    """An encoder with the given layers."""
    if not layers:
        raise UnsupportedModel("the model's config.json describes a model without layers")
    per_type = "full_attention" in (getattr(config, "rope_parameters", None) or {})
    return EncoderSpec(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=tuple(layers),
        norm=norm,
        max_positions=fixed_positions(layers, config.max_position_embeddings if per_type else max_positions(config)),
        embeddings=embeddings,
        final_norm=final_norm,
    )


def _names(rules: Rules, prefixes: str, **options: Any) -> Callable[[EncoderSpec, Facts], WeightNames]:
    """How a family's checkpoints name their tensors: by its rules, and by those of all families here."""

    def names(_spec: EncoderSpec, facts: Facts) -> WeightNames:
        heads = with_last_step(_HEADS, facts)
        return WeightNames((*EMBEDDINGS, *rules, *heads, *MASKED_LM), prefixes, IGNORED, **options)

    return names


def _published_gte(raw: RawConfig) -> RawConfig:
    """The config of GTE as its authors have published it."""
    _check_values(raw, _GTE_NEEDED)
    known = {name: value for name, value in raw.items() if name not in ("auto_map", "rope_theta", "rope_scaling")}
    scaling = raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise UnsupportedModel(f"rope_scaling must be an object, not {scaling!r}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    rope = {**scaling, "rope_type": kind, "rope_theta": raw.get("rope_theta", 10000.0)}
    names = [name.replace("New", "Gte") for name in raw.get("architectures") or []]
    return {**known, "model_type": "gte", "architectures": names, "rope_parameters": rope}


def _published_nomic(raw: RawConfig) -> RawConfig:
    """The config of Nomic Embed as its authors have published it."""
    if "n_embd" not in raw:
        return raw
    _check_values(raw, _NOMIC_NEEDED)
    act = raw.get("activation_function", "swiglu")
    if act not in _NOMIC_ACTS:
        raise UnsupportedModel(f"activation_function {act!r} is not supported; supported are {', '.join(_NOMIC_ACTS)}")
    known = {name: value for name, value in raw.items() if name != "auto_map" and name not in _NOMIC_FIELDS}
    renamed = {name: raw[published] for published, name in _NOMIC_FIELDS.items() if published in raw}
    rope = {"rope_type": "default", "rope_theta": raw.get("rotary_emb_base", 1000.0)}
    return {**known, **renamed, "hidden_act": _NOMIC_ACTS[act], "rope_parameters": rope}


def _published_jina(raw: RawConfig) -> RawConfig:
    """The config of Jina's embedder v3 as its authors have published it."""
    if raw.get("position_embedding_type") != "rotary":
        return raw
    known = {name: value for name, value in raw.items() if name not in ("auto_map", "position_embedding_type")}
    names = [name.replace("XLMRoberta", "JinaEmbeddingsV3") for name in raw.get("architectures") or []]
    rope = {"rope_type": "default", "rope_theta": raw.get("rotary_emb_base", 10000.0)}
    return {**known, "model_type": "jina_embeddings_v3", "architectures": names, "rope_parameters": rope}


def _check_values(raw: Mapping[str, Any], needed: Mapping[str, Any]) -> None:
    for name, value in needed.items():
        if raw.get(name) is not None and raw[name] != value:
            raise UnsupportedModel(f"{name} {raw[name]!r} is not supported; supported is {value!r}")


FAMILIES = (
    Family(
        name="gte",
        config_types=("gte",),
        kind="encoder",
        spec=gte,
        tensors=_names(_GTE, r"(?:model|gte|new)\.", convert={"ffn.gate_up.weight": swap_halves}),
        heads=HeadReaders(labels=bert_head, masked_lm=roberta_masked_lm),
        published={"new": _published_gte},
    ),
    Family(
        name="jina_embeddings_v3",
        config_types=("jina_embeddings_v3",),
        kind="encoder",
        spec=jina_embeddings_v3,
        tensors=_names(_JINA, r"(?:model|roberta)\."),
        heads=HeadReaders(labels=bert_head, masked_lm=roberta_masked_lm),
        published={"xlm-roberta": _published_jina},
    ),
    Family(
        name="nomic_bert",
        config_types=("nomic_bert",),
        kind="encoder",
        spec=nomic_bert,
        tensors=_names(_NOMIC, r"(?:model|nomic_bert)\."),
        heads=HeadReaders(labels=bert_head, masked_lm=bert_masked_lm),
        published={"nomic_bert": _published_nomic},
    ),
)
