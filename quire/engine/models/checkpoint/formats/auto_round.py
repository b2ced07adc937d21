"""Checkpoints of AutoRound, which are packed as those of GPTQ or AWQ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from quire.engine.models.checkpoint.formats.gptq import compiled, read_layout
from quire.engine.models.checkpoint.formats.packed_columns import (
    CODES,
    PARTS,
    PackedLayout,
    read_awq,
    read_gptq,
)
from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredTensors, WeightFormat
from quire.engine.models.errors import UnsupportedModel

_PREFIX = "auto_round:"
# By packing format: what stored zeros are less than they stand for; None: packed as for AWQ.
_PACKINGS = {"auto_gptq": 1, "gptqmodel": 0, "auto_round": 0, "auto_awq": None}
_GPTQ_BITS, _AWQ_BITS = (2, 3, 4, 5, 6, 7, 8), (4, 5, 6, 7)
_UNQUANTIZED_BITS = 16  # and more
_IN_PATTERNS = frozenset(r"*+?^$()[]{}|\\")


class AutoRound(WeightFormat):
    """Integers of 2 to 8 bits.

    `extra_config` has names and patterns of modules with other bits or groups.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        """`section`: the config's `quantization_config`.

        Raises:
            UnsupportedModel: it has a packing or an option that is not accepted.
        """
        packing = str(section.get("packing_format") or section.get("backend") or f"{_PREFIX}auto_gptq")
        name = packing.removeprefix(_PREFIX)
        if name not in _PACKINGS:
            accepted = ", ".join(_PACKINGS)
            raise UnsupportedModel(
                f"quantization_config: packing_format {packing!r} of AutoRound is not supported; "
                f"supported are {accepted}"
            )
        if (kind := section.get("data_type") or "int") != "int":
            raise UnsupportedModel(f"quantization_config: data_type {kind!r} of AutoRound is not supported, only int")
        self._less = _PACKINGS[name]
        self._layout = self._read_layout("quantization_config", section)
        self._named: dict[str, PackedLayout] = {}
        self._patterns: list[tuple[re.Pattern[str], PackedLayout]] = []
        self._read_extra(section)

    @override
    def read(self, name: str, stored: StoredTensors) -> NamedWeight | None:
        module, _, tensor = name.rpartition(".")
        if tensor != CODES:
            return None
        read = read_awq if self._less is None else read_gptq
        return read(module, stored, self._layout_of(module))

    @override
    def is_part(self, name: str, stored: StoredTensors) -> bool:
        return name.rpartition(".")[2] in PARTS

    def _layout_of(self, module: str) -> PackedLayout:
        if module in self._named:
            return self._named[module]
        return next((layout for pattern, layout in self._patterns if pattern.search(module)), self._layout)

    def _read_layout(self, where: str, values: Mapping[str, Any]) -> PackedLayout:
        return read_layout(where, values, _AWQ_BITS if self._less is None else _GPTQ_BITS, self._less or 0)

    def _read_extra(self, section: Mapping[str, Any]) -> None:
        extra = section.get("extra_config") or {}
        if not isinstance(extra, Mapping):
            raise UnsupportedModel(f"quantization_config: extra_config must be an object, not {extra!r}")
        for name, values in extra.items():
            where = f"quantization_config: extra_config[{name!r}]"
            if not isinstance(values, Mapping):
                raise UnsupportedModel(f"{where} must be an object, not {values!r}")
            bits = values.get("bits")
            if type(bits) is int and bits >= _UNQUANTIZED_BITS:
                continue
            layout = self._read_layout(where, {**section, **values})
            self._named[name] = layout
            if _IN_PATTERNS & set(name):
                self._patterns.append((compiled(where, name), layout))
