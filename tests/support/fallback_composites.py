"""Small language models that read pictures, of architectures that have no family, with processors and tokenizers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.deepseek_vl.processing_deepseek_vl import DeepseekVLProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from quire.engine.client.picture_processor import PictureProcessor
from quire.engine.client.pictures import PictureInfo
from quire.engine.client.protocol import PictureItem
from quire.multimodal.pictures.processor import encoder_inputs, processed_layout
from tests.support.models import draw_weights
from tests.support.tiny_configs import TEXT, VISION, VOCAB
from tests.support.tokenizer import with_placeholders
from tests.support.vision_models import greedy_tokens

PLACEHOLDER = 290
_END = "<|im_end|>"
_SPECIAL = (
    *("<|im_start|>", _END, "<image>", "<img>", "</img>", "[IMG_BREAK]", "[IMG_END]"),
    *("<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL", "<|IMG_LINE_BREAK|>"),
)
_TEXT = {**TEXT, "max_position_embeddings": 1024}


@dataclass(frozen=True)
class FallbackCase:
    """An architecture.

    Attributes:
        text, vision, fields: its config: the parts, and what is around them.
        processor: makes its processor of a tokenizer.
        token: text of its placeholder token.
        marker: text that stands for a picture in a prompt.
        named: attributes of the tokenizer, and their texts.
    """

    text: str
    vision: dict[str, Any]
    fields: dict[str, Any]
    processor: Callable[[Any], Any]
    token: str = "<image>"
    marker: str = "<image>"
    named: tuple[tuple[str, str], ...] = ()


def _aya(tokenizer: Any) -> Any:
    images = GotOcr2ImageProcessorPil(
        size={"height": 56, "width": 56}, min_patches=1, max_patches=4, crop_to_patches=True
    )
    return AyaVisionProcessor(images, tokenizer, patch_size=14, img_size=56, downsample_factor=2)


def _lighton(tokenizer: Any) -> Any:
    images = PixtralImageProcessorPil(size={"longest_edge": 130}, patch_size={"height": 28, "width": 28})
    return LightOnOcrProcessor(images, tokenizer)


def _deepseek(tokenizer: Any) -> Any:
    return DeepseekVLProcessor(
        DeepseekVLImageProcessorPil(size={"height": 28, "width": 28}), tokenizer, num_image_tokens=4
    )


FALLBACKS: dict[str, FallbackCase] = {
    "aya_vision": FallbackCase(  # tiles, with text between their tokens
        "cohere2",
        {"model_type": "siglip_vision_model", **VISION, "image_size": 56, "vision_use_head": False},
        {"vision_feature_layer": -1, "downsample_factor": 2, "adapter_layer_norm_eps": 1e-6},
        _aya,
        token="<|IMG_PATCH|>",
    ),
    "deepseek_vl": FallbackCase(
        "llama",
        {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        {},
        _deepseek,
        named=(("image_token", "<image>"),),
    ),
    "lighton_ocr": FallbackCase(  # pictures of many sizes
        "qwen3",
        {"model_type": "pixtral", **VISION, "head_dim": 16},
        {},
        _lighton,
        token="<|image_pad|>",
        marker="<|image_pad|>",
        named=(
            ("image_token", "<|image_pad|>"),
            ("image_break_token", "[IMG_BREAK]"),
            ("image_end_token", "[IMG_END]"),
        ),
    ),
}


def make_fallback(case: str, *, seed: int = 0) -> Any:
    """Build the whole model in float32, with weights large enough for distinct logits."""
    other = FALLBACKS[case]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        case,
        text_config={"model_type": other.text, **_TEXT},
        vision_config=other.vision,
        tie_word_embeddings=False,
        image_token_id=PLACEHOLDER,
        **other.fields,
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw_weights(model, case)
    model.generation_config.eos_token_id = None
    return model


def processor_of(case: str) -> Any:
    """transformers' processor, whose tokenizer has bytes and special tokens."""
    other = FALLBACKS[case]
    special = [text for text in _SPECIAL if text != other.token]
    tokenizer = with_placeholders(special, {PLACEHOLDER: other.token}, VOCAB)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END, pad_token=_END, extra_special_tokens=dict(other.named)
    )
    return other.processor(fast)


def save_fallback(model: Any, case: str, folder: Path) -> Path:
    """Save a model with its processor, tokenizer and chat template."""
    model.save_pretrained(folder)
    processor_of(case).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}MARKER"
        "{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}".replace("MARKER", FALLBACKS[case].marker)
    )
    return folder


def expected_tokens(
    model: Any, case: str, text: str, pictures: list[Image.Image], max_tokens: int
) -> tuple[list[int], list[int]]:
    """The tokens of transformers' processor for a text with pictures, and those that `generate` makes then."""
    inputs = dict(processor_of(case)(images=pictures or None, text=[text], return_tensors="pt"))
    ids = inputs.pop("input_ids")
    known = {name: value for name, value in inputs.items() if "mask" not in name or "pixel" in name}
    known.pop("token_type_ids", None)
    return [int(token) for token in ids[0]], greedy_tokens(model, ids, max_tokens, known)


def processed_prompt(
    folder: Path, info: PictureInfo, text: str, pictures: list[Image.Image]
) -> tuple[list[int], tuple[PictureItem, ...]]:
    """The prompt of a text with a marker for each picture, and its items, as the front end makes them."""
    processor = PictureProcessor(str(folder))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens: list[int] = []
    items: list[PictureItem] = []
    layouts = []
    parts = text.split(info.placeholder_text)
    expanded = parts[0]
    for picture, part in zip(pictures, parts[1:], strict=True):
        processed = processor.prepare(picture)
        layouts.append((processed, processed_layout(info, processed)))
        expanded += layouts[-1][1].text + part
    repeats = iter([count for _, planned in layouts for count in planned.items[0].repeats])
    for token in tokenizer.encode(expanded, add_special_tokens=False).ids:
        tokens += [token] * (next(repeats) if token == info.placeholder else 1)
    first = 0
    for processed, planned in layouts:
        (item,) = planned.items
        start = tokens.index(info.placeholder, first)
        items.append(
            PictureItem(
                hash=hashlib.sha256(b"".join(part.tobytes() for part in processed.inputs.values())).digest(),
                start=start,
                length=item.length,
                pixels=np.empty((0, 0, 0, 3), np.uint8),
                inputs=encoder_inputs(processed),
                text_offsets=item.text_offsets(),
            )
        )
        first = start + item.length
    return tokens, tuple(items)
