"""Checkpoints of AWQ's tools (AutoAWQ, GPTQModel)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from typing_extensions import override

from quire.engine.models.checkpoint.formats.gptq import read_layout
from quire.engine.models.checkpoint.formats.packed_columns import (
    CODES,
    PARTS,
    PackedLayout,
    read_awq,
    read_awq_gemv,
)
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredTensors, WeightFormat
from quire.engine.models.errors import UnsupportedModel

_READERS: dict[str, Callable[[str, StoredTensors, PackedLayout], NamedWeight]] = {
    "gemm": read_awq,
    "gemv": read_awq_gemv,
}


class Awq(WeightFormat):
    """Integers of 4 bits, in the order of the kernel that `version` names.

    Which modules are quantized is seen by their tensors, so that nothing depends on `modules_to_not_convert`.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        """`section`: the config's `quantization_config`.

        Raises:
            UnsupportedModel: it has a version or an option that is not accepted.
        """
        version = section.get("version") or section.get("checkpoint_format") or section.get("format") or "gemm"
        read = _READERS.get(str(version).lower())
        if read is None:
            accepted = " and ".join(_READERS)
            raise UnsupportedModel(
                f"quantization_config: version {version!r} of AWQ is not supported; supported are {accepted}"
            )
        self._read = read
        layout = read_layout("quantization_config", section, (4,))
        self._layout = replace(layout, symmetric=section.get("zero_point") is False)

    @override
    def read(self, name: str, stored: StoredTensors) -> NamedWeight | None:
        module, _, tensor = name.rpartition(".")
        return self._read(module, stored, self._layout) if tensor == CODES else None

    @override
    def is_part(self, name: str, stored: StoredTensors) -> bool:
        return name.rpartition(".")[2] in PARTS
