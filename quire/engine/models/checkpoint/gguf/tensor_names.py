"""GgufNames: which weights of a Hugging Face checkpoint the tensors of a GGUF file are, and how their rows lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from quire.engine.models.checkpoint.gguf.architectures import (
    LABELS,
    is_roberta,
    num_layers,
    roberta_offset,
)
from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.checkpoint.gguf.rope import ROPE_TENSORS

Make = Callable[[Sequence[Tensor]], Tensor]
_TENSOR = re.compile(
    r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>(?:shortconv\.)?\w+?)(?:\.(?P<expert>\d+))?\.(?P<kind>weight|bias)"
)
_SCALE = re.compile(r"(?P<module>blk\.\d+\.\w+)\.(?:input_)?scale")  # of weights and of inputs, as NVFP4 has them
_HEAD = re.compile(r"(?P<module>cls|cls\.output)\.(?P<kind>weight|bias)")
_ROBERTA_HEAD = {"cls": "classifier.dense", "cls.output": "classifier.out_proj"}
_BERT_HEAD = {"cls": "pooler.dense", "cls.output": "classifier"}
_DECODER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    **{f"attn_{side}": f"self_attn.{side}_proj" for side in ("q", "k", "v", "qkv")},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{side}_norm": f"self_attn.{side}_norm" for side in ("q", "k")},
}
_MLP = {f"ffn_{side}": f"mlp.{side}_proj" for side in ("gate", "up", "down")}
_LLAMA = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_OUTPUT_NORMS = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_inp": "mlp.gate", **{f"{name}_exps": f"mlp.experts.{{}}.{_MLP[name][4:]}" for name in _MLP}}
_QWEN2_MOE = {
    **{f"{name}_shexp": f"mlp.shared_expert.{_MLP[name][4:]}" for name in _MLP},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{f"{name}_exps": f"block_sparse_moe.experts.{{}}.w{index}" for name, index in zip(_MLP, (1, 3, 2), strict=True)},
}
_GRANITE_MOE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"{name}_exps": f"block_sparse_moe.experts.{{}}.{_MLP[name][4:]}" for name in _MLP},
}
_SHARED_EXPERTS = {f"{name}_shexp": f"mlp.shared_experts.{_MLP[name][4:]}" for name in _MLP}
_LATENT = {
    **{f"attn_{side}": f"self_attn.{side}_proj" for side in ("q_a", "q_b", "kv_b")},
    **{f"attn_{side}_a_norm": f"self_attn.{side}_a_layernorm" for side in ("q", "kv")},
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    **_SHARED_EXPERTS,
}
_GLM4 = {
    **_LLAMA,
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_HUNYUAN = {
    **_LLAMA,
    **_EXPERTS,
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_inp": "mlp.gate.wg",
    **{f"{name}_shexp": f"mlp.shared_mlp.{_MLP[name][4:]}" for name in _MLP},
}
_LLAMA4 = {
    **_LLAMA,
    "ffn_gate_inp": "feed_forward.router",
    **{name: f"feed_forward.{_MLP[name][4:]}" for name in _MLP},
    **{f"{name}_shexp": f"feed_forward.shared_expert.{_MLP[name][4:]}" for name in _MLP},
    **{f"{name}_exps": f"feed_forward.experts.{{}}.{_MLP[name][4:]}" for name in _MLP},
}
_BEHIND_ATTENTION = {"post_attention_norm": "post_attention_layernorm"}
_FALCON = {
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_BERT_MODULES = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
_BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_JINA = {
    **_BERT,
    **{f"attn_{side}_norm": f"attention.self.layer_norm_{side}" for side in "qk"},
    "attn_norm_2": "layer_norm_1",
    "ffn_up": "mlp.gated_layers",
    "ffn_down": "mlp.wo",
    "layer_output_norm": "mlp.layernorm",
}
# Of the variant that normalizes queries and keys.
_JINA_NORMED = {"ffn_up": "mlp.up_gated_layer", "ffn_down": "mlp.down_layer", "layer_output_norm": "layer_norm_2"}
_NOMIC = {
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_up": "mlp.fc11",
    "ffn_gate": "mlp.fc12",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}
# Weights whose names have no kind at the end.
_WHOLE = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias", "attn_sinks.weight": "self_attn.sinks"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A weight of the checkpoint in a tensor of the file.

    Attributes:
        name: in Hugging Face's checkpoints.
        expert: index in a stack of experts; None: the tensor is no stack.
        rows: the rows of the tensor that it has, in this order; None: all of them.
        make: computes it from the numbers of the tensor, and of `others`; None: it is these rows as they are.
        others: further tensors that it is made of.
    """

    name: str
    expert: int | None = None
    rows: Tensor | None = None
    make: Make | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Rules:
    """How an architecture's files name modules, and what else differs.

    Attributes:
        layer: names of modules of layers, by those of the file; "{}" stands for an expert.
        modules: names of the other modules.
        prefix: of the names of layers' modules.
        pairs: queries and keys of each head lie in pairs that are rotated together, not in two halves.
        norm_offset: what files add to the weights of norms.
    """

    layer: Mapping[str, str]
    modules: Mapping[str, str] = field(default_factory=lambda: _DECODER)
    prefix: str = "model.layers."
    pairs: bool = False
    norm_offset: float = 0.0


