"""Checks configs of models: their raw values before transformers reads them, and specs before a decoder is built."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from quire.engine.models.errors import BrokenFolder, UnsupportedModel
from quire.engine.models.specs.audio import Conv2dStem, Projector
from quire.engine.models.specs.decoder import (
    AudioEncoderSpec,
    CTCSpec,
    DecoderSpec,
    GroupedQueryAttention,
    GroupedSigmoidRouter,
    Indexer,
    LatentAttention,
    Layer,
    MoE,
    QKNorm,
    QueryTemperature,
    SoftmaxRouter,
    StackSpec,
    TransducerSpec,
    TransformerSpec,
)
from quire.engine.models.specs.delta_net import GatedDeltaNet
from quire.engine.models.specs.dual_encoder import DualEncoderSpec
from quire.engine.models.specs.part import SpecPart
from quire.engine.models.specs.rope import LongRope, Rope
from quire.engine.models.specs.state_space import ChannelStateSpace, HeadStateSpace, ShortConvolution
from quire.kernels.activation_names import CANONICAL_ACTIVATIONS

# Reading a config makes lists with an entry per layer, expert or label, so that huge numbers would fill the memory.
_MAX_COUNT = 10_000
_MAX_SIZE = (1 << 31) - 1
_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_nextn_predict_layers", "num_mtp_layers"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_attention_heads", "n_head"),
    *("num_key_value_heads", "encoder_layers", "decoder_layers", "num_labels", "type_vocab_size"),
    *("encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_conv_pos_embedding_groups"),
    *("num_blocks", "num_decoder_layers", "num_hidden_groups", "inner_group_num", "task_type_vocab_size"),
)
_POSITIVE = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size", "head_dim"),
    *("max_position_embeddings", "n_layer", "n_head", "n_embd", "n_positions", "d_model", "decoder_layers"),
    *("encoder_attention_heads", "decoder_attention_heads", "max_source_positions", "max_target_positions"),
    *("num_mel_bins", "encoder_ffn_dim", "decoder_ffn_dim", "num_conv_pos_embeddings", "num_conv_pos_embedding_groups"),
    *("encoder_num_attention_heads", "decoder_num_attention_heads", "intermediate_size", "decoder_hidden_size"),
    *("embedding_size", "num_hidden_groups", "inner_group_num"),
)
_TYPES: dict[object, tuple[type, ...]] = {"int": (int,), "float": (float, int), "str": (str,)}  # by annotation
_SHOWN = 40  # characters of a value in an error


def check_raw(config: Any, name: str) -> None:
    """Check the values of a config.json that decide how much is computed to read it.

    Args:
        config: the parsed JSON.
        name: name of the file, for the error.

    Raises:
        BrokenFolder: it is not an object, or a size in it is not a number or out of range.
    """
    if not isinstance(config, dict):
        raise BrokenFolder(f"{name} must contain a JSON object, not {_short(config)}")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(entry, str) for entry in architectures):
        raise BrokenFolder(f"{name}: architectures must be a list of strings, not {_short(architectures)}")
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in set(section) & {*_COUNTS, *_POSITIVE}:
            value = section[key]
            low, high = (1 if key in _POSITIVE else 0), (_MAX_COUNT if key in _COUNTS else _MAX_SIZE)
            if value is None or isinstance(value, list):  # transformers' default; one number for each layer
                continue
            if type(value) is not int or not low <= value <= high:
                raise BrokenFolder(f"{name}: {key} must be an integer from {low} to {high}, not {_short(value)}")


def check_spec(spec: TransformerSpec | CTCSpec | TransducerSpec | DualEncoderSpec) -> None:
    """Check that a model can be built from a spec.

    Raises:
        BrokenFolder: a number is not finite. With infinite ones, transformers computes something, but no language.
        UnsupportedModel: there are no layers, a number is out of range, or two of them do not match.
    """
    if isinstance(spec, TransformerSpec) and not spec.layers:
        raise UnsupportedModel("the model's config.json describes a model without layers")
    for part in {id(part): part for part in _parts(spec)}.values():
        for name in _infinite_fields(part):
            raise BrokenFolder(f"the model's config.json describes a model that cannot be built: {name} must be finite")
        for problem in _problems(part):
            raise UnsupportedModel(f"the model's config.json describes a model that cannot be built: {problem}")


def check_acts(spec: StackSpec | CTCSpec | TransducerSpec | DualEncoderSpec, *others: str) -> None:
    """Check that all activations are known: those of a spec, and others.

    Raises:
        UnsupportedModel: one is not.
    """
    parts = [part for part in _parts(spec) if isinstance(part, SpecPart)]
    for act in sorted({getattr(part, name) for part in parts for name in part.activations}.union(others)):
        if act not in CANONICAL_ACTIVATIONS:
            supported = ", ".join(CANONICAL_ACTIVATIONS)
            raise UnsupportedModel(f"activation {act!r} is not supported; supported are {supported}")


def _parts(part: Any) -> Iterator[Any]:
    """All dataclasses in a spec; equal layers, which are one object, once."""
    yield part
    for field in fields(part):
        value = getattr(part, field.name)
        for inner in {id(element): element for element in value}.values() if isinstance(value, tuple) else (value,):
            if is_dataclass(inner):
                yield from _parts(inner)


def _problems(part: Any) -> Iterator[str]:
    for field in fields(part):
        value = getattr(part, field.name)
        kind, _, optional = str(field.type).partition(" | ")
        if kind in _TYPES and not (isinstance(value, _TYPES[kind]) or (optional and value is None)):
            yield f"{field.name} is {_short(value)}, not a {'string' if kind == 'str' else 'number'}"
    for name in part.positive if isinstance(part, SpecPart) else ():
        if getattr(part, name) <= 0:
            yield f"{name} is {getattr(part, name)}, but must be above 0"
    match part:
        case TransformerSpec(layers=layers) if len(lengths := _longrope_lengths(layers)) > 1:
            yield f"its layers have different original_max_position_embeddings: {' and '.join(map(str, lengths))}"
        case AudioEncoderSpec(layers=()):
            yield "its encoder has no layers"
        case AudioEncoderSpec(concatenated=concatenated, layers=layers) if not set(concatenated) <= set(
            range(len(layers))
        ):
            yield f"outputs of layers {concatenated} are concatenated, but its encoder has {len(layers)} layers"
        case DecoderSpec(encoder=AudioEncoderSpec(projector=Projector(sizes=sizes)), hidden=hidden) if (
            sizes[-1] != hidden
        ):
            yield f"its encoder's outputs have size {sizes[-1]}, but the hidden size is {hidden}"
        case AudioEncoderSpec(max_positions=positions, averaged=averaged, joined=joined) if (
            positions % averaged or positions % joined
        ):
            yield f"the number of encoder positions, {positions}, is not a multiple of {max(averaged, joined)}"
        case Conv2dStem(bands=bands, layers=layers) if bands % 2**layers:
            yield f"the number of mel bins, {bands}, is not a multiple of {2**layers}"
        case GroupedQueryAttention(heads=heads, kv_heads=kv_heads) if heads % kv_heads:
            yield f"the number of heads, {heads}, is not a multiple of the {kv_heads} key and value heads"
        case GatedDeltaNet(heads=heads, key_heads=key_heads) if heads % key_heads:
            yield f"the number of value heads, {heads}, is not a multiple of the {key_heads} key heads"
        case GatedDeltaNet(width=width) if width < 2:
            yield f"the convolution has {width} taps, but must have at least 2"
        case GroupedQueryAttention(window=int(window)) if window < 1:
            yield f"the sliding window is {window}, but must be at least 1"
        case GroupedQueryAttention(chunk=int(chunk)) if chunk < 1:
            yield f"the size of attention's chunks is {chunk}, but must be at least 1"
        case GroupedQueryAttention(temperature=QueryTemperature(), qk_norm=QKNorm.HEAD | QKNorm.HEAD_ONLY):
            yield "its queries have a temperature, which the norms of its heads would undo"
        case GroupedQueryAttention(temperature=QueryTemperature(), rope=Rope(extension=LongRope())):
            yield "its queries have a temperature, which does not work with the rope type 'longrope'"
        case GroupedQueryAttention(softcap=cap) if cap is not None and cap <= 0:
            yield f"the softcap of attention scores is {cap}, but must be above 0"
        case GroupedQueryAttention(rope=Rope(dim=dim), head_dim=head_dim) if dim > head_dim:
            yield f"the rotary dimension {dim} exceeds the head size {head_dim}"
        case ShortConvolution(width=1) | ChannelStateSpace(width=1) | HeadStateSpace(width=1):
            yield "the width of its convolutions is 1, but must be at least 2"
        case HeadStateSpace(heads=heads, groups=groups) if heads % groups:
            yield f"{heads} heads of a state space cannot be split into {groups} groups"
        case LatentAttention(q_rank=None, indexer=Indexer()):
            yield "its indexer needs q_lora_rank, as it reads compressed queries"
        case Indexer(rope=Rope(dim=rotated), dim=dim) if rotated > dim:
            yield f"the rotary dimension {rotated} exceeds the indexer's head size {dim}"
        case TransformerSpec(layers=(Layer(attn=LatentAttention(indexer=Indexer(is_shared=True))), *_)):
            yield "its first layer shares the tokens that an earlier one has selected, but there is none"
        case Rope(dim=dim) if dim % 2:
            yield f"the rotary dimension {dim} is odd"
        case MoE(top_k=top_k, experts=experts) if top_k > experts:
            yield f"top_k is {top_k}, but there are only {experts} experts"
        case MoE(router=GroupedSigmoidRouter(groups=groups), experts=experts) if (
            experts % groups or experts < 2 * groups
        ):
            yield f"{experts} experts cannot be split into {groups} groups of two or more"
        case SoftmaxRouter(selection_bias=True, groups=groups) if groups > 1:
            yield f"experts are selected with a bias, which is not supported in {groups} groups of experts"
        case MoE(router=SoftmaxRouter(groups=groups), experts=experts) if experts % groups:
            yield f"{experts} experts cannot be split into {groups} groups"
        case (
            GroupedSigmoidRouter(groups=groups, top_groups=top_groups)
            | SoftmaxRouter(groups=groups, top_groups=top_groups)
        ) if top_groups > groups:
            yield f"topk_group is {top_groups}, but there are only {groups} groups of experts"


def _longrope_lengths(layers: Sequence[Layer]) -> list[int]:
    ropes = [layer.attn.rope for layer in layers if layer.attn.rope is not None]
    return sorted({rope.extension.trained_len for rope in ropes if isinstance(rope.extension, LongRope)})


def _infinite_fields(part: Any) -> Iterator[str]:
    for field in fields(part):
        value = getattr(part, field.name)
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            yield field.name


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
