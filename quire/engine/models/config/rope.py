"""RoPE parameters from Hugging Face configs.

Without torch: a server reads configs while it imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.specs.rope import DynamicNtk, LongRope, Rope

Frequencies = npt.NDArray[Any]
Params = dict[str, Any]

_UNSCALED = ("default", "dynamic", "longrope", "proportional")


def rope_of(
    config: Any, head_dim: int, layer_type: str | None = None, *, interleaved: bool = False, partial: bool = False
) -> Rope:
    """RoPE parameters of a config, or of one of its layer types.

    Args:
        config: the config.
        head_dim: elements of a head.
        layer_type: key in the config's parameters, if it has some for each layer type.
        interleaved: see `Rope`.
        partial: the architecture rotates a part of each head, `partial_rotary_factor`; others ignore it without a
            scaling, and cannot run with one.

    Raises:
        UnsupportedModel: the rope type is not supported, or transformers cannot run a rope of a part of each head.
    """
    params = rope_parameters(config)
    params = params if layer_type is None else params[layer_type]
    kind = params["rope_type"]
    if kind not in _SCALINGS and kind not in _UNSCALED:
        supported = ", ".join(sorted((*_SCALINGS, *_UNSCALED)))
        raise UnsupportedModel(f"rope type {kind!r} is not supported; supported are {supported}")
    if kind == "proportional":
        return _proportional(params, head_dim)
    dim = head_dim
    if partial or kind != "default":
        dim = int(head_dim * params.get("partial_rotary_factor", 1.0))
    if dim != head_dim and not partial:
        raise UnsupportedModel(
            f"partial_rotary_factor is not supported with rope type {kind!r} in models of type {config.model_type!r}: "
            "they rotate whole heads"
        )
    powers = _powers(params["rope_theta"], dim)
    plain: Frequencies = np.float32(1) / powers
    rotated = 2 * len(plain)  # an odd number of elements is rounded up
    trained: Any = params.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
    if kind == "dynamic":
        max_len = config.max_position_embeddings
        ntk = DynamicNtk(theta=params["rope_theta"], factor=params["factor"], trained_len=max_len)
        return Rope(dim=rotated, inv_freq=_values(plain), interleaved=interleaved, extension=ntk)
    if kind == "longrope":
        short, long = (
            _values(1 / (np.asarray(params[f"{name}_factor"], np.float32) * powers)) for name in ("short", "long")
        )
        extension = LongRope(inv_freq=long, trained_len=trained)
        factor = _longrope_factor(config, params, trained)
        return Rope(dim=rotated, inv_freq=short, factor=factor, interleaved=interleaved, extension=extension)
    if params.get("factor", 0) is None:  # DeepSeek's configs may leave it out
        params = {**params, "factor": config.max_position_embeddings / trained}
    if kind == "yarn":  # with parameters per layer type, transformers does not look for `truncate` in them
        params = {**params, "truncate": config.rope_parameters.get("truncate", True)}
    scaled = _SCALINGS[kind](plain, params, trained) if kind in _SCALINGS else plain
    factor = _yarn_factor(params) if kind == "yarn" else 1.0
    return Rope(dim=rotated, inv_freq=_values(scaled), factor=factor, interleaved=interleaved)


def stretched_rope(theta: float, stretch: float, dim: int) -> Rope:
    """A rope of whole heads with a base that is stretch^(dim / (dim - 2)) times as large, at all positions."""
    return Rope(dim=dim, inv_freq=_values(1 / _powers(theta * stretch ** (dim / (dim - 2)), dim)))


def _powers(theta: float, dim: int) -> Frequencies:
    """Powers of a base, whose inverses are the frequencies."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers: Frequencies = np.power(np.float32(theta), exponents)
    return powers


