"""Ropes as Hugging Face configs describe them.

Without torch: configs are read while it is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.spec import DynamicNtk, LongRope, Rope

Frequencies = npt.NDArray[Any]
Params = dict[str, Any]

_UNSCALED = ("default", "dynamic", "longrope")


def rope_of(config: Any, head_dim: int, layer_type: str | None = None, *, interleaved: bool = False) -> Rope:
    """The rope of a config, or of one of its layer types.

    Raises:
        UnsupportedModel: a rope type that nobody here knows.
    """
    params = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = params["rope_type"]
    if kind not in _SCALINGS and kind not in _UNSCALED:
        known = ", ".join(sorted((*_SCALINGS, *_UNSCALED)))
        raise UnsupportedModel(f"rope type {kind!r} is not supported; known are {known}")
    dim = int(head_dim * params.get("partial_rotary_factor", 1.0))
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    plain: Frequencies = np.float32(1) / np.power(np.float32(params["rope_theta"]), exponents)
    trained = params.get("original_max_position_embeddings") or config.max_position_embeddings
    if kind == "dynamic":
        longest = config.max_position_embeddings
        ntk = DynamicNtk(theta=params["rope_theta"], factor=params["factor"], trained_len=longest)
        return Rope(dim=dim, inv_freq=_values(plain), interleaved=interleaved, extension=ntk)
    if kind == "longrope":
        short, long = (_values(plain / np.asarray(params[f"{name}_factor"], np.float32)) for name in ("short", "long"))
        extension = LongRope(inv_freq=long, trained_len=trained)
        factor = _longrope_factor(config, params, trained)
        return Rope(dim=dim, inv_freq=short, factor=factor, interleaved=interleaved, extension=extension)
    if params.get("factor", 0) is None:  # DeepSeek's may leave it to the lengths
        params = {**params, "factor": config.max_position_embeddings / trained}
    scaled = _SCALINGS[kind](plain, params, trained) if kind in _SCALINGS else plain
    factor = _yarn_factor(params) if kind == "yarn" else 1.0
    return Rope(dim=dim, inv_freq=_values(scaled), factor=factor, interleaved=interleaved)


def _linear(plain: Frequencies, params: Params, _trained: int) -> Frequencies:
    return plain / np.float32(params["factor"])


def _llama3(plain: Frequencies, params: Params, trained: int) -> Frequencies:
    """Slow turns are divided by the factor, fast ones stay, those between move smoothly from one to the other."""
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    turns = trained * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    scaled: Frequencies = (1 - kept) * plain / params["factor"] + kept * plain
    return scaled


def _yarn(plain: Frequencies, params: Params, trained: int) -> Frequencies:
    """YaRN (arXiv 2309.00071, 3.2): a ramp over the dimensions between those that turn `beta_slow` and `beta_fast`
    times over the trained length."""
    dim = 2 * len(plain)

    def dimension_of(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(params["rope_theta"]))

    first = dimension_of(params.get("beta_fast") or 32)
    last = dimension_of(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    divided = np.clip((np.arange(dim // 2, dtype=np.float32) - first) / width, 0.0, 1.0)
    scaled: Frequencies = divided * plain / params["factor"] + (1 - divided) * plain
    return scaled


def _yarn_factor(params: Params) -> float:
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])

    def grown(weight: float) -> float:
        return 1.0 if params["factor"] <= 1 else 0.1 * weight * math.log(params["factor"]) + 1.0

    mscale, all_dim = params.get("mscale"), params.get("mscale_all_dim")
    return grown(mscale) / grown(all_dim) if mscale and all_dim else grown(1.0)


def _longrope_factor(config: Any, params: Params, trained: int) -> float:
    """LongRoPE's growth of the logits (arXiv 2402.13753), unless the config says how much."""
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    factor = params.get("factor") or config.max_position_embeddings / trained
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))


_SCALINGS: dict[str, Callable[[Frequencies, Params, int], Frequencies]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def max_positions(config: Any) -> int:
    """Tokens of context that a config promises, counting what its rope scaling adds.

    Configs with a rope for each layer type count it themselves.
    """
    params = config.rope_parameters or {}
    limit = int(config.max_position_embeddings)
    if params.get("rope_type") == "yarn":
        return max(limit, int(params.get("original_max_position_embeddings", limit) * params["factor"]))
    return int(limit * params["factor"]) if params.get("rope_type") in ("linear", "dynamic") else limit


def _values(inv_freq: Frequencies) -> tuple[float, ...]:
    return tuple(inv_freq.tolist())
