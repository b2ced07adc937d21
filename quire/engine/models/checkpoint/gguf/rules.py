"""Rules for the names of tensors in GGUF files, and the parts that they have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quire.engine.models.checkpoint.gguf.facts import GgufFacts

Make = Callable[[Sequence[Tensor]], Tensor]
DECODER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    **{f"attn_{side}": f"self_attn.{side}_proj" for side in ("q", "k", "v", "qkv")},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{side}_norm": f"self_attn.{side}_norm" for side in ("q", "k")},
}
MLP = {f"ffn_{side}": f"mlp.{side}_proj" for side in ("gate", "up", "down")}
LLAMA = {**ATTENTION, **MLP, "ffn_norm": "post_attention_layernorm"}
EXPERTS = {"ffn_gate_inp": "mlp.gate", **{f"{name}_exps": f"mlp.experts.{{}}.{MLP[name][4:]}" for name in MLP}}
QWEN2_MOE = {
    **{f"{name}_shexp": f"mlp.shared_expert.{MLP[name][4:]}" for name in MLP},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
SHARED_EXPERTS = {f"{name}_shexp": f"mlp.shared_experts.{MLP[name][4:]}" for name in MLP}
LATENT = {
    **{f"attn_{side}": f"self_attn.{side}_proj" for side in ("q_a", "q_b", "kv_b")},
    **{f"attn_{side}_a_norm": f"self_attn.{side}_a_layernorm" for side in ("q", "kv")},
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    **SHARED_EXPERTS,
}
# Weights whose names have no kind at the end.
WHOLE = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "attn_sinks.weight": "self_attn.sinks",
    "layer_output_scale.weight": "layer_scalar",
    "altup_correct_scale.weight": "altup.correct_output_scale",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A weight of the checkpoint in a tensor of the file.

    Attributes:
        name: in Hugging Face's checkpoints.
        expert: index in a stack of experts; None: the tensor is no stack.
        rows: the rows of the tensor that it has, in this order; None: all of them.
        columns: its inputs among those of the tensor, in this order; None: they are the same.
        make: computes it from the numbers of the tensor, and of `others`; None: it is these rows as they are.
        others: further tensors that it is made of.
    """

    name: str
    expert: int | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    make: Make | None = None
    others: tuple[str, ...] = ()


Change = Callable[[GgufFacts, Piece], Piece]


@dataclass(frozen=True, slots=True)
class Rules:
    """How an architecture's files name modules, and what else differs.

    Attributes:
        layer: names of modules of layers, by those of the file; "{}" stands for an expert.
        modules: names of the other modules.
        prefix: of the names of layers' modules.
        pairs: queries and keys of each head lie in pairs that are rotated together, not in two halves.
        norm_offset: what files add to the weights of norms.
        whole: names of layers' weights by their whole names in files, which have a kind at the end or none.
        changes: what else differs in weights, by these names.
    """

    layer: Mapping[str, str]
    modules: Mapping[str, str] = field(default_factory=lambda: DECODER)
    prefix: str = "model.layers."
    pairs: bool = False
    norm_offset: float = 0.0
    whole: Mapping[str, str] = field(default_factory=lambda: WHOLE)
    changes: Mapping[str, Change] = field(default_factory=dict)
