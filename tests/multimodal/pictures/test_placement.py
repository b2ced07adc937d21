"""Prompts with pictures against the processors of transformers: the same tokens, with items where these are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.colpali.processing_colpali import ColPaliProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from quire.engine.client.pictures import (
    AnyResolution,
    FixedSize,
    GridTiles,
    PanAndScan,
    PatchRows,
    PictureInfo,
    SmartResize,
    SplitTiles,
)
from quire.engine.client.protocol import PictureItem
from quire.multimodal.errors import PromptError
from quire.multimodal.picture_reader import RequestPicture, picture_placeholders
from quire.multimodal.pictures.layout import layout
from quire.multimodal.placement import place_items
from quire.rendering.chat_template import ChatTemplate, load_templates
from quire.rendering.picture_texts import PictureTexts
from tests.support.pictures import drawn

SIZES = ((60, 60), (300, 120), (97, 700))
SPECIAL = (
    *("<image>", "<boi>", "<eoi>", "<pad>", "<img>", "</img>", "<ctx>", "<video>", "<fake_token_around_image>"),
    *("<global-img>", "<end_of_utterance>", "[BREAK]", "[END]"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
TILES = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]


def _tokenizer() -> Any:
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    model = models.BPE({letter: index for index, letter in enumerate(letters)}, [("Ċ", "Ċ")])
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    names = {
        "image_token": "<image>",
        "boi_token": "<boi>",
        "eoi_token": "<eoi>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<ctx>",
        "video_token": "<video>",
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", extra_special_tokens=names)


def _info(tokenizer: Any, geometry: Any, text: str = "<image>", token: str = "<image>", **around: Any) -> PictureInfo:  # noqa: S107
    return PictureInfo(
        placeholder=tokenizer.convert_tokens_to_ids(token),
        placeholder_text=text,
        token_text=token,
        geometry=geometry,
        **around,
    )


Case = tuple[Any, PictureInfo]


def _llava(tokenizer: Any) -> Case:
    pictures = LlavaImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    processor = LlavaProcessor(
        pictures, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return processor, _info(tokenizer, FixedSize(height=56, width=56, tokens=16, shortest_edge=56))


def _llava_next(tokenizer: Any) -> Case:
    pictures = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=TILES
    )
    processor = LlavaNextProcessor(
        pictures, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    canvases = tuple((height, width) for height, width in TILES)
    return processor, _info(tokenizer, AnyResolution(tile=28, canvases=canvases, patches=2, tokens=4))


def _idefics3(tokenizer: Any) -> Case:
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 256}, max_image_size={"longest_edge": 64})
    processor = Idefics3Processor(pictures, tokenizer, image_seq_len=4)
    return processor, _info(tokenizer, SplitTiles(tile=64, longest_edge=256, tokens=4))


def _gemma3(tokenizer: Any) -> Case:
    pictures = Gemma3ImageProcessorPil(
        size={"height": 56, "width": 56},
        do_pan_and_scan=True,
        pan_and_scan_min_crop_size=30,
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
    )
    processor = Gemma3Processor(pictures, tokenizer, image_seq_length=5)
    processor.images_kwargs = {}
    geometry = PanAndScan(height=56, width=56, tokens=5, min_crop=30, splits=True)
    return processor, _info(tokenizer, geometry, text="<boi>", before="\n\n<boi>", after="<eoi>\n\n")


def _internvl(tokenizer: Any) -> Case:
    pictures = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, max_patches=12)
    processor = InternVLProcessor(pictures, tokenizer, None, image_seq_length=4)
    geometry = GridTiles(height=56, width=56, tokens=4)
    return processor, _info(tokenizer, geometry, text="<ctx>", token="<ctx>", before="<img>", after="</img>")


def _qwen2_vl(tokenizer: Any) -> Case:
    pictures = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 28 * 28 * 40})
    geometry = SmartResize(multiple=28, min_pixels=3136, max_pixels=28 * 28 * 40)
    return Qwen2VLProcessor(pictures, tokenizer, None), _info(tokenizer, geometry)


CASES: dict[str, Callable[[Any], Case]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "idefics3": _idefics3,
    "gemma3": _gemma3,
    "internvl": _internvl,
    "qwen2_vl": _qwen2_vl,
}


def _pictures(info: PictureInfo, sizes: tuple[tuple[int, int], ...] = SIZES) -> list[RequestPicture]:
    """Pictures of sizes, without pixels."""
    pictures = []
    for height, width in sizes:
        planned = layout(info, height, width)
        items = tuple(
            PictureItem(hash=b"h", length=item.length, pixels=np.zeros(item.shape, np.uint8)) for item in planned.items
        )
        pictures.append(RequestPicture(info, planned, items))
    return pictures


@pytest.mark.parametrize("case", CASES)
def test_prompts_have_the_tokens_of_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Processors of videos need torchvision.
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    tokenizer = _tokenizer()
    processor, info = CASES[case](tokenizer)
    text = f"a\n{info.placeholder_text}\nb{info.placeholder_text}c\n\n{info.placeholder_text}"
    pictures = _pictures(info)
    rendered = PictureTexts([(info.placeholder_text, picture.layout.text) for picture in pictures]).put_into(text)
    tokens, items = place_items(np.array(tokenizer.encode(rendered), np.int32), picture_placeholders(pictures))
    images = [drawn(height, width) for height, width in SIZES]
    expected = processor(images=[images], text=[text])["input_ids"][0]
    assert tokens.tolist() == list(expected)
    covered = [index for item in items for index in range(item.start, item.start + item.length)]
    assert covered == np.flatnonzero(tokens == info.placeholder).tolist()


def test_chats_of_paligemma(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their template is built in, and writes what transformers' processor does."""
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    (tmp_path / "config.json").write_text('{"model_type": "paligemma"}')
    template = ChatTemplate(load_templates(tmp_path, {})["default"])
    assert template.wants_parts
    content = [{"type": "text", "text": "Which is "}, {"type": "image"}, {"type": "image"}]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "larger?"}]}]
    tokenizer = _tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    processor = PaliGemmaProcessor(images, tokenizer)
    info = _info(tokenizer, FixedSize(height=28, width=28, tokens=4))
    pictures = _pictures(info, SIZES[:2])
    text = template.render({"messages": messages, "bos_token": "<bos>"})
    rendered = PictureTexts([("<image>", picture.layout.text) for picture in pictures]).put_into(text)
    tokens, _ = place_items(np.array(tokenizer.encode(rendered), np.int32), picture_placeholders(pictures))
    shown = [drawn(height, width) for height, width in SIZES[:2]]
    expected = processor(images=[shown], text=["<image><image>Which is larger?"])["input_ids"][0]
    assert tokens.tolist() == list(expected)
    with pytest.raises(PromptError, match="role assistant are not supported by PaliGemma"):
        template.render({"messages": [*messages, {"role": "assistant", "content": content}], "bos_token": "<bos>"})


