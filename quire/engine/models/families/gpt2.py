"""GPT-2, GPT-Neo and GPT-J: decoders with layer norms and plain feed-forward layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.engine.models.config.bidirectional import is_not_causal
from quire.engine.models.config.rope import max_positions, rope_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import (
    DecoderSpec,
    Embeddings,
    GroupedQueryAttention,
    Layer,
    LayerNormSpec,
    ParallelResidual,
    PlainMLP,
)
from quire.engine.models.specs.rope import Rope
from quire.engine.models.specs.tensor_names import KIND, LAYER, WeightNames

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

BLOCK = LAYER.replace("layers", "h")
HEADS = ((r"lm_head" + KIND, "head.{kind}"), (r"score" + KIND, "heads.classify.0.{kind}"))
_MASKS = r"h\.\d+\.attn\.(attention\.)?(masked_)?bias|lm_head\.weight"

_GPT = (
    (r"wte\.weight", "embed.weight"),
    (r"wpe\.weight", "embed_sum.positions"),
    (BLOCK + r"ln_1" + KIND, "attn_norm.{kind}"),
    (BLOCK + r"ln_2" + KIND, "ffn_norm.{kind}"),
    (BLOCK + r"attn\.c_attn" + KIND, "attn.qkv.{kind}"),
    (BLOCK + r"attn\.c_proj" + KIND, "attn.out.{kind}"),
    (BLOCK + r"attn\.(?:attention\.)?(?P<part>q|k|v)_proj" + KIND, "attn.qkv.{kind}"),  # GPT-Neo, GPT-J
    (BLOCK + r"attn\.(?:attention\.)?out_proj" + KIND, "attn.out.{kind}"),
    (BLOCK + r"mlp\.(?:c_fc|fc_in)" + KIND, "ffn.up.{kind}"),
    (BLOCK + r"mlp\.(?:c_proj|fc_out)" + KIND, "ffn.down.{kind}"),
    (r"ln_f" + KIND, "norm.{kind}"),
    *HEADS,
)


def gpt2(config: Any) -> DecoderSpec:
    """GPT-2: learned positions, norms before the branches."""
    if config.scale_attn_by_inverse_layer_idx:
        raise UnsupportedModel("GPT-2 with scale_attn_by_inverse_layer_idx is not supported")
    dim = config.n_embd // config.n_head
    attn = plain_attention(config.n_head, dim, scale=dim**-0.5 if config.scale_attn_weights else 1.0)
    ffn = PlainMLP(size=config.n_inner or 4 * config.n_embd, act=config.activation_function)
    embeddings = Embeddings(positions=config.n_positions)
    return layer_norm_decoder(
        config, [Layer(attn=attn, ffn=ffn)] * config.n_layer, config.layer_norm_epsilon, embeddings=embeddings
    )


def gpt_neo(config: Any) -> DecoderSpec:
    """GPT-Neo: GPT-2 without scaled scores, with a window on some layers."""
    dim = config.hidden_size // config.num_heads
    windows = {"global": None, "local": config.window_size}
    ffn = PlainMLP(size=config.intermediate_size or 4 * config.hidden_size, act=config.activation_function)
    layers = [
        Layer(attn=plain_attention(config.num_heads, dim, scale=1.0, qkv_bias=False, window=windows[kind]), ffn=ffn)
        for kind in config.attention_layers
    ]
    embeddings = Embeddings(positions=config.max_position_embeddings)
    return layer_norm_decoder(config, layers, config.layer_norm_epsilon, embeddings=embeddings)


def gptj(config: Any) -> DecoderSpec:
    """GPT-J: interleaved RoPE, one norm for attention and feed-forward, which run in parallel."""
    dim = config.n_embd // config.n_head
    rotated = config.rotary_dim or dim
    rope = Rope(dim=rotated, inv_freq=_frequencies(rotated), interleaved=True)
    attn = plain_attention(config.n_head, dim, rope=rope, qkv_bias=False, out_bias=False)
    ffn = PlainMLP(size=config.n_inner or 4 * config.n_embd, act=config.activation_function)
    layer = Layer(attn=attn, ffn=ffn, parallel=ParallelResidual.ONE_NORM)
    return layer_norm_decoder(config, [layer] * config.n_layer, config.layer_norm_epsilon, head_bias=True)


def plain_attention(heads: int, dim: int, **overrides: Any) -> GroupedQueryAttention:
    """Attention with biases and without a rope, with some fields overridden."""
    fields = {"scale": dim**-0.5, "rope": None, "qkv_bias": True, "out_bias": True, **overrides}
    return GroupedQueryAttention(heads=heads, kv_heads=heads, head_dim=dim, **fields)


def partial_rope(config: Any) -> Rope:
    """A rope of a part of each head."""
    return rope_of(config, config.hidden_size // config.num_attention_heads, partial=True)


def layer_norm_decoder(
    config: Any,
    layers: Sequence[Layer],
    eps: float,
    *,
    bias: bool = True,
    positions: int | None = None,
    **overrides: Any,
) -> DecoderSpec:
    """A decoder with the given layers and layer norms."""
    return DecoderSpec(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=tuple(layers),
        norm=LayerNormSpec(eps=eps, bias=bias),
        max_positions=max_positions(config) if positions is None else positions,
        tied=bool(config.tie_word_embeddings),
        **overrides,
    )


def _frequencies(dim: int) -> tuple[float, ...]:
    return tuple(1.0 / 10000.0 ** (2 * i / dim) for i in range(dim // 2))


def _gpt_neo_is_bidirectional(config: Any) -> bool:
    """Raise UnsupportedModel for a flag with which transformers' masks stay causal."""
    if is_not_causal(config):
        raise UnsupportedModel("is_causal false is not supported in models of type 'gpt_neo', whose masks stay causal")
    return False


def _transpose(weight: Tensor) -> Tensor:
    return weight.T


_NAMES = WeightNames(_GPT, r"transformer\.", _MASKS)
_TRANSPOSED = WeightNames(
    _GPT,
    r"transformer\.",
    _MASKS,
    convert=dict.fromkeys(("attn.qkv.weight", "attn.out.weight", "ffn.up.weight", "ffn.down.weight"), _transpose),
)


FAMILIES = (
    Family(name="gpt2", config_types=("gpt2",), spec=gpt2, tensors=_TRANSPOSED),
    Family(
        name="gpt_neo",
        config_types=("gpt_neo",),
        spec=gpt_neo,
        tensors=_NAMES,
        is_bidirectional=_gpt_neo_is_bidirectional,
    ),
    Family(name="gptj", config_types=("gptj",), spec=gptj, tensors=_NAMES),
)
