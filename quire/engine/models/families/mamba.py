"""Mamba, Falcon Mamba and Mamba 2: state spaces without attention; and what hybrids share with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec, Layer, Recurrence, RMSNormSpec
from quire.engine.models.specs.state_space import ChannelStateSpace, GatedNorm, HeadStateSpace
from quire.engine.models.specs.tensor_names import KIND, LAYER, WeightNames, taps_first

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

MAX_POSITIONS = 32768  # their states hold sequences of any length; configs name none


def _rates(logarithms: Tensor) -> Tensor:
    """Rates of heads (heads,), or of channels (channels, size) as (size, channels)."""
    rates = logarithms.float().exp()
    return rates.t() if rates.dim() == 2 else rates


def mixer_rules(module: str, to: str = "attn") -> tuple[tuple[str, str], ...]:
    """The names of the tensors of a state space.

    Args:
        module: a pattern of its name in a layer.
        to: the name of ours.
    """
    mixer = LAYER + module + r"\."
    rules = (
        (mixer + "in_proj" + KIND, "inputs.{kind}"),
        (mixer + "conv1d" + KIND, "conv.{kind}"),
        (mixer + "out_proj" + KIND, "out.{kind}"),
        (mixer + "A_log", "rate"),
        (mixer + "D", "skip"),
        (mixer + "dt_bias", "step_bias"),
        (mixer + r"norm\.weight", "norm.weight"),
        (mixer + r"x_proj\.weight", "selection.weight"),
        (mixer + r"dt_proj\.weight", "steps.weight"),
        (mixer + r"dt_proj\.bias", "step_bias"),
        (mixer + r"dt_layernorm\.weight", "step_norm.weight"),
        (mixer + r"b_layernorm\.weight", "write_norm.weight"),
        (mixer + r"c_layernorm\.weight", "read_norm.weight"),
    )
    return tuple((pattern, f"{to}.{name}") for pattern, name in rules)


MIXER_CONVERT: Mapping[str, Callable[[Tensor], Tensor]] = {"attn.conv.weight": taps_first, "attn.rate": _rates}
MIXER_NAMES = WeightNames(
    (
        (r"embeddings?\.weight", "embed.weight"),
        (r"lm_head\.weight", "head.weight"),
        (r"norm_f\.weight", "norm.weight"),
        (LAYER + r"norm\.weight", "attn_norm.weight"),
        *mixer_rules("mixer"),
    ),
    prefixes=r"(?:model|backbone)\.",
    convert=MIXER_CONVERT,
)


def check_activation(config: Any, name: str = "hidden_act") -> None:
    """Raise UnsupportedModel unless the activation of a state space is silu."""
    if (act := getattr(config, name)) not in ("silu", "swish"):
        raise UnsupportedModel(f"{name} is {act!r}, but must be 'silu' for layers with state spaces")


def step_limits(limits: Any) -> dict[str, Any]:
    """Return the limits of time steps as a `HeadStateSpace` has them.

    Raises:
        UnsupportedModel: they are not two numbers.
    """
    if limits is None:
        return {}
    if len(limits) != 2 or not all(isinstance(limit, int | float) for limit in limits):
        raise UnsupportedModel(f"time_step_limit is {limits!r}, but two numbers are expected")
    shortest, longest = (float(limit) for limit in limits)
    return {"shortest": shortest, "longest": None if longest == float("inf") else longest}


def head_state_space(config: Any, **overrides: Any) -> HeadStateSpace:
    """The state space of hybrids, whose configs name its sizes with mamba_; some fields overridden.

    Raises:
        UnsupportedModel: it has an activation other than silu.
    """
    check_activation(config)
    bias = bool(config.mamba_proj_bias)
    fields: dict[str, Any] = {
        "heads": config.mamba_n_heads,
        "head_dim": config.mamba_d_head,
        "state": config.mamba_d_state,
        "groups": config.mamba_n_groups,
        "width": config.mamba_d_conv,
        "bias": bias,
        "out_bias": bias,
        "conv_bias": bool(config.mamba_conv_bias),
        "norm": GatedNorm(eps=config.rms_norm_eps),
        **step_limits(config.time_step_limit),
    }
    return HeadStateSpace(**{**fields, **overrides})


def mamba(config: Any) -> DecoderSpec:
    """Mamba."""
    return _decoder(config, _channels(config))


def falcon_mamba(config: Any) -> DecoderSpec:
    """Falcon Mamba: Mamba with norms without weights inside."""
    return _decoder(config, _channels(config, norm_eps=config.mixer_rms_eps, norm_weights=False))


def _channels(config: Any, **options: Any) -> ChannelStateSpace:
    check_activation(config)
    return ChannelStateSpace(
        size=config.intermediate_size,
        state=config.state_size,
        rank=config.time_step_rank,
        width=config.conv_kernel,
        bias=bool(config.use_bias),
        conv_bias=bool(config.use_conv_bias),
        **options,
    )


def mamba2(config: Any) -> DecoderSpec:
    """Mamba 2."""
    check_activation(config)
    bias = bool(config.use_bias)
    mixer = HeadStateSpace(
        heads=config.num_heads,
        head_dim=config.head_dim,
        state=config.state_size,
        groups=config.n_groups,
        width=config.conv_kernel,
        bias=bias,
        out_bias=bias,
        conv_bias=bool(config.use_conv_bias),
        norm=GatedNorm(eps=config.layer_norm_epsilon),
        **step_limits(config.time_step_limit),
    )
    return _decoder(config, mixer)


def _decoder(config: Any, mixer: Recurrence) -> DecoderSpec:
    return DecoderSpec(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=(Layer(attn=mixer, ffn=None),) * config.num_hidden_layers,
        norm=RMSNormSpec(eps=config.layer_norm_epsilon),
        max_positions=getattr(config, "max_position_embeddings", None) or MAX_POSITIONS,
        tied=bool(config.tie_word_embeddings),
    )


FAMILIES = (
    Family(name="falcon_mamba", config_types=("falcon_mamba",), spec=falcon_mamba, tensors=MIXER_NAMES),
    Family(name="mamba", config_types=("mamba",), spec=mamba, tensors=MIXER_NAMES),
    Family(name="mamba2", config_types=("mamba2",), spec=mamba2, tensors=MIXER_NAMES),
)
