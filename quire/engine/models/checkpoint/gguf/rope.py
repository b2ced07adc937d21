"""Parameters of rotary position embeddings from the metadata of GGUF files."""

from __future__ import annotations

from typing import Any

from quire.engine.models.checkpoint.gguf.facts import GgufFacts
from quire.engine.models.errors import UnsupportedModel

Config = dict[str, Any]
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
THETA = 10000.0  # where a file has no base


def rope_of(facts: GgufFacts) -> Config:
    """The parameters of the rope that rotates whole heads.

    Raises:
        UnsupportedModel: it is scaled in an unknown way.
    """
    theta = facts.optional_number(".rope.freq_base") or THETA
    kind = facts.optional_text(".rope.scaling.type") or "none"
    trained = facts.optional_integer(".rope.scaling.original_context_length")
    factors = {side: f"rope_factors_{side}.weight" for side in ("short", "long")}
    rope: Config = {"rope_theta": theta}
    if all(name in facts.shapes for name in factors.values()):
        scale = facts.optional_number(".rope.scaling.attn_factor")
        rope |= {f"{side}_factor": list(facts.values(name)) for side, name in factors.items()}
        return {
            **rope,
            "rope_type": "longrope",
            "original_max_position_embeddings": trained or facts.integer(".context_length"),
            **({} if scale is None else {"attention_factor": scale}),
        }
    if "rope_freqs.weight" in facts.shapes:  # Llama 3's scaling, as factors by which frequencies are divided
        divisors = list(facts.values("rope_freqs.weight"))
        return {
            **rope,
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": facts.integer(".context_length"),
        }
    if kind == "none":
        return {**rope, "rope_type": "default"}
    if kind == "linear":
        return {**rope, "rope_type": kind, "factor": facts.number(".rope.scaling.factor")}
    if kind == "yarn":
        return {**rope, "rope_type": kind, **_yarn(facts, trained)}
    raise UnsupportedModel(
        f"{facts.file}: {facts.architecture}.rope.scaling.type {kind!r} is not supported; supported are none, linear, "
        "yarn and longrope with its factors"
    )


def _yarn(facts: GgufFacts, trained: int | None) -> Config:
    optional = {
        "attention_factor": facts.optional_number(".rope.scaling.attn_factor"),
        "beta_fast": facts.optional_number(".rope.scaling.yarn_beta_fast"),
        "beta_slow": facts.optional_number(".rope.scaling.yarn_beta_slow"),
    }
    return {
        "factor": facts.number(".rope.scaling.factor"),
        "original_max_position_embeddings": trained or facts.integer(".context_length"),
        **{name: value for name, value in optional.items() if value is not None},
    }


def partial_rope(facts: GgufFacts, rope: Config) -> Config:
    """The parameters of a rope that may rotate a part of each head only."""
    dim = facts.optional_integer(".rope.dimension_count")
    return rope if dim is None else {**rope, "partial_rotary_factor": dim / facts.head_dim}


def check_whole_heads(facts: GgufFacts) -> None:
    """Raise UnsupportedModel if a part of each head is rotated."""
    dim, whole = facts.optional_integer(".rope.dimension_count"), facts.head_dim
    if dim not in (None, whole):
        raise UnsupportedModel(
            f"{facts.file}: {facts.architecture}.rope.dimension_count is {dim}, but models of this architecture rotate "
            f"whole heads, of {whole} elements"
        )
