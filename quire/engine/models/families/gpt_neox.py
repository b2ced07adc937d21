"""GPT-NeoX and Pythia."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.engine.models.families.gpt2 import HEADS, layer_norm_decoder, partial_rope
from quire.engine.models.families.llama import attention
from quire.engine.models.family import Facts, Family
from quire.engine.models.specs.decoder import DecoderSpec, GroupedQueryAttention, Layer, ParallelResidual, PlainMLP
from quire.engine.models.specs.tensor_names import KIND, LAYER, WeightNames

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor


_NEOX = (
    (r"embed_in\.weight", "embed.weight"),
    (r"embed_out\.weight", "head.weight"),
    (LAYER + r"attention\.query_key_value" + KIND, "attn.qkv.{kind}"),
    (LAYER + r"attention\.dense" + KIND, "attn.out.{kind}"),
    (LAYER + r"mlp\.dense_h_to_4h" + KIND, "ffn.up.{kind}"),
    (LAYER + r"mlp\.dense_4h_to_h" + KIND, "ffn.down.{kind}"),
    (LAYER + r"input_layernorm" + KIND, "attn_norm.{kind}"),
    (LAYER + r"post_attention_layernorm" + KIND, "ffn_norm.{kind}"),
    (r"final_layer_norm" + KIND, "norm.{kind}"),
    *HEADS,
)
_IGNORED = r"layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)|embed_out\.weight"


def gpt_neox(config: Any) -> DecoderSpec:
    """GPT-NeoX, Pythia: partial RoPE, separate norms for attention and feed-forward, which run in parallel."""
    heads, bias = config.num_attention_heads, config.attention_bias
    attn = attention(config, kv_heads=heads, rope=partial_rope(config), qkv_bias=bias, out_bias=bias)
    ffn = PlainMLP(size=config.intermediate_size, act=config.hidden_act)
    parallel = ParallelResidual.TWO_NORMS if config.use_parallel_residual else None
    layer = Layer(attn=attn, ffn=ffn, parallel=parallel)
    return layer_norm_decoder(config, [layer] * config.num_hidden_layers, config.layer_norm_eps)


def _names(spec: DecoderSpec, _facts: Facts) -> WeightNames:
    return WeightNames(_NEOX, r"gpt_neox\.", _IGNORED, convert=fused_heads(spec))


def fused_heads(spec: DecoderSpec) -> dict[str, Callable[[Tensor], Tensor]]:
    """Conversions of projections that hold, for each key head, its queries, its key and its value."""
    attn = spec.layers[0].attn
    assert isinstance(attn, GroupedQueryAttention)

    def split(rows: Tensor) -> Tensor:
        grouped = rows.unflatten(0, (attn.kv_heads, -1, attn.head_dim))
        parts = (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])
        flat: Tensor = rows.new_empty(rows.shape)
        begin = 0
        for part in parts:
            taken = part.flatten(0, 2)
            flat[begin : begin + len(taken)] = taken
            begin += len(taken)
        return flat

    return {"attn.qkv.weight": split, "attn.qkv.bias": split}


FAMILIES = (Family(name="gpt_neox", config_types=("gpt_neox",), spec=gpt_neox, tensors=_names),)
