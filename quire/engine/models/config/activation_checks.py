"""Checks the activations that a spec names."""

from __future__ import annotations

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.specs.audio import (
    CausalConv2dStem,
    CausalConvStem,
    ChunkedConvStem,
    Conv2dStem,
    ConvPositions,
    ConvStem,
    LinearStem,
    WaveStem,
)
from quire.engine.models.specs.decoder import (
    AudioEncoderSpec,
    ClampedSwigluExperts,
    ConformerLayer,
    CTCSpec,
    DecoderSpec,
    MoE,
    StackSpec,
    TransducerSpec,
)
from quire.kernels.activation_names import CANONICAL_ACTIVATIONS


def check_acts(spec: StackSpec | CTCSpec | TransducerSpec, *others: str) -> None:
    """Check that all activations are known: those of a spec, and others.

    Raises:
        UnsupportedModel: one is not.
    """
    for act in sorted(_acts(spec) | set(others)):
        if act not in CANONICAL_ACTIVATIONS:
            supported = ", ".join(CANONICAL_ACTIVATIONS)
            raise UnsupportedModel(f"activation {act!r} is not supported; supported are {supported}")


def _acts(spec: StackSpec | CTCSpec | TransducerSpec) -> set[str]:
    """Activations of the layers, of those around an encoder's, and of an encoder."""
    if isinstance(spec, CTCSpec):
        return _acts(spec.encoder)
    if isinstance(spec, TransducerSpec):
        return _acts(spec.encoder) | {spec.act}
    acts: set[str] = set()
    for layer in spec.layers:
        if isinstance(layer, ConformerLayer):
            acts |= {layer.ffn.act, layer.conv.act, layer.conv.gate}
            continue
        ffn = layer.ffn.expert if isinstance(layer.ffn, MoE) else layer.ffn
        if not isinstance(ffn, ClampedSwigluExperts):
            acts.add(ffn.act)
    if isinstance(spec, AudioEncoderSpec):
        acts |= _acts_around_layers(spec)
    if isinstance(spec, DecoderSpec) and spec.encoder is not None:
        acts |= _acts(spec.encoder)
    return acts


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