_PHI3 = {**_LLAMA, "ffn_up": "mlp.gate_up_proj"}
_PHI2 = {**_LLAMA, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_GPT_OSS = {**_ATTENTION, **_EXPERTS, "ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"}
_STARCODER2 = {**_LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_LFM2 = {
    **_ATTENTION,
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    **{f"attn_{side}_norm": f"self_attn.{side}_layernorm" for side in ("q", "k")},
    **{name: f"feed_forward.w{index}" for name, index in zip(_MLP, (1, 3, 2), strict=True)},
    "ffn_norm": "ffn_norm",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
_LFM2_MODULES = {**_DECODER, **dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm")}
_FALCON_MODULES = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_RULES = {
    "arcee": _Rules(_LLAMA, pairs=True),
    "bert": _Rules(_BERT, _BERT_MODULES, "encoder.layer."),
    "cohere2": _Rules(_LLAMA),
    "command-r": _Rules(_LLAMA),
    "deepseek2": _Rules({**_LLAMA, **_EXPERTS, **_LATENT}),
    "dots1": _Rules({**_LLAMA, **_EXPERTS, **_SHARED_EXPERTS}),
    "ernie4_5": _Rules(_LLAMA),
    "ernie4_5-moe": _Rules({**_LLAMA, **_EXPERTS, **_SHARED_EXPERTS}),
    "exaone4": _Rules(_OUTPUT_NORMS),
    "falcon": _Rules(_FALCON, _FALCON_MODULES, "transformer.h."),
    "gemma": _Rules(_LLAMA, norm_offset=1.0),
    "gemma2": _Rules(_OUTPUT_NORMS, norm_offset=1.0),
    "gemma3": _Rules(_OUTPUT_NORMS, norm_offset=1.0),
    "glm4": _Rules(_GLM4),
    "glm4moe": _Rules({**_LLAMA, **_EXPERTS, **_SHARED_EXPERTS, **_BEHIND_ATTENTION}),
    "gpt-oss": _Rules(_GPT_OSS),
    "granite": _Rules(_LLAMA, pairs=True),
    "granitemoe": _Rules({**_LLAMA, **_GRANITE_MOE}, pairs=True),
    "hunyuan-dense": _Rules(_HUNYUAN),
    "hunyuan-moe": _Rules(_HUNYUAN),
    "jina-bert-v2": _Rules(_JINA, _BERT_MODULES, "encoder.layer."),
    "lfm2": _Rules(_LFM2, _LFM2_MODULES),
    "llama": _Rules({**_LLAMA, **_MIXTRAL}, pairs=True),
    "llama4": _Rules(_LLAMA4),
    "minimax-m2": _Rules({**_LLAMA, **_EXPERTS}),
    "mistral3": _Rules(_LLAMA, pairs=True),
    "nomic-bert": _Rules(_NOMIC, {**_BERT_MODULES, "token_embd_norm": "emb_ln"}, "encoder.layers."),
    "olmo2": _Rules(_OUTPUT_NORMS),
    "phi2": _Rules(_PHI2, {**_DECODER, "output_norm": "model.final_layernorm"}),
    "phi3": _Rules(_PHI3),
    "qwen2": _Rules(_LLAMA),
    "qwen3": _Rules(_LLAMA),
    "qwen2moe": _Rules({**_LLAMA, **_EXPERTS, **_QWEN2_MOE}),
    "qwen2vl": _Rules(_LLAMA),
    "qwen3moe": _Rules({**_LLAMA, **_EXPERTS}),
    "qwen3vl": _Rules(_LLAMA),
    "qwen3vlmoe": _Rules({**_LLAMA, **_EXPERTS}),
    "seed_oss": _Rules({**_LLAMA, **_BEHIND_ATTENTION}),
    "smollm3": _Rules(_LLAMA, pairs=True),
    "stablelm": _Rules(_LLAMA),
    "starcoder2": _Rules(_STARCODER2),
}


class GgufNames:
    """The weights in the tensors of a file whose architecture is supported."""

    def __init__(self, facts: GgufFacts) -> None:
        self._facts = facts
        self._rules = _RULES[facts.architecture]
        self._is_jina = facts.architecture == "jina-bert-v2"
        self._has_ups_first = self._is_jina and "blk.0.attn_q_norm.weight" in facts.shapes
        if self._has_ups_first:
            self._rules = replace(self._rules, layer={**self._rules.layer, **_JINA_NORMED})
        self._layers = num_layers(facts)

    def pieces(self, tensor: str) -> list[Piece]:
        """The weights in a tensor; none if it is not needed. One that no rule names is there under its own name."""
        match, scale, head = (pattern.fullmatch(tensor) for pattern in (_TENSOR, _SCALE, _HEAD))
        if tensor in ROPE_TENSORS or (scale is not None and f"{scale['module']}.weight" in self._facts.shapes):
            return []  # the checkpoint multiplies weights with their scales
        if head is not None:
            return [self._head_for_labels(tensor, head["module"], head["kind"])]
        if match is None:
            return [Piece(tensor)]
        if match["layer"] is not None and int(match["layer"]) >= self._layers:
            return []  # predicts further tokens
        module, kind, expert = match["module"], match["kind"], match["expert"]
        if module == "attn_rot_embd" or module == "attn_v_b":  # the second is read with attn_k_b
            return []
        if self._is_jina and module == "ffn_gate":  # is read with ffn_up
            return []
        if module == "attn_k_b":
            return [self._latent_projection(tensor)]
        prefix = "" if match["layer"] is None else f"{self._rules.prefix}{match['layer']}."
        if (whole := _WHOLE.get(f"{module}.{kind}")) is not None:
            return [Piece(prefix + whole)]
        if module == "ffn_gate_up_exps":
            return self._fused_experts(tensor, prefix, kind)
        if self._facts.architecture == "bert" and module == "attn_qkv":
            return self._thirds(tensor, prefix, kind)
        name = self._module(module, expert is not None, is_layer=match["layer"] is not None)
        if name is None:
            return [Piece(tensor)]
        piece = Piece(f"{prefix}{name}.{kind}")
        if "{}" not in name:
            return [self._with_order(piece, tensor, module)]
        if expert is not None:
            return [replace(piece, name=piece.name.format(expert))]
        shape = self._facts.shape(tensor)
        if len(shape) != (3 if kind == "weight" else 2):
            return [Piece(tensor)]
        return [replace(piece, name=piece.name.format(index), expert=index) for index in range(shape[0])]

    def _module(self, module: str, of_expert: bool, *, is_layer: bool) -> str | None:
        """The name of a module; None if no rule has it. `of_expert`: it is one of several of that name in a layer."""
        if not is_layer:
            return self._rules.modules.get(module)
        if self._facts.architecture == "falcon" and module.startswith("attn_norm"):
            has_two = "blk.0.attn_norm_2.weight" in self._facts.shapes
            return {"attn_norm": "ln_mlp" if has_two else "input_layernorm", "attn_norm_2": "ln_attn"}.get(module)
        return self._rules.layer.get(f"{module}_exps" if of_expert else module)

    def _with_order(self, piece: Piece, tensor: str, module: str) -> Piece:
        """The weight with the order of its rows, and with what is to be computed."""
        rows = self._facts.shape(tensor)[0]
        if self._rules.pairs and module in ("attn_q", "attn_k"):
            heads = self._facts.integer(".attention.head_count")
            if module == "attn_k":
                heads = self._facts.optional_integer(".attention.head_count_kv") or heads
            return replace(piece, rows=halves(rows, heads))
        if self._facts.architecture == "falcon" and module == "attn_qkv":
            heads = self._facts.integer(".attention.head_count")
            kv_heads = self._facts.optional_integer(".attention.head_count_kv") or 1
            dim = self._facts.head_dim
            fits = heads % kv_heads == 0 and (heads + 2 * kv_heads) * dim == rows
            return replace(piece, rows=_by_key_head(heads, kv_heads, dim)) if fits else piece
        if self._rules.norm_offset and module.endswith("norm"):
            return replace(piece, make=partial(without, self._rules.norm_offset))
        if module == "ffn_gate_inp_shexp":
            return replace(piece, make=_one_row)
        if (
            self._is_jina
            and (gate := tensor.replace(".ffn_up.", ".ffn_gate.")) != tensor
            and gate in self._facts.shapes
        ):
            make = joined if self._has_ups_first else _joined_backwards
            return replace(piece, make=make, others=(gate,))
        if module == "position_embd" and (offset := roberta_offset(self._facts)):
            return replace(piece, make=partial(_behind_zeros, offset))
        return piece

    def _head_for_labels(self, tensor: str, module: str, kind: str) -> Piece:
        if self._facts.architecture == "qwen3":
            return Piece("score.weight", make=_yes_without_no) if tensor == LABELS else Piece(tensor)
        return Piece(f"{(_ROBERTA_HEAD if is_roberta(self._facts) else _BERT_HEAD)[module]}.{kind}")

    def _latent_projection(self, tensor: str) -> Piece:
        """DeepSeek's up-projection of keys and values, of which newer files have two tensors."""
        layer = tensor.split(".")[1]
        heads = self._facts.integer(".attention.head_count")
        values = f"blk.{layer}.attn_v_b.weight"
        name = f"{self._rules.prefix}{layer}.self_attn.kv_b_proj.weight"
        return Piece(name, make=partial(_joined_latents, heads), others=(values,))

    def _fused_experts(self, tensor: str, prefix: str, kind: str) -> list[Piece]:
        shape = self._facts.shape(tensor)
        if len(shape) != 3:
            return [Piece(tensor)]
        count, rows, _ = shape
        halves = zip(("ffn_gate_exps", "ffn_up_exps"), torch.arange(rows).tensor_split(2), strict=True)
        return [
            Piece(f"{prefix}{self._rules.layer[module].format(index)}.{kind}", expert=index, rows=half)
            for module, half in halves
            for index in range(count)
        ]

    def _thirds(self, tensor: str, prefix: str, kind: str) -> list[Piece]:
        parts = torch.arange(self._facts.shape(tensor)[0]).tensor_split(3)
        names = (self._rules.layer[f"attn_{side}"] for side in "qkv")
        return [Piece(f"{prefix}{name}.{kind}", rows=rows) for name, rows in zip(names, parts, strict=True)]


def halves(rows: int, heads: int) -> Tensor:
    """The rows of heads in which the elements that are rotated together lie in two halves, from pairs."""
    if heads < 1 or rows % (2 * heads):  # the shape is refused when it is compared with the model's
        return torch.arange(rows)
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _by_key_head(heads: int, kv_heads: int, dim: int) -> Tensor:
    """The rows of each key head's queries, its key and its value, from all queries, all keys and all values."""
    parts = torch.arange((heads + 2 * kv_heads) * dim).split([heads * dim, kv_heads * dim, kv_heads * dim])
    return torch.cat([part.view(kv_heads, -1) for part in parts], 1).flatten()


def without(offset: float, tensors: Sequence[Tensor]) -> Tensor:
    """The weight from which `offset` is taken."""
    return tensors[0].float() - offset


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of several tensors, one behind the other."""
    return torch.cat([*tensors])


def _joined_backwards(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([*reversed(tensors)])


def _one_row(tensors: Sequence[Tensor]) -> Tensor:
    """The weight of one output, which files have as a vector."""
    return tensors[0].reshape(1, -1)


def _behind_zeros(rows: int, tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensors[0].new_zeros((rows, tensors[0].shape[1])), tensors[0]])


def _joined_latents(heads: int, tensors: Sequence[Tensor]) -> Tensor:
    """(heads * (keys + values), rank), from (heads, rank, keys) and (heads, values, rank)."""
    keys, values = tensors
    rank = values.shape[-1]
    by_head = keys.reshape(heads, rank, -1).transpose(1, 2), values.reshape(heads, -1, rank)
    return torch.cat(by_head, 1).flatten(0, 1)


def _yes_without_no(tensors: Sequence[Tensor]) -> Tensor:
    """The row whose product is the difference of both rows' products: its sigmoid is the softmax of the first."""
    return tensors[0][:1] - tensors[0][1:]
