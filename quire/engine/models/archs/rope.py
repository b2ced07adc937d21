"""Ropes as Hugging Face configs describe them."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.spec import DynamicNtk, LongRope, Rope

_KNOWN = {"default", "linear", "dynamic", "llama3", "yarn", "longrope"}


def rope_of(config: Any, head_dim: int, layer_type: str | None = None, *, interleaved: bool = False) -> Rope:
    """The rope of a config, or of one of its layer types.

    Raises:
        UnsupportedModel: a rope type that nobody here knows.
    """
    params = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = params["rope_type"]
    if kind not in _KNOWN:
        raise UnsupportedModel(f"rope type {kind!r} is not supported; known are {', '.join(sorted(_KNOWN))}")
    dim = int(head_dim * params.get("partial_rotary_factor", 1.0))
    plain = 1.0 / params["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if kind == "default":
        return Rope(dim=dim, inv_freq=_values(plain), interleaved=interleaved)
    if kind == "dynamic":
        ntk = DynamicNtk(
            theta=params["rope_theta"], factor=params["factor"], trained_len=config.max_position_embeddings
        )
        return Rope(dim=dim, inv_freq=_values(plain), interleaved=interleaved, extension=ntk)
    scaled, factor = ROPE_INIT_FUNCTIONS[kind](config, None, layer_type=layer_type)
    if kind != "longrope":
        return Rope(dim=dim, inv_freq=_values(scaled), factor=factor, interleaved=interleaved)
    trained = params["original_max_position_embeddings"]
    short, _ = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=trained, layer_type=layer_type)
    long, _ = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=trained + 1, layer_type=layer_type)
    extension = LongRope(inv_freq=_values(long), trained_len=trained)
    return Rope(dim=dim, inv_freq=_values(short), factor=factor, interleaved=interleaved, extension=extension)


def max_positions(config: Any) -> int:
    """Tokens of context that a config promises, counting what its rope scaling adds.

    Configs with a rope for each layer type count it themselves.
    """
    params = config.rope_parameters or {}
    limit = int(config.max_position_embeddings)
    if params.get("rope_type") == "yarn":
        return max(limit, int(params.get("original_max_position_embeddings", limit) * params["factor"]))
    return int(limit * params["factor"]) if params.get("rope_type") in ("linear", "dynamic") else limit


def _values(inv_freq: torch.Tensor) -> tuple[float, ...]:
    return tuple(inv_freq.tolist())
