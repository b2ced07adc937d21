"""GgufNames: which weights of a Hugging Face checkpoint the tensors of a GGUF file are, and how their rows lie."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quire.engine.models.checkpoint.gguf.decoder_config import num_layers
from quire.engine.models.checkpoint.gguf.encoders import JINA_BERT, LABELS, MODERN_BERT, is_roberta, roberta_offset
from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.checkpoint.gguf.hybrid_names import hybrid_rules
from quire.engine.models.checkpoint.gguf.rope import ROPE_TENSORS
from quire.engine.models.checkpoint.gguf.rules import (
    ATTENTION,
    DECODER,
    EXPERTS,
    LATENT,
    LLAMA,
    MLP,
    QWEN2_MOE,
    SHARED_EXPERTS,
    Change,
    Piece,
    Rules,
)

_BY_KEY_HEAD = ("bloom", "falcon", "gptneox")  # their checkpoints have queries, key and value of a head together
_TENSOR = re.compile(
    r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>(?:(?:shortconv|nextn|indexer)\.)?\w+?)(?:\.(?P<expert>\d+))?(?:\.(?P<kind>weight|bias))?"
)
_SCALE = re.compile(r"(?P<module>blk\.\d+\.\w+)\.(?:input_)?scale")  # of weights and of inputs, as NVFP4 has them
_HEAD = re.compile(r"(?P<module>cls|cls\.norm|cls\.output)\.(?P<kind>weight|bias)")
_ROBERTA_HEAD = {"cls": "classifier.dense", "cls.output": "classifier.out_proj"}
_BERT_HEAD = {"cls": "pooler.dense", "cls.output": "classifier"}
_MODERN_HEAD = {"cls": "head.dense", "cls.norm": "head.norm", "cls.output": "classifier"}
_OUTPUT_NORMS = {
    **LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{f"{name}_exps": f"block_sparse_moe.experts.{{}}.w{index}" for name, index in zip(MLP, (1, 3, 2), strict=True)},
}
_GRANITE_MOE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"{name}_exps": f"block_sparse_moe.experts.{{}}.{MLP[name][4:]}" for name in MLP},
    **{f"{name}_shexp": f"shared_mlp.{MLP[name][4:]}" for name in MLP},
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_GLM4 = {
    **LLAMA,
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_HUNYUAN = {
    **LLAMA,
    **EXPERTS,
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_inp": "mlp.gate.wg",
    **{f"{name}_shexp": f"mlp.shared_mlp.{MLP[name][4:]}" for name in MLP},
}
_LLAMA4 = {
    **LLAMA,
    "ffn_gate_inp": "feed_forward.router",
    **{name: f"feed_forward.{MLP[name][4:]}" for name in MLP},
    **{f"{name}_shexp": f"feed_forward.shared_expert.{MLP[name][4:]}" for name in MLP},
    **{f"{name}_exps": f"feed_forward.experts.{{}}.{MLP[name][4:]}" for name in MLP},
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
_NOMIC_MOE = {
    **_NOMIC,
    "ffn_up": "mlp.fc1",
    "ffn_gate_inp": "mlp.router.layer",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_NOMIC_MODULES = {**_BERT_MODULES, "token_embd_norm": "emb_ln"}
_JINA_V3 = {
    **_NOMIC,
    "attn_qkv": "mixer.Wqkv",
    "attn_output": "mixer.out_proj",
    "ffn_up": "mlp.fc1",
}
_MODERN_BERT = {
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}
_MODERN_BERT_MODULES = {
    "token_embd": "embeddings.tok_embeddings",
    "token_embd_norm": "embeddings.norm",
    "output_norm": "final_norm",
}
# Weights of Gemma 4 whose names are those of scales.
_LEARNED_SCALE = re.compile(r"blk\.(?P<layer>\d+)\.(?P<module>ffn_gate_inp|ffn_down_exps)\.scale")
_LEARNED_SCALES = {"ffn_gate_inp": "router.scale", "ffn_down_exps": "router.per_expert_scale"}
_PHI3 = {**LLAMA, "ffn_up": "mlp.gate_up_proj"}
_PHI2 = {**LLAMA, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_GPT_OSS = {**ATTENTION, **EXPERTS, "ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"}
_STARCODER2 = {**LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_LAYER_INPUTS = {
    **_OUTPUT_NORMS,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA4 = {
    **_LAYER_INPUTS,
    "ffn_gate_inp": "router.proj",
    **{f"{name}_exps": f"experts.{{}}.{MLP[name][4:]}" for name in MLP},
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    **{f"post_ffw_norm_{index}": f"post_feedforward_layernorm_{index}" for index in (1, 2)},
}
_GEMMA3N = {
    **_LAYER_INPUTS,
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
}
_LAYER_INPUT_MODULES = {
    **DECODER,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}
_XIELU = ("alpha_p", "alpha_n", "beta", "eps")  # numbers of Apertus' activation
_APERTUS = {**LLAMA, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
_BLOOM = {**_FALCON, "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GPT_NEOX = {
    **_BLOOM,
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
}
_GPT_NEOX_MODULES = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_MODULES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_INDEXER = {
    "indexer.attn_q_b": "wq_b",
    "indexer.attn_k": "wk",
    "indexer.k_norm": "k_norm",
    "indexer.proj": "weights_proj",
}
_INDEXED = {
    **LLAMA,
    **EXPERTS,
    **LATENT,
    **{name: f"self_attn.indexer.{module}" for name, module in _INDEXER.items()},
}
# The layers behind the pooling of EmbeddingGemma are the steps of a pooler.
_EMBEDDING_MODULES = {**DECODER, "dense_2": "heads.embed.0", "dense_3": "heads.embed.1"}
_FALCON_MODULES = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_BLOOM_MODULES = {**_FALCON_MODULES, "token_embd_norm": "transformer.word_embeddings_layernorm"}


def _transposed(tensors: Sequence[Tensor]) -> Tensor:
    """(size_in, size_out), as GPT-2's checkpoints have weights."""
    return tensors[0].T


