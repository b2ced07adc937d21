"""Tensors that have a projection of all experts of a layer, expert by expert."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from quire.engine.models.specs.tensor_names import NamedTensors

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor


def unstacked(
    layer: str, *, gated: bool = True, inputs_first: Callable[[Tensor, bool], bool] | None = None
) -> Callable[[NamedTensors], NamedTensors]:
    """Return a function that divides stacked tensors of a checkpoint: as published, and as transformers has them.

    Gates lie before ups.

    Args:
        layer: a pattern of the name of the module that has the experts, with a prefix.
        gated: an expert has a gate.
        inputs_first: tells whether a tensor has inputs before outputs; the second argument is whether it has the last
            projections of experts. None: no tensor has.
    """
    pattern = re.compile(
        rf"(?P<layer>(?:.*\.)?{layer})\."
        r"(?:(?P<inputs>input_linear\.weight|experts\.(?:gate_)?up_proj)|(?:output_linear\.weight|experts\.down_proj))"
    )
    inputs = ("gate", "up") if gated else ("up",)

    def divide(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            match = pattern.fullmatch(name)
            if match is None or tensor.dim() != 3:
                yield name, tensor
                continue
            parts = inputs if match["inputs"] else ("down",)
            is_transposed = inputs_first is not None and inputs_first(tensor, match["inputs"] is None)
            for expert, weights in enumerate(tensor.mT if is_transposed else tensor):
                for part, weight in zip(parts, weights.tensor_split(len(parts)), strict=True):
                    yield f"{match['layer']}.experts.{expert}.{part}_proj.weight", weight

    return divide
