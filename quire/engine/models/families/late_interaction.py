"""ColPali and ColQwen2: vision language models that give an embedding of each token, which late interaction compares.

Language model and tower are those of PaliGemma, Qwen2-VL or Qwen2.5-VL.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.gemma_vision import PALIGEMMA_TOWER, causal_text, prefix_lm
from quire.engine.models.families.qwen_vl import QWEN2_TOWER, spec_with_sections
from quire.engine.models.family import Composite, PictureFacts, Tower, text_config
from quire.engine.models.specs.decoder import DecoderSpec
from quire.engine.models.specs.tensor_names import WeightNames

_MODEL = "vlm."  # the vision language model within
_TOWER = re.compile(r"vlm\.(?:model\.)?(?:visual|vision_tower|multi_modal_projector)\..*")
_LANGUAGE_MODEL = re.compile(r"vlm\.(?:model\.)?(?:language_model\.)?(?:model\.)?(?P<name>.*)")
_PROJECTION = "embedding_proj_layer."
_HEAD = "lm_head."  # of the model that it was trained from


def _inner(config: Any) -> Any:
    return config.vlm_config


def _names(_spec: DecoderSpec, text: WeightNames) -> WeightNames:
    return text


def _plain_name(name: str) -> str | None:
    if name.startswith(_PROJECTION):
        return f"heads.token_embed.0.{name.removeprefix(_PROJECTION)}"
    inner = _LANGUAGE_MODEL.fullmatch(name)
    if inner is None or _TOWER.fullmatch(name):
        return None
    return None if inner["name"].startswith(_HEAD) else f"model.{inner['name']}"


def _late_interaction_model(
    kind: str,
    inner_types: tuple[str, ...],
    tower: Tower,
    spec: Callable[[Any, DecoderSpec], DecoderSpec],
    text: Callable[[Any], tuple[str, Any]] = text_config,
) -> Composite:
    """The family of a model type.

    Args:
        kind: the type.
        inner_types: types of vision language models that it may be made of.
        tower, spec, text: of these; see `vision_language_model`.
    """

    def language_model(config: Any) -> tuple[str, Any]:
        if config.vlm_config.model_type not in inner_types:
            raise UnsupportedModel(
                f"vlm_config is of type {config.vlm_config.model_type!r}; supported: {', '.join(inner_types)}"
            )
        return text(config.vlm_config)

    def inner_spec(config: Any, language: DecoderSpec) -> DecoderSpec:
        return spec(config.vlm_config, language)

    def facts(folder: Path, config: Any, language: DecoderSpec) -> PictureFacts:
        pictures = tower.facts(folder, config.vlm_config, language)
        return replace(pictures, info=msgspec.structs.replace(pictures.info, without_text=True))

    def module_name(name: str) -> str | None:
        return tower.module_name(name.removeprefix(_MODEL)) if name.startswith(_MODEL) else None

    return Composite(
        name=kind,
        config_types=(kind,),
        language_model=language_model,
        spec=inner_spec,
        tensors=_names,
        plain_name=_plain_name,
        tower=replace(tower, facts=facts, module_name=module_name, config=_inner),
    )


FAMILIES = (
    _late_interaction_model("colpali", ("paligemma",), PALIGEMMA_TOWER, prefix_lm, causal_text),
    _late_interaction_model("colqwen2", ("qwen2_vl", "qwen2_5_vl"), QWEN2_TOWER, spec_with_sections),
)