_TRANSPOSED: Mapping[str, Change] = {
    f"{name}.weight": lambda _, piece: replace(piece, make=_transposed)
    for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
}
_RULES = {
    "apertus": Rules(_APERTUS),
    "arcee": Rules(LLAMA, pairs=True),
    "bert": Rules(_BERT, _BERT_MODULES, "encoder.layer."),
    "bloom": Rules(_BLOOM, _BLOOM_MODULES, "transformer.h."),
    "chatglm": Rules(_PHI3),
    "cohere2": Rules(LLAMA),
    "command-r": Rules(LLAMA),
    "deepseek2": Rules({**LLAMA, **EXPERTS, **LATENT}),
    "deepseek32": Rules(_INDEXED),
    "dots1": Rules({**LLAMA, **EXPERTS, **SHARED_EXPERTS}),
    "ernie4_5": Rules(LLAMA),
    "ernie4_5-moe": Rules({**LLAMA, **EXPERTS, **SHARED_EXPERTS}),
    "eurobert": Rules(LLAMA),
    "exaone4": Rules(_OUTPUT_NORMS),
    "exaone-moe": Rules({**LLAMA, **EXPERTS, **SHARED_EXPERTS}),
    "falcon": Rules(_FALCON, _FALCON_MODULES, "transformer.h."),
    "gemma": Rules(LLAMA, norm_offset=1.0),
    "gemma-embedding": Rules(_OUTPUT_NORMS, _EMBEDDING_MODULES, norm_offset=1.0),
    "gemma2": Rules(_OUTPUT_NORMS, norm_offset=1.0),
    "gemma3": Rules(_OUTPUT_NORMS, norm_offset=1.0),
    "glm-dsa": Rules(_INDEXED),
    "glm4": Rules(_GLM4),
    "glm4moe": Rules({**LLAMA, **EXPERTS, **SHARED_EXPERTS, **_BEHIND_ATTENTION}),
    "gemma3n": Rules(_GEMMA3N, _LAYER_INPUT_MODULES),
    "gemma4": Rules(_GEMMA4, _LAYER_INPUT_MODULES),
    "gpt-oss": Rules(_GPT_OSS),
    "gpt2": Rules(_GPT2, _GPT2_MODULES, "transformer.h.", changes=_TRANSPOSED),
    "gptneox": Rules(_GPT_NEOX, _GPT_NEOX_MODULES, "gpt_neox.layers."),
    "granite": Rules(LLAMA, pairs=True),
    "granitemoe": Rules({**LLAMA, **_GRANITE_MOE}, pairs=True),
    "hunyuan-dense": Rules(_HUNYUAN),
    "hunyuan-moe": Rules(_HUNYUAN),
    JINA_BERT: Rules(_JINA, _BERT_MODULES, "encoder.layer."),
    "jina-bert-v3": Rules(_JINA_V3, _NOMIC_MODULES, "encoder.layers."),
    "llama": Rules({**LLAMA, **_MIXTRAL}, pairs=True),
    "llama-embed": Rules(LLAMA, pairs=True),
    "llama4": Rules(_LLAMA4),
    MODERN_BERT: Rules(_MODERN_BERT, _MODERN_BERT_MODULES, "layers."),
    "minimax-m2": Rules({**LLAMA, **EXPERTS}),
    "mistral3": Rules(LLAMA, pairs=True),
    "nomic-bert": Rules(_NOMIC, _NOMIC_MODULES, "encoder.layers."),
    "nomic-bert-moe": Rules(_NOMIC_MOE, _NOMIC_MODULES, "encoder.layers."),
    "olmoe": Rules({**LLAMA, **EXPERTS}),
    "olmo2": Rules(_OUTPUT_NORMS),
    "paddleocr": Rules(LLAMA),
    "phi2": Rules(_PHI2, {**DECODER, "output_norm": "model.final_layernorm"}),
    "phi3": Rules(_PHI3),
    "qwen2": Rules(LLAMA),
    "qwen3": Rules(LLAMA),
    "qwen2moe": Rules({**LLAMA, **EXPERTS, **QWEN2_MOE}),
    "qwen2vl": Rules(LLAMA),
    "qwen3moe": Rules({**LLAMA, **EXPERTS}),
    "qwen3vl": Rules(LLAMA),
    "qwen3vlmoe": Rules({**LLAMA, **EXPERTS}),
    "seed_oss": Rules({**LLAMA, **_BEHIND_ATTENTION}),
    "smollm3": Rules(LLAMA, pairs=True),
    "stablelm": Rules(LLAMA),
    "starcoder2": Rules(_STARCODER2),
}


