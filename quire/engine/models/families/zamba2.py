"""Zamba 2: state spaces, some of them behind blocks of attention and a feed-forward that layers have in common."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quire.engine.models.config.rope import rope_of
from quire.engine.models.errors import UnsupportedModel, UnsupportedOption
from quire.engine.models.families.llama import decoder
from quire.engine.models.families.mamba import MIXER_CONVERT, mixer_rules
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.decoder import DecoderSpec, GatedMLP, GroupedQueryAttention, Layer
from quire.engine.models.specs.shared_block import BlockBeforeRecurrence
from quire.engine.models.specs.state_space import GatedNorm, HeadStateSpace
from quire.engine.models.specs.tensor_names import KIND, LAYER, NamedTensors, WeightNames

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

_SHARED = LAYER + r"shared_transformer\."
_RULES = (
    (r"embed_tokens\.weight", "embed.weight"),
    (r"lm_head\.weight", "head.weight"),
    (r"final_layernorm\.weight", "norm.weight"),
    (LAYER + r"input_layernorm\.weight", "attn_norm.weight"),
    *mixer_rules("mamba"),
    (LAYER + r"mamba_decoder\.input_layernorm\.weight", "attn.norm.weight"),
    *mixer_rules(r"mamba_decoder\.mamba", "attn.recurrence"),
    (LAYER + r"linear\.weight", "attn.linear.weight"),
    (_SHARED + r"input_layernorm\.weight", "attn.attn_norm.weight"),
    (_SHARED + r"pre_ff_layernorm\.weight", "attn.ffn_norm.weight"),
    (_SHARED + r"self_attn\.(?P<part>q|k|v)_proj\.weight", "attn.attention.qkv.weight"),
    (_SHARED + r"self_attn\.(?P<part>q|k|v)_proj\.weight", "attn.attention.qkv.base.weight"),
    (_SHARED + r"self_attn\.o_proj\.weight", "attn.attention.out.weight"),
    (_SHARED + r"feed_forward\.gate_up_proj" + KIND, "attn.ffn.gate_up.base.{kind}"),
    (_SHARED + r"feed_forward\.down_proj" + KIND, "attn.ffn.down.{kind}"),
    (LAYER + r"adapters\.(?P<part>q|k|v)\.0\.weight", "attn.attention.qkv.a.weight"),
    (LAYER + r"adapters\.(?P<number>[0-2])\.1\.weight", "attn.attention.qkv.b.{number}.weight"),
    (LAYER + r"adapters\.gate_up\.0\.weight", "attn.ffn.gate_up.a.weight"),
    (LAYER + r"adapters\.gate_up\.1\.weight", "attn.ffn.gate_up.b.0.weight"),
)
_ADAPTER = re.compile(
    r"(?P<start>(?:.*\.)?layers\.)(?P<layer>\d+)\.shared_transformer\."
    r"(?:self_attn\.linear_(?P<part>q|k|v)_adapter_list|feed_forward\.gate_up_proj_adapter_list)"
    r"\.(?P<use>\d+)\.(?P<side>[01])\.weight"
)
_IGNORED = r"layers\.\d+\.shared_transformer\..*|rotary_emb\..*"  # of other layers than the first with a block
_NORM_EPS = 1e-5  # of the norm of state spaces


def zamba2(config: Any) -> DecoderSpec:
    """Zamba 2.

    Raises:
        UnsupportedModel: there are layers of another kind.
        UnsupportedOption: `use_long_context`.
    """
    if config.use_long_context:
        raise UnsupportedOption("use_long_context is not supported for models of type 'zamba2'")
    kinds = list(config.layers_block_type)
    if len(kinds) != config.num_hidden_layers or set(kinds) - {"linear_attention", "hybrid"}:
        raise UnsupportedModel(
            f"layers_block_type must name {config.num_hidden_layers} layers; accepted are linear_attention and hybrid"
        )
    if config.num_mem_blocks < 1:
        raise UnsupportedModel(f"num_mem_blocks is {config.num_mem_blocks}, but must be at least 1")
    mixer = _state_space(config)
    layers, uses = list[Layer](), 0
    for kind in kinds:
        if kind == "hybrid":
            attn = _block(config, mixer, uses % config.num_mem_blocks)
            layers.append(Layer(attn=attn, ffn=None, pre_attn_norm=False))
            uses += 1
        else:
            layers.append(Layer(attn=mixer, ffn=None))
    return decoder(config, layers)


def _state_space(config: Any) -> HeadStateSpace:
    bias = bool(config.add_bias_linear)
    return HeadStateSpace(
        heads=config.n_mamba_heads,
        head_dim=config.mamba_headdim,
        state=config.mamba_d_state,
        groups=config.mamba_ngroups,
        width=config.mamba_d_conv,
        bias=bias,
        out_bias=bias,
        norm=GatedNorm(eps=_NORM_EPS),
        # transformers limits steps by time_step_min, but those of prompts only; other servers do not
    )


def _block(config: Any, mixer: HeadStateSpace, block: int) -> BlockBeforeRecurrence:
    dim = config.attention_head_dim
    rope = rope_of(config, dim) if config.use_mem_rope else None
    attention = GroupedQueryAttention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=dim,
        scale=(dim / 2) ** -0.5,
        rope=rope,
    )
    return BlockBeforeRecurrence(
        attention=attention,
        rope=rope,
        ffn=GatedMLP(size=config.intermediate_size, act=config.hidden_act, bias=bool(config.add_bias_linear)),
        recurrence=mixer,
        block=block,
        rank=config.adapter_rank,
        attention_rank=config.adapter_rank if config.use_shared_attention_adapter else None,
    )


def _names(spec: DecoderSpec, _: Facts) -> WeightNames:
    users = [index for index, layer in enumerate(spec.layers) if isinstance(layer.attn, BlockBeforeRecurrence)]
    blocks = [layer.attn.block for layer in spec.layers if isinstance(layer.attn, BlockBeforeRecurrence)]
    first = {block: users[blocks.index(block)] for block in blocks}

    def prepare(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Projections that a layer adds to those of its block have its number, not that of the first with the block."""
        for name, tensor in tensors:
            match = _ADAPTER.fullmatch(name)
            if match is None or int(match["use"]) >= len(users):
                yield name, tensor
            elif int(match["layer"]) == first[blocks[int(match["use"])]]:
                part = match["part"] or "gate_up"
                if match["side"] == "1" and match["part"]:
                    part = str("qkv".index(part))
                yield f"{match['start']}{users[int(match['use'])]}.adapters.{part}.{match['side']}.weight", tensor

    inner = {name.replace("attn.", "attn.recurrence."): convert for name, convert in MIXER_CONVERT.items()}
    return WeightNames(_RULES, ignored=_IGNORED, convert={**MIXER_CONVERT, **inner}, prepare=prepare)


FAMILIES = (Family(name="zamba2", config_types=("zamba2",), spec=zamba2, tensors=_names),)
