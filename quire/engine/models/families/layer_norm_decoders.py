"""Decoders from GPT-2 to Command R: layer norms, plain feed-forward layers, learned positions, parallel branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.llama import attention, mlp
from quire.engine.models.families.rope import max_positions, rope_of
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

_ALIBI_LENGTH = 2048


def gpt2(config: Any) -> DecoderSpec:
    """GPT-2: learned positions, norms before the branches."""
    if config.scale_attn_by_inverse_layer_idx:
        raise UnsupportedModel("GPT-2 with scale_attn_by_inverse_layer_idx is not supported")
    dim = config.n_embd // config.n_head
    attn = _attention(config.n_head, dim, scale=dim**-0.5 if config.scale_attn_weights else 1.0)
    ffn = PlainMLP(size=config.n_inner or 4 * config.n_embd, act=config.activation_function)
    embeddings = Embeddings(positions=config.n_positions)
    return _decoder(
        config, [Layer(attn=attn, ffn=ffn)] * config.n_layer, config.layer_norm_epsilon, embeddings=embeddings
    )


def gpt_neo(config: Any) -> DecoderSpec:
    """GPT-Neo: GPT-2 without scaled scores, with a window on some layers."""
    dim = config.hidden_size // config.num_heads
    windows = {"global": None, "local": config.window_size}
    ffn = PlainMLP(size=config.intermediate_size or 4 * config.hidden_size, act=config.activation_function)
    layers = [
        Layer(attn=_attention(config.num_heads, dim, scale=1.0, qkv_bias=False, window=windows[kind]), ffn=ffn)
        for kind in config.attention_layers
    ]
    embeddings = Embeddings(positions=config.max_position_embeddings)
    return _decoder(config, layers, config.layer_norm_epsilon, embeddings=embeddings)


def gptj(config: Any) -> DecoderSpec:
    """GPT-J: interleaved RoPE, one norm for attention and feed-forward, which run in parallel."""
    dim = config.n_embd // config.n_head
    rotated = config.rotary_dim or dim
    rope = Rope(dim=rotated, inv_freq=_frequencies(rotated), interleaved=True)
    attn = _attention(config.n_head, dim, rope=rope, qkv_bias=False, out_bias=False)
    ffn = PlainMLP(size=config.n_inner or 4 * config.n_embd, act=config.activation_function)
    layer = Layer(attn=attn, ffn=ffn, parallel=ParallelResidual.ONE_NORM)
    return _decoder(config, [layer] * config.n_layer, config.layer_norm_epsilon, head_bias=True)


def gpt_neox(config: Any) -> DecoderSpec:
    """GPT-NeoX, Pythia: partial RoPE, separate norms for attention and feed-forward, which run in parallel."""
    heads, bias = config.num_attention_heads, config.attention_bias
    attn = attention(config, kv_heads=heads, rope=_rope(config), qkv_bias=bias, out_bias=bias)
    ffn = PlainMLP(size=config.intermediate_size, act=config.hidden_act)
    parallel = ParallelResidual.TWO_NORMS if config.use_parallel_residual else None
    layer = Layer(attn=attn, ffn=ffn, parallel=parallel)
    return _decoder(config, [layer] * config.num_hidden_layers, config.layer_norm_eps)


def opt(config: Any) -> DecoderSpec:
    """OPT: learned positions from row 2 on."""
    if not config.do_layer_norm_before or config._remove_final_layer_norm:
        raise UnsupportedModel("OPT with post-LN layers (do_layer_norm_before false) is not supported")
    if config.word_embed_proj_dim != config.hidden_size:
        raise UnsupportedModel("OPT with a word_embed_proj_dim other than the hidden_size is not supported")
    if not config.layer_norm_elementwise_affine:
        raise UnsupportedModel("OPT with non-affine norms (layer_norm_elementwise_affine false) is not supported")
    dim = config.hidden_size // config.num_attention_heads
    attn = _attention(config.num_attention_heads, dim, qkv_bias=config.enable_bias, out_bias=config.enable_bias)
    ffn = PlainMLP(size=config.ffn_dim, act=config.activation_function, bias=config.enable_bias)
    embeddings = Embeddings(positions=config.max_position_embeddings + 2, position_offset=2)
    return _decoder(config, [Layer(attn=attn, ffn=ffn)] * config.num_hidden_layers, 1e-5, embeddings=embeddings)


def phi(config: Any) -> DecoderSpec:
    """Phi 1 to 2: partial RoPE, one norm for the parallel attention and feed-forward, biases in all layers."""
    if config.qk_layernorm:
        raise UnsupportedModel("Phi with qk_layernorm is not supported")
    attn = attention(config, rope=_rope(config), qkv_bias=True, out_bias=True)
    ffn = PlainMLP(size=config.intermediate_size, act=config.hidden_act)
    layer = Layer(attn=attn, ffn=ffn, parallel=ParallelResidual.ONE_NORM)
    return _decoder(config, [layer] * config.num_hidden_layers, config.layer_norm_eps, head_bias=True)


def falcon(config: Any) -> DecoderSpec:
    """Falcon: one key and value head, or groups of them; both branches read one norm, or one each."""
    if config.alibi:
        raise UnsupportedModel("Falcon with ALiBi is not supported")
    is_new = config.new_decoder_architecture
    kv_heads = config.num_kv_heads if is_new else 1 if config.multi_query else config.num_attention_heads
    dim = config.hidden_size // config.num_attention_heads
    attn = attention(config, head_dim=dim, kv_heads=kv_heads, qkv_bias=config.bias, out_bias=config.bias)
    two_norms = is_new and config.num_ln_in_parallel_attn in (None, 2)
    if config.parallel_attn and not is_new and config.num_ln_in_parallel_attn == 2:
        raise UnsupportedModel("Falcon with two norms in the old architecture is not supported")
    parallel = ParallelResidual.TWO_NORMS if two_norms else ParallelResidual.ONE_NORM if config.parallel_attn else None
    layer = Layer(
        attn=attn, ffn=PlainMLP(size=config.ffn_hidden_size, act=config.activation, bias=config.bias), parallel=parallel
    )
    return _decoder(config, [layer] * config.num_hidden_layers, config.layer_norm_epsilon)


def starcoder2(config: Any) -> DecoderSpec:
    """StarCoder 2: grouped heads, a rope, and a sliding window."""
    attn = attention(config, qkv_bias=config.use_bias, out_bias=config.use_bias, window=config.sliding_window)
    ffn = PlainMLP(size=config.intermediate_size, act=config.hidden_act, bias=config.use_bias)
    return _decoder(config, [Layer(attn=attn, ffn=ffn)] * config.num_hidden_layers, config.norm_epsilon)


def stablelm(config: Any) -> DecoderSpec:
    """StableLM 2 and 3: a partial rope, gated feed-forward layers, layer norms."""
    if config.qk_layernorm:
        raise UnsupportedModel("StableLM with qk_layernorm is not supported")
    attn = attention(config, rope=_rope(config), qkv_bias=config.use_qkv_bias)
    parallel = ParallelResidual.ONE_NORM if config.use_parallel_residual else None
    layer = Layer(attn=attn, ffn=mlp(config), parallel=parallel)
    return _decoder(config, [layer] * config.num_hidden_layers, config.layer_norm_eps)


def cohere(config: Any) -> DecoderSpec:
    """Command R: an interleaved rope, both branches read one norm without bias, scaled logits."""
    if config.use_qk_norm:
        raise UnsupportedModel("Cohere with use_qk_norm is not supported")
    rope = rope_of(config, config.hidden_size // config.num_attention_heads, interleaved=True)
    attn = attention(config, rope=rope, qkv_bias=config.attention_bias, out_bias=config.attention_bias)
    layer = Layer(attn=attn, ffn=mlp(config), parallel=ParallelResidual.ONE_NORM)
    return _decoder(
        config, [layer] * config.num_hidden_layers, config.layer_norm_eps, bias=False, logit_scale=config.logit_scale
    )


def bloom(config: Any) -> DecoderSpec:
    """BLOOM: ALiBi, a norm of the embeddings."""
    if config.apply_residual_connection_post_layernorm:
        raise UnsupportedModel("BLOOM with apply_residual_connection_post_layernorm is not supported")
    heads = config.n_head
    attn = _attention(heads, config.hidden_size // heads, alibi=alibi_slopes(heads))
    layer = Layer(attn=attn, ffn=PlainMLP(size=4 * config.hidden_size, act="gelu_pytorch_tanh"))
    eps = config.layer_norm_epsilon
    embeddings = Embeddings(norm=LayerNormSpec(eps=eps))
    length = getattr(config, "seq_length", None) or _ALIBI_LENGTH  # of the training; ALiBi itself has no limit
    return _decoder(config, [layer] * config.n_layer, eps, embeddings=embeddings, positions=length)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """A geometric series; for numbers that are no power of two, filled up with every second of the next one's."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    return tuple(slopes + [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (heads - power), 2)])


def _attention(heads: int, dim: int, **overrides: Any) -> GroupedQueryAttention:
    fields = {"scale": dim**-0.5, "rope": None, "qkv_bias": True, "out_bias": True, **overrides}
    return GroupedQueryAttention(heads=heads, kv_heads=heads, head_dim=dim, **fields)


def _rope(config: Any) -> Rope:
    """A rope of a part of each head."""
    return rope_of(config, config.hidden_size // config.num_attention_heads, partial=True)


def _frequencies(dim: int) -> tuple[float, ...]:
    return tuple(1.0 / 10000.0 ** (2 * i / dim) for i in range(dim // 2))


def _decoder(
    config: Any,
    layers: Sequence[Layer],
    eps: float,
    *,
    bias: bool = True,
    positions: int | None = None,
    **overrides: Any,
) -> DecoderSpec:
    return DecoderSpec(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=tuple(layers),
        norm=LayerNormSpec(eps=eps, bias=bias),
        max_positions=max_positions(config) if positions is None else positions,
        tied=bool(config.tie_word_embeddings),
        **overrides,
    )
