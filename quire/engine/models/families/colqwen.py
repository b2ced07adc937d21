"""ColQwen2: a vision language model that gives an embedding of each token, which late interaction compares.

Its language model and its tower are those of Qwen2-VL or Qwen2.5-VL.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.qwen_vl import QWEN2_TOWER, spec_with_sections
from quire.engine.models.family import Composite, PictureFacts, text_config
from quire.engine.models.specs.decoder import DecoderSpec
from quire.engine.models.specs.tensor_names import WeightNames

_TYPES = ("qwen2_vl", "qwen2_5_vl")
_TOWER = re.compile(r"vlm\.(?:model\.)?(?P<name>visual\..*)")
_LANGUAGE_MODEL = re.compile(r"vlm\.(?:model\.)?(?:language_model\.)?(?:model\.)?(?P<name>.*)")
_PROJECTION = "embedding_proj_layer."
_HEAD = "lm_head."  # of the model that it was trained from


def _inner(config: Any) -> Any:
    return config.vlm_config


def _language_model(config: Any) -> tuple[str, Any]:
    kind = config.vlm_config.model_type
    if kind not in _TYPES:
        raise UnsupportedModel(f"vlm_config is of type {kind!r}; supported are {' and '.join(_TYPES)}")
    return text_config(config.vlm_config)


def _spec(config: Any, text: DecoderSpec) -> DecoderSpec:
    return spec_with_sections(config.vlm_config, text)


def _names(_spec: DecoderSpec, text: WeightNames) -> WeightNames:
    return text


def _facts(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    return QWEN2_TOWER.facts(folder, config.vlm_config, spec)


def _module_name(name: str) -> str | None:
    match = _TOWER.fullmatch(name)
    return None if match is None else match["name"]


def _plain_name(name: str) -> str | None:
    if name.startswith(_PROJECTION):
        return f"heads.token_embed.0.{name.removeprefix(_PROJECTION)}"
    inner = _LANGUAGE_MODEL.fullmatch(name)
    if inner is None or _TOWER.fullmatch(name):
        return None
    return None if inner["name"].startswith(_HEAD) else f"model.{inner['name']}"


FAMILIES = (
    Composite(
        name="colqwen2",
        config_types=("colqwen2",),
        language_model=_language_model,
        spec=_spec,
        tensors=_names,
        plain_name=_plain_name,
        tower=replace(QWEN2_TOWER, facts=_facts, module_name=_module_name, config=_inner),
    ),
)
