"""Granite with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.models.families.llama import LLAMA, granite
from quire.engine.models.families.mixtral import softmax_experts
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec
from quire.engine.models.specs.stacked_experts import unstacked
from quire.engine.models.specs.tensor_names import LAYER


def granite_moe(config: Any) -> DecoderSpec:
    """Granite with Mixtral's experts on all layers."""
    return granite(config, softmax_experts(config))


_NAMES = replace(
    LLAMA,
    rules=(*LLAMA.rules, (LAYER + r"block_sparse_moe\.router\.layer\.weight", "ffn.router.weight")),
    prepare=unstacked("block_sparse_moe"),
)

FAMILIES = (Family(name="granitemoe", config_types=("granitemoe",), spec=granite_moe, tensors=_NAMES),)
