"""Names of the tensors of Granite Speech."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from quire.engine.models.specs.decoder import AudioEncoderSpec, ConformerLayer
from quire.engine.models.tensor_names.llama import LLAMA
from quire.engine.models.tensor_names.rules import KIND, WeightNames, linear_weight

_LAYER = r"encoder\.layers\.(?P<index>\d+)\."
_TO = "encoder.layers.{index}."
_QUERIES = r"projector\.qformer\.encoder\.layer\.(?P<index>\d+)\."
_QUERIES_TO = "encoder.projector.layers.{index}."
_RULES = (
    (r"encoder\.input_linear" + KIND, "encoder.stem.linear.{kind}"),
    (_LAYER + r"ff(?P<ffn>1|2)\.pre_norm" + KIND, _TO + "ffn{ffn}_norm.{kind}"),
    (_LAYER + r"ff(?P<ffn>1|2)\.up_proj" + KIND, _TO + "ffn{ffn}.up.{kind}"),
    (_LAYER + r"ff(?P<ffn>1|2)\.down_proj" + KIND, _TO + "ffn{ffn}.down.{kind}"),
    (_LAYER + r"attn\.pre_norm" + KIND, _TO + "attn_norm.{kind}"),
    (_LAYER + r"attn\.to_(?P<part>q|k|v)\.weight", _TO + "attn.qkv.weight"),
    (_LAYER + r"attn\.to_out" + KIND, _TO + "attn.out.{kind}"),
    (_LAYER + r"attn\.rel_pos_emb\.weight", _TO + "attn.distances"),
    (_LAYER + r"conv\.norm" + KIND, _TO + "conv_norm.{kind}"),
    (_LAYER + r"conv\.(?P<side>up|down)_conv" + KIND, _TO + "conv.{side}.{kind}"),
    (_LAYER + r"conv\.depth_conv\.conv\.weight", _TO + "conv.over_time.weight"),
    (_LAYER + r"conv\.batch_norm" + KIND, _TO + "conv.norm.{kind}"),
    (_LAYER + r"conv\.batch_norm\.running_mean", _TO + "conv.norm.mean"),
    (_LAYER + r"conv\.batch_norm\.running_var", _TO + "conv.norm.variance"),
    (_LAYER + r"post_norm" + KIND, _TO + "out_norm.{kind}"),
    (r"projector\.query", "encoder.projector.query"),
    (r"projector\.linear" + KIND, "encoder.projector.linear.{kind}"),
    (r"projector\.qformer\.layernorm" + KIND, "encoder.projector.norm.{kind}"),
    (_QUERIES + r"attention\.attention\.(?P<side>query|key|value)" + KIND, _QUERIES_TO + "attn.{side}.{kind}"),
    (_QUERIES + r"attention\.output\.dense" + KIND, _QUERIES_TO + "attn.out.{kind}"),
    (_QUERIES + r"attention\.output\.LayerNorm" + KIND, _QUERIES_TO + "attn_norm.{kind}"),
    (_QUERIES + r"crossattention\.attention\.(?P<side>query|key|value)" + KIND, _QUERIES_TO + "cross.{side}.{kind}"),
    (_QUERIES + r"crossattention\.output\.dense" + KIND, _QUERIES_TO + "cross.out.{kind}"),
    (_QUERIES + r"crossattention\.output\.LayerNorm" + KIND, _QUERIES_TO + "cross_norm.{kind}"),
    (_QUERIES + r"intermediate_query\.dense" + KIND, _QUERIES_TO + "ffn.up.{kind}"),
    (_QUERIES + r"output_query\.dense" + KIND, _QUERIES_TO + "ffn.down.{kind}"),
    (_QUERIES + r"output_query\.LayerNorm" + KIND, _QUERIES_TO + "ffn_norm.{kind}"),
)
_KEYS_AND_VALUES = "attn.to_kv.weight"


def granite_speech_names(encoder: AudioEncoderSpec) -> WeightNames:
    """How the checkpoints of a model with this encoder name their tensors."""
    layers = range(len(encoder.layers))
    weights = [f"encoder.layers.{index}.conv.{name}.weight" for index in layers for name in ("up", "down")]
    feedback = [
        rule
        for index, layer in enumerate(encoder.layers)
        if isinstance(layer, ConformerLayer) and layer.feedback
        for rule in (
            (r"encoder\.out" + KIND, f"encoder.layers.{index}.feedback.classes." + "{kind}"),
            (r"encoder\.out_mid" + KIND, f"encoder.layers.{index}.feedback.back." + "{kind}"),
        )
    ]
    return WeightNames(
        (*LLAMA.rules, *_RULES, *feedback),
        # With and without the name of the model around all of it, as transformers has written them at different times.
        prefixes=r"(?:model\.)?language_model\.(?:model\.)?|model\.(?=encoder\.|projector\.)",
        ignored=rf"{LLAMA.ignored}|lm_head\.weight|.*\.num_batches_tracked|encoder\.out(?:_mid)?{KIND}",
        convert=dict.fromkeys(weights, linear_weight) | {"encoder.projector.query": _first},
    )


def _first(tensor: Tensor) -> Tensor:
    """(1, queries, hidden) without its first dimension."""
    return tensor.flatten(0, 1) if tensor.dim() == 3 and len(tensor) == 1 else tensor


def split_keys(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with the fused projections of keys and values apart."""
    for name, tensor in tensors:
        if not name.endswith(_KEYS_AND_VALUES):
            yield name, tensor
            continue
        stem = name.removesuffix("kv.weight")
        keys, values = tensor.tensor_split(2)
        yield f"{stem}k.weight", keys
        yield f"{stem}v.weight", values