def test_prompts_of_colpali(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of pages and queries as transformers' processor writes them. It has none for documents that are texts."""
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    (tmp_path / "config.json").write_text('{"model_type": "colpali"}')
    tokenizer = _tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    info = _info(tokenizer, FixedSize(height=28, width=28, tokens=4))
    variables = {"bos_token": "<bos>", "pad_token": "<pad>"}
    for settings in ({}, {"visual_prompt_prefix": "Look \U0001f600", "query_prefix": 'Find "it": '}):
        (tmp_path / "processor_config.json").write_text(json.dumps(settings))
        template = ChatTemplate(load_templates(tmp_path, {})["default"])
        processor = ColPaliProcessor(images, tokenizer, **settings)

        def rendered(role: str, part: dict[str, str], template: ChatTemplate = template) -> str:
            return template.render({"messages": [{"role": role, "content": [part]}], **variables})

        page = list(processor(images=[drawn(*SIZES[0])])["input_ids"][0])
        pictures = _pictures(info, SIZES[:1])
        for role in ("query", "document", "user"):
            text = PictureTexts([("<image>", pictures[0].layout.text)]).put_into(rendered(role, {"type": "image"}))
            tokens, _ = place_items(np.array(tokenizer.encode(text), np.int32), picture_placeholders(pictures))
            assert tokens.tolist() == page
        query = list(processor(text=["Which?"])["input_ids"][0])
        assert tokenizer.encode(rendered("query", {"type": "text", "text": "Which?"})) == query
        assert rendered("document", {"type": "text", "text": "a"}) == "<bos>a\n"


def test_an_item_covers_the_ends_of_its_rows() -> None:
    tokenizer = _tokenizer()
    info = _info(tokenizer, PatchRows(patch=28, longest_edge=224, row_end="[BREAK]", end="[END]"))
    pictures = _pictures(info, ((56, 84), (28, 28)))
    text = PictureTexts([("<image>", picture.layout.text) for picture in pictures]).put_into("a<image>b<image>")
    tokens, items = place_items(np.array(tokenizer.encode(text), np.int32), picture_placeholders(pictures))
    assert tokenizer.decode(tokens) == "a<image><image><image>[BREAK]<image><image><image>[END]b<image>[END]"
    assert [(item.start, item.length) for item in items] == [(1, 8), (10, 2)]


def test_another_number_of_placeholders_is_refused() -> None:
    tokenizer = _tokenizer()
    info = _info(tokenizer, FixedSize(height=8, width=8, tokens=3))
    pictures = _pictures(info, ((8, 8),))
    tokens = np.array(tokenizer.encode("<image> <image>"), np.int32)
    with pytest.raises(PromptError, match="has 2 picture or video placeholders instead of 1"):
        place_items(tokens, picture_placeholders(pictures))


def test_items_of_two_media_are_in_the_order_of_the_prompt() -> None:
    tokenizer = _tokenizer()
    info = _info(tokenizer, FixedSize(height=8, width=8, tokens=3))
    (pictures,) = picture_placeholders(_pictures(info, ((8, 8), (8, 8))))
    others = replace(pictures, token=tokenizer.convert_tokens_to_ids("<ctx>"), repeats=[2], items=pictures.items[:1])
    tokens = np.array(tokenizer.encode("<image>a<ctx>b<image>"), np.int32)
    placed, items = place_items(tokens, [pictures, others])
    assert tokenizer.decode(placed) == "<image><image><image>a<ctx><ctx>b<image><image><image>"
    assert [item.start for item in items] == [0, 4, 7]
