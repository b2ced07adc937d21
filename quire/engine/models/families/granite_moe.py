"""Granite with experts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.engine.models.families.llama import LLAMA, granite
from quire.engine.models.families.mixtral import softmax_experts
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec
from quire.engine.models.specs.tensor_names import LAYER, NamedTensors

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

# Of all experts: as published, and as transformers has them in memory. Gates lie before ups.
_STACKS = re.compile(
    r"(?P<layer>.*\.block_sparse_moe)\."
    r"(?:(?P<inputs>input_linear\.weight|experts\.gate_up_proj)|(?:output_linear\.weight|experts\.down_proj))"
)


def granite_moe(config: Any) -> DecoderSpec:
    """Granite with Mixtral's experts on all layers."""
    return granite(config, softmax_experts(config))


def _without_stacks(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """The projections of each expert."""
    for name, tensor in tensors:
        match = _STACKS.fullmatch(name)
        if match is None or tensor.dim() != 3:
            yield name, tensor
            continue
        parts = ("gate", "up") if match["inputs"] else ("down",)
        for expert, weights in enumerate(tensor):
            for part, weight in zip(parts, weights.tensor_split(len(parts)), strict=True):
                yield f"{match['layer']}.experts.{expert}.{part}_proj.weight", weight


_NAMES = replace(
    LLAMA,
    rules=(*LLAMA.rules, (LAYER + r"block_sparse_moe\.router\.layer\.weight", "ffn.router.weight")),
    prepare=_without_stacks,
)

FAMILIES = (Family(name="granitemoe", config_types=("granitemoe",), spec=granite_moe, tensors=_NAMES),)
