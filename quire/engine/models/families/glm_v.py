"""GLM-4.1V, GLM-4.5V and GLM-4.6V: tokens of pictures have rotary positions of time, height and width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.engine.client.pictures import VideoInfo
from quire.engine.models.config.placeholder import check_placeholder, text_of
from quire.engine.models.config.rope import axes_in_sections
from quire.engine.models.config.video_processor import VideoProcessor
from quire.engine.models.families.glm import GLM4, glm4, glm4_moe
from quire.engine.models.families.llama import LLAMA
from quire.engine.models.families.qwen_vl import grid_tower, with_axes
from quire.engine.models.families.vision_language import language_model, vision_language_model
from quire.engine.models.family import Family
from quire.engine.models.specs.decoder import DecoderSpec

_SECTIONS = (8, 12, 12)  # pairs of elements of time, height and width, if a config does not say
_PICTURE = "<|image|>"


def glm4v_text(config: Any) -> DecoderSpec:
    """The language model of GLM-4.1V, whose queries, keys and values always have biases."""
    return glm4(config, qkv_bias=True)


def _spec(config: Any, text: DecoderSpec) -> DecoderSpec:
    return with_axes(language_model(config, text), axes_in_sections(config.text_config, _SECTIONS))


def _video(folder: Path, config: Any, vocab: int) -> tuple[VideoProcessor, VideoInfo]:
    """Behind each pair of frames, which has the tokens of a picture, a text says when it is seen."""
    processor = VideoProcessor.read(folder, "glm46v" if config.model_type == "glm46v" else "glm4v")
    token = check_placeholder(config.image_token_id, vocab, "image_token_id")
    return processor, VideoInfo(
        placeholder=token,
        placeholder_text=text_of(folder, config.video_token_id, "<|video|>"),
        geometry=processor.frame_area(),
        sampling=processor.sampling(),
        text="glm46v" if processor.kind == "glm46v" else "glm4v",
        token_text=text_of(folder, token, _PICTURE),
        before="<|begin_of_image|>",
        after="<|end_of_image|>",
        group=config.vision_config.temporal_patch_size,
        shares_area=True,
    )


FAMILIES = (
    Family(name="glm4v_text", config_types=("glm4v_text",), spec=glm4v_text, tensors=GLM4),
    Family(name="glm4v_moe_text", config_types=("glm4v_moe_text",), spec=glm4_moe, tensors=LLAMA),
    *(
        vision_language_model(kind, grid_tower("glm4v", placeholder=_PICTURE, video=_video), _spec)
        for kind in ("glm4v", "glm4v_moe", "glm46v")
    ),
)
