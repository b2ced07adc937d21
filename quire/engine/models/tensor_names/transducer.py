"""Names of the tensors of transducers."""

from __future__ import annotations

from quire.engine.models.specs.decoder import TransducerSpec
from quire.engine.models.tensor_names.ctc import CONFORMER
from quire.engine.models.tensor_names.rules import KIND, WeightNames, linear_weight

_STEM = r"encoder\.subsampling\."
_LSTM = r"decoder\.lstm\.(?P<kind>weight|bias)"
_RULES = (
    *CONFORMER,
    (_STEM + r"conv_in" + KIND, "encoder.stem.first.{kind}"),
    (_STEM + r"layers\.(?P<conv>\d+)\.depthwise_conv" + KIND, "encoder.stem.channelwise.{conv}.{kind}"),
    (_STEM + r"layers\.(?P<conv>\d+)\.pointwise_conv" + KIND, "encoder.stem.pointwise.{conv}.{kind}"),
    (r"encoder_projector" + KIND, "encoder.projector.linears.0.{kind}"),
    (r"decoder\.embedding\.weight", "embedding.weight"),
    (_LSTM + r"_ih_l(?P<index>\d+)", "lstm.inputs.{index}.{kind}"),
    (_LSTM + r"_hh_l(?P<index>\d+)", "lstm.states.{index}.{kind}"),
    (r"decoder\.decoder_projector" + KIND, "predicted.{kind}"),
    (r"joint\.head" + KIND, "head.{kind}"),
)


def transducer_names(spec: TransducerSpec) -> WeightNames:
    """How the checkpoint of a transducer names its tensors."""
    layers = range(len(spec.encoder.layers))
    weights = [f"encoder.layers.{index}.conv.{name}.weight" for index in layers for name in ("up", "down")]
    return WeightNames(_RULES, convert=dict.fromkeys(weights, linear_weight))
