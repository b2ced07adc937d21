"""CompressedScheme: how compressed-tensors stores the weights of a group of modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.engine.models.checkpoint.formats.weight_format import NamedWeight, StoredTensors
from quire.engine.models.errors import UnsupportedModel

_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
# How the order of activations was used. "weight" only changed how weights were rounded, not how they are stored.
_ACT_ORDERS = {None: False, False: False, True: True, "group": True, "dynamic": True, "weight": False, "static": False}


@dataclass(frozen=True, slots=True)
class WeightArguments:
    """What a config says of the weights in a group of modules.

    Attributes:
        kind: "int" or "float".
        bits: of a code.
        symmetric: whether codes have no zero points.
        strategy: what shares a scale.
        group: inputs that share a scale; None: all of a row, or a block.
        block: rows and columns that share a scale; None: there are no blocks.
        act_order: whether inputs of a group do not follow each other: `weight_g_idx` has the group of each.
    """

    kind: str
    bits: int
    symmetric: bool = True
    strategy: str = "tensor"
    group: int | None = None
    block: tuple[int, int] | None = None
    act_order: bool = False


def read_arguments(where: str, values: Mapping[str, Any]) -> WeightArguments:
    """Check what a config says of weights.

    Args:
        where: its place in the config, for errors.
        values: the section `weights` of a group.

    Raises:
        UnsupportedModel: an option has a value that is not accepted.
    """
    bits, group, kind = values.get("num_bits", 8), values.get("group_size"), values.get("type", "int")
    if kind not in ("int", "float"):
        raise UnsupportedModel(f"{where}: type must be int or float, not {kind!r}")
    if type(bits) is not int or not 1 <= bits <= 8:
        raise UnsupportedModel(f"{where}: num_bits must be 1 to 8, not {bits!r}")
    if group is not None and (type(group) is not int or group < -1 or group == 0):
        raise UnsupportedModel(f"{where}: group_size must be a positive integer, -1 or null, not {group!r}")
    strategy = values.get("strategy")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if strategy not in _STRATEGIES:
        raise UnsupportedModel(f"{where}: strategy must be one of {', '.join(_STRATEGIES)}, not {strategy!r}")
    if strategy in ("group", "tensor_group") and (group is None or group < 1):
        raise UnsupportedModel(f"{where}: strategy {strategy} needs a positive group_size, not {group!r}")
    actorder = values.get("actorder")
    if not isinstance(actorder, str | bool | None) or actorder not in _ACT_ORDERS:
        raise UnsupportedModel(f"{where}: actorder must be group, weight or null, not {actorder!r}")
    return WeightArguments(
        kind,
        bits,
        symmetric=values.get("symmetric") is not False,
        strategy=strategy,
        group=group if strategy in ("group", "tensor_group") else None,
        block=_block(where, values) if strategy == "block" else None,
        act_order=_ACT_ORDERS[actorder],
    )


def _block(where: str, values: Mapping[str, Any]) -> tuple[int, int]:
    sizes = values.get("block_structure")
    if isinstance(sizes, str):  # as older versions wrote it: "128x128"
        sizes = [int(size) if size.isdecimal() else size for size in sizes.split("x")]
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise UnsupportedModel(f"{where}: block_structure must be two positive integers, not {sizes!r}")
    return sizes[0], sizes[1]


class CompressedScheme(ABC):
    """How the weights of a group of modules are stored.

    To add one: a subclass in a module of its own, and its format in `SCHEMES` of `compressed_tensors`.

    Attributes:
        tensor: what a module calls the tensor with its codes.
    """

    tensor: ClassVar[str] = "weight"

    def __init__(self, arguments: WeightArguments) -> None:
        """Prepare to read weights.

        Raises:
            UnsupportedModel: the scheme does not have such weights.
        """
        self.arguments = arguments

    @abstractmethod
    def read(self, module: str, stored: StoredTensors) -> NamedWeight | None:
        """The weight of a module whose `tensor` is there; None if it is not stored as the scheme has it, but plain.

        Raises:
            BrokenFolder: one of its tensors is missing or has a shape that does not fit.
        """