def _proportional(params: Params, head_dim: int) -> Rope:
    """A rope of whole heads, in which only the pairs with the highest frequencies rotate."""
    rotated = int(params.get("partial_rotary_factor", 1.0) * head_dim // 2)
    exponents = np.arange(0, 2 * rotated, 2, dtype=np.float32) / np.float32(head_dim)
    plain: Frequencies = np.float32(1) / np.power(np.float32(params["rope_theta"]), exponents)
    frequencies = np.zeros(head_dim // 2, np.float32)
    frequencies[:rotated] = plain / np.float32(params.get("factor", 1.0))
    return Rope(dim=head_dim, inv_freq=_values(frequencies))


def rope_parameters(config: Any) -> Params:
    """RoPE parameters of a config, or those by layer type, as transformers' models complete them.

    They do it for scaled ropes, once more than the reading of the config: a length of the training at the top level is
    an attribute only afterwards.
    """
    params: Params = getattr(config, "rope_parameters", None) or {}
    parts = [params, *(part for part in params.values() if isinstance(part, dict))]
    if any(part.get("rope_type", "default") != "default" for part in parts):
        config.standardize_rope_params()
        params = config.rope_parameters
    return params


def _linear(plain: Frequencies, params: Params, _trained: int) -> Frequencies:
    return plain / np.float32(params["factor"])


def _llama3(plain: Frequencies, params: Params, trained: int) -> Frequencies:
    """Llama 3: divide low frequencies by the factor, keep high ones, interpolate between them."""
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    rotations = trained * plain / (2 * math.pi)
    unscaled_share = (
        np.clip((rotations - low) / (high - low), 0.0, 1.0) if high > low else (rotations >= low).astype(np.float32)
    )
    scaled: Frequencies = (1 - unscaled_share) * plain / params["factor"] + unscaled_share * plain
    return scaled


def _yarn(plain: Frequencies, params: Params, trained: int) -> Frequencies:
    """YaRN (arXiv 2309.00071, 3.2): a linear ramp between the dimensions that make `beta_fast` and those that
    make `beta_slow` rotations over the trained length."""
    dim = 2 * len(plain)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(params["rope_theta"]))

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

    factor, mscale, all_dim = params["factor"], params.get("mscale"), params.get("mscale_all_dim")
    return yarn_scale(factor, mscale) / yarn_scale(factor, all_dim) if mscale and all_dim else yarn_scale(factor)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """The growth of attention scores with a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope_factor(config: Any, params: Params, trained: int) -> float:
    """LongRoPE's scale of cosine and sine (arXiv 2402.13753), unless the config has one."""
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    factor = params.get("factor") or config.max_position_embeddings / trained
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))


def _ntk(plain: Frequencies, params: Params, _trained: int) -> Frequencies:
    """GTE's "ntk": a base that is `factor` times as large, and frequencies lower by factor^(2 / dim)."""
    dim, factor = 2 * len(plain), np.float32(params["factor"])
    exponents = np.arange(2, dim + 2, 2, dtype=np.float32) / np.float32(dim)
    scaled: Frequencies = plain / np.power(factor, exponents)
    return scaled


_SCALINGS: dict[str, Callable[[Frequencies, Params, int], Frequencies]] = {
    "linear": _linear,
    "llama3": _llama3,
    "ntk": _ntk,
    "yarn": _yarn,
}


def max_positions(config: Any) -> int:
    """Context length of a config in tokens, including what its rope scaling adds.

    Configs with RoPE parameters per layer type already include it in `max_position_embeddings`.
    """
    params = rope_parameters(config)
    limit = int(config.max_position_embeddings)
    if params.get("rope_type") == "yarn":
        return max(limit, int(params.get("original_max_position_embeddings", limit) * (params["factor"] or 1)))
    factor = params.get("factor")
    return limit if factor is None or params.get("rope_type") not in ("linear", "dynamic") else int(limit * factor)


def _values(inv_freq: Frequencies) -> tuple[float, ...]:
    return tuple(inv_freq.tolist())


def axes_in_sections(config: Any, default: tuple[int, int, int]) -> tuple[int, ...]:
    """`Rope.axes` of a config whose pairs of elements of time, of height and of width lie one behind the other.

    Raises:
        UnsupportedModel: the sections are not valid.
    """
    sections = _mrope_sections(config, default)
    return tuple(axis % 3 for axis, count in enumerate(sections) for _ in range(count))


def interleaved_axes(config: Any, pairs: int, default: tuple[int, int, int]) -> tuple[int, ...]:
    """`Rope.axes` of a config whose pairs of elements of time, height and width alternate, as far as there are any.

    `pairs`: pairs of elements of a head.

    Raises:
        UnsupportedModel: the sections are not valid.
    """
    sections = _mrope_sections(config, default)
    if len(sections) != 3:
        raise UnsupportedModel(f"mrope_section is {sections!r}; it must have three numbers")
    return tuple(axis if (axis := pair % 3) and pair < 3 * sections[axis] else 0 for pair in range(pairs))


def _mrope_sections(config: Any, default: tuple[int, int, int]) -> list[int]:
    """How many pairs of elements of a head have rotary positions of time, height and width.

    Raises:
        UnsupportedModel: the sections are not valid.
    """
    sections = rope_parameters(config).get("mrope_section", default)
    if not isinstance(sections, list | tuple) or any(type(count) is not int or count < 0 for count in sections):
        raise UnsupportedModel(f"mrope_section is {sections!r}; it must be a list of numbers")
    return list(sections)
