"""Checkpoints of GPTQ's tools (AutoGPTQ, GPTQModel)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from quire.engine.models.checkpoint.formats.packed_columns import CODES, PARTS, PackedLayout, read_gptq
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredTensors, WeightFormat
from quire.engine.models.errors import UnsupportedModel

_BITS = (2, 3, 4, 8)
# What stored zeros are less than they stand for, by format.
_ZEROS_LESS = {"gptq": 1, "gptq_v2": 0}
_PLUS, _MINUS = "+:", "-:"


class Gptq(WeightFormat):
    """Integers of 2, 3, 4 or 8 bits in words along inputs.

    `dynamic` has patterns of modules with other bits or groups. Which modules are quantized is seen by their tensors.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        """`section`: the config's `quantization_config`.

        Raises:
            UnsupportedModel: it has a format or an option that is not accepted.
        """
        stored_as = str(section.get("checkpoint_format") or section.get("format") or "gptq")
        if section.get("is_marlin_format"):
            stored_as = "marlin"
        if stored_as not in _ZEROS_LESS:
            accepted = " and ".join(_ZEROS_LESS)
            raise UnsupportedModel(
                f"quantization_config: checkpoint_format {stored_as!r} of GPTQ is not supported; "
                f"supported are {accepted}"
            )
        if (words := section.get("pack_dtype") or "int32") != "int32":
            raise UnsupportedModel(f"quantization_config: pack_dtype {words!r} of GPTQ is not supported, only int32")
        self._less = _ZEROS_LESS[stored_as]
        self._layout = read_layout("quantization_config", section, _BITS, less=self._less)
        self._rules = _rules(section, self._less)

    @override
    def read(self, name: str, stored: StoredTensors) -> NamedWeight | None:
        module, _, tensor = name.rpartition(".")
        if tensor != CODES:
            return None
        rule = next((rule for rule in self._rules if rule.pattern.match(module)), None)
        return read_gptq(module, stored, self._layout if rule is None else rule.layout)

    @override
    def is_part(self, name: str, stored: StoredTensors) -> bool:
        return name.rpartition(".")[2] in PARTS


@dataclass(frozen=True, slots=True)
class _Rule:
    """Modules with a layout of their own."""

    pattern: re.Pattern[str]
    layout: PackedLayout


def read_layout(where: str, values: Mapping[str, Any], bits_accepted: Sequence[int], less: int = 0) -> PackedLayout:
    """Check bits and groups in a config.

    Raises:
        UnsupportedModel: they are not accepted.
    """
    bits = values.get("bits", values.get("w_bit"))
    group = values.get("group_size", values.get("q_group_size", -1))
    if type(bits) is not int or bits not in bits_accepted:
        accepted = ", ".join(map(str, bits_accepted))
        raise UnsupportedModel(f"{where}: bits must be one of {accepted}, not {bits!r}")
    if type(group) is not int or group < -1 or group == 0:
        raise UnsupportedModel(f"{where}: group_size must be a positive integer or -1, not {group!r}")
    return PackedLayout(bits, None if group == -1 else group, less)


def _rules(section: Mapping[str, Any], less: int) -> list[_Rule]:
    dynamic = section.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise UnsupportedModel(f"quantization_config: dynamic must be an object, not {dynamic!r}")
    rules = []
    for key, values in dynamic.items():
        where = f"quantization_config: dynamic[{key!r}]"
        if key.startswith(_MINUS):  # these modules are not quantized
            continue
        if not isinstance(values, Mapping):
            raise UnsupportedModel(f"{where} must be an object, not {values!r}")
        layout = read_layout(where, {**section, **values}, _BITS, less)
        rules.append(_Rule(compiled(where, key.removeprefix(_PLUS)), layout))
    return rules


def compiled(where: str, pattern: str) -> re.Pattern[str]:
    """A pattern in a config.

    Raises:
        UnsupportedModel: it is none.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UnsupportedModel(f"{where}: {pattern!r} is no pattern: {error}") from error
