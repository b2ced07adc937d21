"""ProjectorNames: which weights of a Hugging Face checkpoint the tensors of a file with a projector are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.checkpoint.gguf.projector import (
    NEWLINES,
    PATCHES,
    deepstack_layers,
    is_llava_next,
    is_siglip,
    kind_of,
)
from quire.engine.models.checkpoint.gguf.rules import Piece
from quire.engine.models.checkpoint.gguf.tensor_names import halves, joined, without

_TENSOR = re.compile(r"(?:(?P<part>v\.blk|v\.deepstack)\.(?P<layer>\d+)\.)?(?P<module>[\w.]+?)\.(?P<kind>weight|bias)")
_SECOND_FRAME = f"{PATCHES}.1"
_SIGLIP = {
    **{f"attn_{side}": f"self_attn.{side}_proj" for side in "qkv"},
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_CLIP = "vision_tower.vision_model."
_CLIP_TENSORS = (*NEWLINES, "v.class_embd", "v.pre_ln.weight", "v.pre_ln.bias")
_FIRST_NORM = ("v.blk.0.ln1.weight", "v.blk.0.ln1.bias")
_SIGLIP_MODULES = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
}
_INTERN = {
    **{f"attn_{side}": f"attention.{side}_proj" for side in "qkv"},
    **{f"attn_{side}_norm": f"attention.{side}_norm" for side in "qk"},
    "attn_out": "attention.projection_layer",
    "ln1": "layernorm_before",
    "ln2": "layernorm_after",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
# Weights of InternVL's whose names have no kind at the end.
_SCALES = re.compile(r"v\.blk\.(?P<layer>\d+)\.ls(?P<number>[12])(?:\.weight)?")
_TOKENS = re.compile(r"v\.(?:(?P<first>class_embd)|position_embd)(?:\.weight)?")
_PIXTRAL = {
    **{f"attn_{side}": f"attention.{side}_proj" for side in "qkv"},
    "attn_out": "attention.o_proj",
    "ln1": "attention_norm",
    "ln2": "ffn_norm",
    **{f"ffn_{side}": f"feed_forward.{side}_proj" for side in ("gate", "up", "down")},
}
_UNUSED = (*NEWLINES, "v.token_embd.img_break")  # the last is a row of the language model's embeddings
_QWEN = {"attn_q": "attn.qkv", "attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
_JOINED = ("attn_k", "attn_v")  # are read with attn_q
_QWEN_MERGER = {"v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2"}
_QWEN_PATCHES = "visual.patch_embed.proj"


@dataclass(frozen=True, slots=True)
class _Rules:
    """How files of a kind of projectors name modules.

    Attributes:
        layer: names of modules of layers, by those of the file.
        modules: names of the other modules, without the prefix of the encoder if they begin with a dot.
        prefix: of the names of the encoder's modules.
        layers: of the names of layers' modules, behind the prefix.
        norms: modules whose weights files have 1 added to.
        pairs: queries and keys of each head lie in pairs that are rotated together, not in two halves.
        deepstack: names of the modules whose values go to the language model's first layers.
    """

    layer: Mapping[str, str]
    modules: Mapping[str, str]
    prefix: str
    layers: str
    norms: tuple[str, ...] = ()
    pairs: bool = False
    deepstack: Mapping[str, str] = field(default_factory=dict)


_RULES = {
    "gemma3": _Rules(
        _SIGLIP,
        {**_SIGLIP_MODULES, "mm.soft_emb_norm": ".multi_modal_projector.mm_soft_emb_norm"},
        "vision_tower.vision_model.",
        "encoder.layers.",
        norms=("mm.soft_emb_norm",),
    ),
    "glm4v": _Rules(
        {**_QWEN, **{f"ffn_{side}": f"mlp.{side}_proj" for side in ("gate", "up", "down")}},
        {
            "v.norm_embd": "post_conv_layernorm",
            "v.position_embd": "embeddings.position_embedding",
            "v.post_ln": "post_layernorm",
            "mm.patch_merger": "downsample",
            "mm.model.fc": "merger.proj",
            "mm.post_norm": "merger.post_projection_norm",
            **{f"mm.{side}": f"merger.{side}_proj" for side in ("gate", "up", "down")},
        },
        "visual.",
        "blocks.",
    ),
    "idefics3": _Rules(
        _SIGLIP,
        {**_SIGLIP_MODULES, "mm.model.fc": ".model.connector.modality_projection.proj"},
        "model.vision_model.",
        "encoder.layers.",
    ),
    "internvl": _Rules(
        _INTERN,
        {
            "v.patch_embd": "embeddings.patch_embeddings.projection",
            "mm.model.mlp.0": ".multi_modal_projector.layer_norm",
            "mm.model.mlp.1": ".multi_modal_projector.linear_1",
            "mm.model.mlp.3": ".multi_modal_projector.linear_2",
        },
        "vision_tower.",
        "encoder.layer.",
    ),
    "mlp": _Rules(
        _SIGLIP,
        {
            **_SIGLIP_MODULES,
            "mm.0": ".multi_modal_projector.linear_1",
            "mm.2": ".multi_modal_projector.linear_2",
        },
        _CLIP,
        "encoder.layers.",
    ),
    "paddleocr": _Rules(
        _SIGLIP,
        {
            **_SIGLIP_MODULES,
            "mm.input_norm": ".mlp_AR.pre_norm",
            "mm.1": ".mlp_AR.linear_1",
            "mm.2": ".mlp_AR.linear_2",
        },
        "visual.vision_model.",
        "encoder.layers.",
    ),
    "pixtral": _Rules(
        _PIXTRAL,
        {
            "v.patch_embd": "patch_conv",
            "v.pre_ln": "ln_pre",
            "mm.1": ".multi_modal_projector.linear_1",
            "mm.2": ".multi_modal_projector.linear_2",
            "mm.input_norm": ".multi_modal_projector.norm",
            "mm.patch_merger": ".multi_modal_projector.patch_merger.merging_layer",
        },
        "vision_tower.",
        "transformer.layers.",
        pairs=True,
    ),
    "qwen2vl_merger": _Rules({**_QWEN, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}, _QWEN_MERGER, "visual.", "blocks."),
    "qwen2.5vl_merger": _Rules(
        {**_QWEN, **{f"ffn_{side}": f"mlp.{side}_proj" for side in ("gate", "up", "down")}},
        _QWEN_MERGER,
        "visual.",
        "blocks.",
    ),
    "qwen3vl_merger": _Rules(
        {**_QWEN, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        {
            "v.position_embd": "pos_embed",
            "v.post_ln": "merger.norm",
            "mm.0": "merger.linear_fc1",
            "mm.2": "merger.linear_fc2",
        },
        "visual.",
        "blocks.",
        deepstack={"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"},
    ),
}
# Weights whose names have no kind at the end.
_WHOLE = {"mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight"}


class ProjectorNames:
    """The weights in the tensors of a file whose kind is supported."""

    def __init__(self, facts: GgufFacts) -> None:
        self._facts = facts
        self._rules = _RULES[kind_of(facts)]
        self._is_qwen = self._rules.prefix == "visual."
        self._is_llava = kind_of(facts) == "mlp"
        self._swapped = _feed_forwards(facts)

    def pieces(self, tensor: str) -> list[Piece]:
        """The weights in a tensor; see `GgufNames`."""
        if tensor in _WHOLE:
            return [Piece(_WHOLE[tensor])]
        if self._is_llava and tensor in _CLIP_TENSORS:
            return self._clip(tensor)
        if self._is_llava and is_siglip(self._facts) and tensor in _FIRST_NORM:
            return self._first_norm(tensor)
        if tensor in _UNUSED:
            return []
        if self._rules.layer is _INTERN and (piece := _intern_piece(tensor)) is not None:
            return [piece]
        if tensor == _SECOND_FRAME or (self._is_qwen and tensor.startswith("v.patch_embd.")):
            return self._patches(tensor)
        match = _TENSOR.fullmatch(tensor)
        if match is None:
            return [Piece(tensor)]
        layer, module, kind = match["layer"], match["module"], match["kind"]
        if match["part"] == "v.deepstack":
            return self._level(tensor, int(layer), module, kind)
        if layer is None:
            name = self._rules.modules.get(module)
            name = name if name is None or name.startswith(".") else self._rules.prefix + name
        elif self._is_qwen and module in _JOINED:
            return []
        else:
            name = self._rules.layer.get(self._swapped.get(module, module))
            name = None if name is None else f"{self._rules.prefix}{self._rules.layers}{layer}.{name}"
        if name is None:
            return [Piece(tensor)]
        name = f"{name.removeprefix('.')}.{kind}"
        if self._is_qwen and module == "attn_q":
            others = tuple(f"v.blk.{layer}.{side}.{kind}" for side in _JOINED)
            return [Piece(name, make=joined, others=others)]
        if self._rules.pairs and module in ("attn_q", "attn_k"):
            heads = self._facts.integer(".vision.attention.head_count")
            return [Piece(name, rows=halves(self._facts.shape(tensor)[0], heads))]
        if module in self._rules.norms:
            return [Piece(name, make=partial(without, 1.0))]
        return [Piece(name)]

    def _clip(self, tensor: str) -> list[Piece]:
        """The weights of CLIP and of LLaVA 1.6 in a tensor that other towers do not have."""
        if tensor in NEWLINES:
            return [Piece("image_newline")] if is_llava_next(self._facts) else []
        if tensor == "v.class_embd":
            return [Piece(f"{_CLIP}embeddings.class_embedding")]
        kind = tensor.rpartition(".")[2]
        return [Piece(f"{_CLIP}pre_layrnorm.{kind}"), *self._unused_norm(kind)]

    def _first_norm(self, tensor: str) -> list[Piece]:
        """The weights in a tensor of SigLIP's first norm."""
        kind = tensor.rpartition(".")[2]
        return [Piece(f"{_CLIP}encoder.layers.0.layer_norm1.{kind}"), *self._unused_norm(kind)]

    def _unused_norm(self, kind: str) -> list[Piece]:
        """The norm behind the layers, which models have and do not use: in files that lack it, another one."""
        return [] if f"v.post_ln.{kind}" in self._facts.shapes else [Piece(f"{_CLIP}post_layernorm.{kind}")]

    def _patches(self, tensor: str) -> list[Piece]:
        """The convolution of patches of two frames, which files have in two tensors."""
        if tensor == _SECOND_FRAME:
            return []
        if tensor != PATCHES:
            return [Piece(f"{_QWEN_PATCHES}.{tensor.rpartition('.')[2]}")]
        return [Piece(f"{_QWEN_PATCHES}.weight", make=_frames, others=(_SECOND_FRAME,))]

    def _level(self, tensor: str, layer: int, module: str, kind: str) -> list[Piece]:
        layers, name = deepstack_layers(self._facts), self._rules.deepstack.get(module)
        if name is None or layer not in layers:
            return [Piece(tensor)]
        return [Piece(f"visual.deepstack_merger_list.{layers.index(layer)}.{name}.{kind}")]


def _intern_piece(tensor: str) -> Piece | None:
    """The weight of InternVL in a tensor whose name has no kind at the end; None if it is another."""
    if (scale := _SCALES.fullmatch(tensor)) is not None:
        return Piece(f"vision_tower.encoder.layer.{scale['layer']}.lambda_{scale['number']}")
    if (tokens := _TOKENS.fullmatch(tensor)) is None:
        return None
    name = "position_embeddings" if tokens["first"] is None else "cls_token"
    return Piece(f"vision_tower.embeddings.{name}", make=_one_image)


def _feed_forwards(facts: GgufFacts) -> Mapping[str, str]:
    """The names of the two layers of feed-forwards, which older files exchange."""
    shape = facts.shapes.get("v.blk.0.ffn_down.weight", ())
    width = facts.optional_integer(".vision.embedding_length")
    is_swapped = len(shape) == 2 and shape[1] == width != shape[0]
    return {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if is_swapped else {}


def _frames(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([*tensors], 2)


def _one_image(tensors: Sequence[Tensor]) -> Tensor:
    """(1, tokens, size)"""
    return tensors[0].reshape(1, -1, tensors[0].shape[-1])