class GgufNames:
    """The weights in the tensors of a file whose architecture is supported."""

    def __init__(self, facts: GgufFacts) -> None:
        self._facts = facts
        self._rules = hybrid_rules(facts) or _RULES[facts.architecture]
        self._is_jina = facts.architecture == JINA_BERT
        self._has_ups_first = self._is_jina and "blk.0.attn_q_norm.weight" in facts.shapes
        if self._has_ups_first:
            self._rules = replace(self._rules, layer={**self._rules.layer, **_JINA_NORMED})
        self._layers = num_layers(facts)

    def pieces(self, tensor: str) -> list[Piece]:
        """The weights in a tensor; none if it is not needed. One that no rule names is there under its own name."""
        if self._facts.architecture == "gemma4" and (learned := _LEARNED_SCALE.fullmatch(tensor)) is not None:
            return [Piece(f"{self._rules.prefix}{learned['layer']}.{_LEARNED_SCALES[learned['module']]}")]
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
        local = module if kind is None else f"{module}.{kind}"
        if prefix and (whole := self._rules.whole.get(local)) is not None:
            return [self._changed(Piece(prefix + whole), local)]
        if kind is None:
            return [Piece(tensor)]
        if module == "ffn_gate_up_exps":
            return self._fused_experts(tensor, prefix, kind)
        if self._facts.architecture == "bert" and module == "attn_qkv":
            return self._thirds(tensor, prefix, kind)
        name = self._module(module, expert is not None, is_layer=match["layer"] is not None)
        if name is None:
            return [Piece(tensor)]
        piece = Piece(f"{prefix}{name}.{kind}")
        if "{}" not in name:
            return [self._changed(self._with_order(piece, tensor, module), local)]
        if expert is not None:
            return [replace(piece, name=piece.name.format(expert))]
        shape = self._facts.shape(tensor)
        if len(shape) != (3 if kind == "weight" else 2):
            return [Piece(tensor)]
        return [replace(piece, name=piece.name.format(index), expert=index) for index in range(shape[0])]

    def numbers(self) -> dict[str, list[float]]:
        """The weights that lie in the metadata, by name.

        Raises:
            BrokenFolder: there is not one for each layer.
        """
        if self._facts.architecture != "apertus":
            return {}
        numbers = {name: self._facts.numbers_by_layer(f"xielu.{name}", self._layers) for name in _XIELU}
        return {
            f"{self._rules.prefix}{layer}.mlp.act_fn.{name}": [values[layer]]
            for name, values in numbers.items()
            for layer in range(self._layers)
        }

    def _module(self, module: str, of_expert: bool, *, is_layer: bool) -> str | None:
        """The name of a module; None if no rule has it. `of_expert`: it is one of several of that name in a layer."""
        if not is_layer:
            return self._rules.modules.get(module)
        if self._facts.architecture == "falcon" and module.startswith("attn_norm"):
            has_two = "blk.0.attn_norm_2.weight" in self._facts.shapes
            return {"attn_norm": "ln_mlp" if has_two else "input_layernorm", "attn_norm_2": "ln_attn"}.get(module)
        return self._rules.layer.get(f"{module}_exps" if of_expert else module)

    def _changed(self, piece: Piece, local: str) -> Piece:
        """The weight with what the architecture's files have changed. `local`: the tensor's name in its layer."""
        change = self._rules.changes.get(local)
        return piece if change is None else change(self._facts, piece)

    def _with_order(self, piece: Piece, tensor: str, module: str) -> Piece:
        """The weight with the order of its rows, and with what is to be computed."""
        rows = self._facts.shape(tensor)[0]
        if self._rules.pairs and module in ("attn_q", "attn_k"):
            heads = self._facts.integer(".attention.head_count")
            if module == "attn_k":
                heads = self._facts.largest(".attention.head_count_kv") or heads
            return replace(piece, rows=halves(rows, heads))
        if self._facts.architecture == "glm4" and module in ("attn_q", "attn_k"):
            return replace(piece, rows=self._neighbours(rows))
        if self._facts.architecture in _BY_KEY_HEAD and module == "attn_qkv":
            heads = self._facts.integer(".attention.head_count")
            is_falcon = self._facts.architecture == "falcon"
            kv_heads = (self._facts.optional_integer(".attention.head_count_kv") or 1) if is_falcon else heads
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

    def _neighbours(self, rows: int) -> Tensor | None:
        """The rows of heads whose elements that are rotated together are neighbours; None: they are in the file.

        Files of models that read pictures have them in two halves of the part that is rotated.
        """
        rotated, dim = self._facts.optional_integer(".rope.dimension_count") or 0, self._facts.head_dim
        if not self._facts.sequence(".rope.dimension_sections") or not 0 < rotated <= dim or rotated % 2 or rows % dim:
            return None
        turned = torch.arange(rotated).view(2, -1).t().flatten()
        order = torch.cat([turned, torch.arange(rotated, dim)])
        return (torch.arange(0, rows, dim)[:, None] + order).flatten()

    def _head_for_labels(self, tensor: str, module: str, kind: str) -> Piece:
        if self._facts.architecture == "qwen3":
            return Piece("score.weight", make=_yes_without_no) if tensor == LABELS else Piece(tensor)
        heads = _ROBERTA_HEAD if is_roberta(self._facts) else _BERT_HEAD
        heads = _MODERN_HEAD if self._facts.architecture == MODERN_BERT else heads
        return Piece(f"{heads[module]}.{kind}" if module in heads else tensor)

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
