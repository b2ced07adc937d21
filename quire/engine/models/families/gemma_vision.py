"""Gemma 3 and PaliGemma: SigLIP's tower, a projector, and Gemma's language models.

The tokens of a picture attend to each other in both directions, those of PaliGemma's prompts all of them.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.client.pictures import PictureInfo
from quire.engine.client.protocol import PictureItem
from quire.engine.models.config.image_processor import ImageProcessor, check_image_size
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.families.llava import module_name
from quire.engine.models.families.vision_language import language_model, vision_language_model
from quire.engine.models.family import PictureFacts, Tower, text_config
from quire.engine.models.specs.decoder import DecoderSpec

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor


def _encode(model: Any, pixels: Tensor, _: PictureItem) -> Tensor:
    """One image of a size."""
    features: Tensor = model.get_image_features(pixel_values=pixels).pooler_output[0]
    return features


def _gemma3(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    processor = ImageProcessor.read(folder, "gemma3")
    placeholder = check_placeholder(config.image_token_id, spec.vocab, "image_token_index")
    begin = text_of(folder, config.boi_token_index, "<start_of_image>")
    end = text_of(folder, config.eoi_token_index, "<end_of_image>")
    geometry = processor.pan_and_scan(config.mm_tokens_per_image)
    check_image_size(geometry, config.vision_config)
    info = PictureInfo(
        placeholder=placeholder,
        placeholder_text=begin,
        token_text=text_of(folder, placeholder, "<image_soft_token>"),
        geometry=geometry,
        before=f"\n\n{begin}",
        after=f"{end}\n\n",
        bidirectional=True,
    )
    return PictureFacts(info=info, normalization=processor.normalization())


def _paligemma(folder: Path, config: Any, spec: DecoderSpec) -> PictureFacts:
    processor = ImageProcessor.read(folder, "siglip")
    placeholder = check_placeholder(config.image_token_id, spec.vocab, "image_token_index")
    vision = config.vision_config
    geometry = processor.fixed_size((vision.image_size // vision.patch_size) ** 2)
    check_image_size(geometry, vision)
    info = PictureInfo(
        placeholder=placeholder,
        placeholder_text=text_of(folder, placeholder, "<image>"),
        geometry=geometry,
        bidirectional=True,
    )
    return PictureFacts(info=info, normalization=processor.normalization())


def causal_text(config: Any) -> tuple[str, Any]:
    """The language model without the flag that transformers sets in it: only prompts attend in both directions."""
    kind, text = text_config(config)
    causal = copy.copy(text)
    causal.use_bidirectional_attention = None
    return kind, causal


def prefix_lm(config: Any, text: DecoderSpec) -> DecoderSpec:
    """The language model, whose prompts attend in both directions."""
    return replace(language_model(config, text), prefix_lm=True)


def _tower(facts: Any) -> Tower:
    return Tower(language_model="language_model", facts=facts, encode=_encode, module_name=module_name)


PALIGEMMA_TOWER = _tower(_paligemma)
FAMILIES = (
    vision_language_model("gemma3", _tower(_gemma3)),
    vision_language_model("paligemma", PALIGEMMA_TOWER, prefix_lm, causal_text),
)
