"""Formats of the weights in checkpoints: `weight_format.py` has their interface, the other modules one format each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.engine.models.checkpoint.formats.auto_round import AutoRound
from quire.engine.models.checkpoint.formats.awq import Awq
from quire.engine.models.checkpoint.formats.compressed_tensors import CompressedTensors
from quire.engine.models.checkpoint.formats.fp8 import Fp8
from quire.engine.models.checkpoint.formats.gptq import Gptq
from quire.engine.models.checkpoint.formats.hqq import Hqq
from quire.engine.models.checkpoint.formats.mxfp4 import Mxfp4
from quire.engine.models.checkpoint.formats.torchao import TorchAO
from quire.engine.models.checkpoint.formats.weight_format import WeightFormat
from quire.engine.models.errors import UnsupportedModel

# By quantization method: makes the format from the config's section.
FORMATS: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "mxfp4": lambda _: Mxfp4(),
    "fp8": Fp8,
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
    "auto-round": AutoRound,
    "hqq": Hqq,
    "torchao": TorchAO,
}
# Formats that names and dtypes of tensors show, whatever the config says.
_SHOWN_BY_TENSORS = (Mxfp4(), Fp8())


def formats_of(section: Mapping[str, Any] | None) -> Sequence[WeightFormat]:
    """The formats of a checkpoint's weights, of which the first that reads a weight is the right one.

    Args:
        section: the config's `quantization_config`; None: it has none.

    Raises:
        UnsupportedModel: the method is not supported, or an option of it.
    """
    if section is None:
        return _SHOWN_BY_TENSORS
    method = section.get("quant_method")
    if method not in FORMATS:
        supported = ", ".join(FORMATS)
        raise UnsupportedModel(f"quantization method {method!r} is not supported; supported are {supported}")
    return FORMATS[method](section), *_SHOWN_BY_TENSORS
