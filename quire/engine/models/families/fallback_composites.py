"""Language models that read pictures and have no family: transformers runs all of them but the language model.

Pictures are prepared by transformers' processor of the model. Its language model must be of a family.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.engine.client.picture_processor import PictureProcessor, ProcessorError, placeholder_runs
from quire.engine.client.pictures import PictureInfo, TransformersProcessor
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.vision_language import language_model
from quire.engine.models.family import Composite, FallbackTower, PictureFacts, text_config
from quire.engine.models.specs.decoder import DecoderSpec
from quire.engine.models.specs.tensor_names import WeightNames

if TYPE_CHECKING:
    from PIL import Image

# Heights and widths of the pictures that a processor prepares as samples; the first is encoded while the model loads.
_SAMPLE_SIZES = ((48, 64), (768, 1024), (1536, 512))
_LANGUAGE_MODEL = re.compile(r"model\.(?:language_model|text_model)\.(?:model\.)?(?P<name>.*)")
_HEAD = re.compile(r"lm_head\..*")
_OTHER = re.compile(r"model\.(?P<name>.*)")


def _plain_name(name: str) -> str | None:
    """The name of a tensor in a checkpoint of the language model alone; None if it belongs to another part."""
    if inner := _LANGUAGE_MODEL.fullmatch(name):
        return f"model.{inner['name']}"
    return name if _HEAD.fullmatch(name) else None


def _module_name(name: str) -> str | None:
    """The name of a tensor in the model around the language model; None if it is not in it."""
    match = _OTHER.fullmatch(name)
    return match["name"] if match is not None and _LANGUAGE_MODEL.fullmatch(name) is None else None


def _names(_: DecoderSpec, text: WeightNames) -> WeightNames:
    return text


def _check_language_model(config: Any, spec: DecoderSpec) -> None:
    """Refuse language models that read pictures in another way than text, which matters only with pictures."""
    if spec.embeddings.scale != 1.0:
        raise UnsupportedModel(
            f"the language model in this {config.model_type} scales embeddings, and how it does so with those of "
            "pictures is not known"
        )
    if "mrope_section" in (getattr(config.text_config, "rope_parameters", None) or {}):
        raise UnsupportedModel(
            f"{config.model_type} has rotary positions of time, height and width (M-RoPE), which only a family can give"
        )


def _facts(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    _check_language_model(config, spec)
    placeholder = check_placeholder(getattr(config, "image_token_id", None), spec.vocab, "image_token_id")
    try:
        processor = PictureProcessor(str(folder))
        samples = tuple(processor.prepare(_drawn(*size)) for size in _SAMPLE_SIZES)
    except ProcessorError as error:
        raise UnsupportedModel(str(error)) from error
    if not all(placeholder_runs(picture.token_ids, placeholder) for picture in samples):
        raise UnsupportedModel(f"the processor writes no token {placeholder}, the config's image_token_id")
    largest = max(samples, key=lambda picture: picture.nbytes)
    info = PictureInfo(
        placeholder=placeholder,
        placeholder_text=processor.marker,
        token_text=text_of(folder, placeholder, processor.marker),
        geometry=TransformersProcessor(folder=str(folder), input_bytes=largest.nbytes),
    )
    return PictureFacts(info=info, samples=(samples[0], largest))


def _drawn(height: int, width: int) -> Image.Image:
    """A picture with all colours."""
    from PIL import Image  # noqa: PLC0415 text models run without Pillow

    rows, columns = np.indices((height, width))
    pixels = np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) % 256], axis=-1)
    return Image.fromarray(pixels.astype(np.uint8))


FALLBACK_COMPOSITE = Composite(
    name="fallback_composite",
    config_types=(),
    language_model=text_config,
    spec=language_model,
    tensors=_names,
    plain_name=_plain_name,
    tower=FallbackTower(facts=_facts, module_name=_module_name),
)
FAMILIES = (FALLBACK_COMPOSITE,)


@cache
def is_fallback_composite(model_type: str) -> bool:
    """Whether transformers has models of a type that read pictures with a language model under the usual name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415 takes most of a second
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415 like it
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    if model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return False
    return {"text_config", "vision_config"} <= set(CONFIG_MAPPING[model_type].sub_configs)
