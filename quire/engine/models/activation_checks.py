"""Checks the activations that a spec names."""

from __future__ import annotations

from quire.engine.models.audio_spec import (
    CausalConv2dStem,
    CausalConvStem,
    ChunkedConvStem,
    Conv2dStem,
    ConvPositions,
    ConvStem,
    LinearStem,
    WaveStem,
)
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.spec import (
    AudioEncoderSpec,
    ClampedSwigluExperts,
    ConformerLayer,
    DecoderSpec,
    MoE,
    StackSpec,
)
from quire.kernels.activation import ACTIVATIONS


def check_acts(spec: StackSpec, *others: str) -> None:
    """Check that all activations are known: those of the layers, those around an encoder's, and others.

    Raises:
        UnsupportedModel: one is not.
    """
    acts: set[str] = set(others)
    for layer in spec.layers:
        if isinstance(layer, ConformerLayer):
            acts |= {layer.ffn.act, layer.conv.act, layer.conv.gate}
            continue
        ffn = layer.ffn.expert if isinstance(layer.ffn, MoE) else layer.ffn
        if not isinstance(ffn, ClampedSwigluExperts):
            acts.add(ffn.act)
    if isinstance(spec, AudioEncoderSpec):
        acts |= _acts_around_layers(spec)
    for act in sorted(acts):
        if act not in ACTIVATIONS:
            raise UnsupportedModel(f"activation {act!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    if isinstance(spec, DecoderSpec) and spec.encoder is not None:
        check_acts(spec.encoder)


def _acts_around_layers(spec: AudioEncoderSpec) -> set[str]:
    acts = {spec.positions.act} if isinstance(spec.positions, ConvPositions) else set()
    if spec.projector is not None:
        acts.add(spec.projector.act)
    match spec.stem:
        case ConvStem(act=act) | CausalConvStem(act=act) | ChunkedConvStem(act=act):
            return acts | {act}
        case WaveStem(convs=convs):
            return acts | {conv.act for conv in convs}
        case Conv2dStem() | CausalConv2dStem() | LinearStem():
            return acts
