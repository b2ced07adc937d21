"""Language models that read pictures, and those of them whose language model alone is loaded: they answer text.

With text alone their rotary positions of time, height and width (M-RoPE) are equal, which is an ordinary rope.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.engine.models.family import Composite, Tower, text_config
from quire.engine.models.specs.decoder import DecoderSpec
from quire.engine.models.specs.tensor_names import WeightNames

_TEXT_ONLY = ("idefics2", "ovis2")
_NOT_LOADED = re.compile(
    r"(?:model\.)?(?:vision_tower|vision_model|visual|multi_modal_projector|connector|image_newline"
    r"|visual_embeddings_table|projector|mlp_AR|embed_vision|vision_embedder|audio_tower|embed_audio)(?:\..*)?"
)
_HEAD = re.compile(r"(?:model\.)?language_model\.(?P<name>(?:lm_head|score)\..*)")
_LANGUAGE_MODEL = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?P<name>.*)")


def language_model(config: Any, text: DecoderSpec) -> DecoderSpec:
    """The language model alone. Whether its embeddings are tied is said by the config around it."""
    return replace(text, tied=bool(config.tie_word_embeddings))


def _plain_name(name: str) -> str | None:
    if _NOT_LOADED.fullmatch(name):
        return None
    if head := _HEAD.fullmatch(name):
        return head["name"]
    inner = _LANGUAGE_MODEL.fullmatch(name)
    return name if inner is None else f"model.{inner['name']}"


def _names(_spec: DecoderSpec, text: WeightNames) -> WeightNames:
    return text


def vision_language_model(
    kind: str,
    tower: Tower | None = None,
    spec: Callable[[Any, DecoderSpec], DecoderSpec] = language_model,
    text: Callable[[Any], tuple[str, Any]] = text_config,
) -> Composite:
    """The family of a model type.

    Args:
        kind: the type.
        tower: the part that reads pictures; None: it is not loaded.
        spec: see `Composite`.
        text: see `Composite.language_model`.
    """
    return Composite(
        name=kind,
        config_types=(kind,),
        language_model=text,
        spec=spec,
        tensors=_names,
        plain_name=_plain_name,
        tower=tower,
    )


FAMILIES = tuple(vision_language_model(kind) for kind in _TEXT_ONLY)
