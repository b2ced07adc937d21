"""Pixels and layouts against the image processors of transformers that use Pillow."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers.image_utils import SizeDict
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from quire.engine.client.pictures import CanvasTiles, FixedSize, Geometry, PictureInfo
from quire.engine.models.config.image_processor import ImageProcessor, Normalization
from quire.multimodal.pictures.layout import LayoutError, PictureLayout, canvas_grid, canvas_size, layout
from quire.multimodal.pictures.pixels import picture_pixels
from quire.multimodal.pictures.resize import resized
from tests.support.phi4_tiles import Phi4Tiles
from tests.support.pictures import drawn
from tests.support.video_processors import image_processor

SIZES = ((64, 64), (1, 1), (3, 150), (211, 2), (37, 91), (300, 120), (640, 481), (97, 700), (513, 1030))
# What the config of a processor says, and the geometry that is read of it.
CASES: dict[str, tuple[type, dict[str, Any], Callable[[ImageProcessor], Geometry]]] = {
    "clip": (
        CLIPImageProcessorPil,
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        lambda processor: processor.fixed_size(16),
    ),
    "clip-smaller-than-crop": (
        CLIPImageProcessorPil,
        {"size": {"shortest_edge": 41}, "crop_size": {"height": 56, "width": 70}},
        lambda processor: processor.fixed_size(16),
    ),
    "llava-square": (
        LlavaImageProcessorPil,
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "do_pad": True},
        lambda processor: processor.fixed_size(16),
    ),
    "siglip": (
        SiglipImageProcessorPil,
        {"size": {"height": 70, "width": 84}},
        lambda processor: processor.fixed_size(30),
    ),
    "gemma3": (
        Gemma3ImageProcessorPil,
        {"size": {"height": 56, "width": 56}},
        lambda processor: processor.pan_and_scan(4),
    ),
    "gemma3-crops": (
        Gemma3ImageProcessorPil,
        {
            "size": {"height": 56, "width": 56},
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 90,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
        lambda processor: processor.pan_and_scan(4),
    ),
    "idefics3": (
        Idefics3ImageProcessorPil,
        {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}},
        lambda processor: processor.split_tiles(4),
    ),
    "smolvlm-whole": (
        SmolVLMImageProcessorPil,
        {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}, "do_image_splitting": False},
        lambda processor: processor.split_tiles(4),
    ),
    "smolvlm-one-tile": (
        SmolVLMImageProcessorPil,
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 64}},
        lambda processor: processor.split_tiles(4),
    ),
    "pixtral": (
        PixtralImageProcessorPil,
        {"size": {"longest_edge": 224}, "patch_size": {"height": 28, "width": 28}},
        lambda processor: processor.patch_rows(),
    ),
    "llava_next": (
        LlavaNextImageProcessorPil,
        {
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
        },
        lambda processor: processor.any_resolution(patches=2, tokens=4),
    ),
    "llava_onevision": (
        LlavaOnevisionImageProcessorPil,
        {
            "size": {"height": 28, "width": 28},
            "image_grid_pinpoints": [[28 * rows, 28 * columns] for rows in range(1, 5) for columns in range(1, 5)],
        },
        lambda processor: processor.any_resolution(patches=2, tokens=4, max_tiles=9),
    ),
    "got_ocr2": (
        GotOcr2ImageProcessorPil,
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 12},
        lambda processor: processor.grid_tiles(4),
    ),
    "qwen2_vl": (
        Qwen2VLImageProcessorPil,
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40}},
        lambda processor: processor.smart_resize(),
    ),
    "paddleocr_vl": (
        PaddleOCRVLImageProcessorPil,
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40}},
        lambda processor: processor.smart_resize(),
    ),
    "gemma4": (
        Gemma4ImageProcessorPil,
        {"max_soft_tokens": 140, "patch_size": 4, "pooling_kernel_size": 3},
        lambda processor: processor.token_budget(1120),
    ),
    "glm4v": (
        Glm4vImageProcessorPil,
        {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 80}},
        lambda processor: processor.smart_resize(),
    ),
}


def _read(case: str, folder: Path) -> tuple[Any, ImageProcessor, PictureInfo]:
    """The processor of a case, what is read of the config that it saves, and facts with its geometry."""
    kind, fields, geometry_of = CASES[case]
    processor = kind(**fields)
    processor.save_pretrained(folder)
    read = ImageProcessor.read(folder, "unknown")
    return processor, read, PictureInfo(placeholder=9, placeholder_text="<image>", geometry=geometry_of(read))


def _normalized(pixels: NDArray[np.uint8], facts: Normalization) -> NDArray[np.float32]:
    values = (pixels.astype(np.float64) * facts.scale).astype(np.float32)
    mean, std = (np.array(colors, np.float32) for colors in (facts.mean, facts.std))
    normalized: NDArray[np.float32] = np.moveaxis((values - mean) / std, -1, 1)
    return normalized


def _patches(images: NDArray[np.float32], size: int, merged: int) -> NDArray[np.float32]:
    """The patches of one image as Qwen-VL's processor orders them, each twice: for two equal frames."""
    _, colors, height, width = images.shape
    rows, columns = height // size // merged, width // size // merged
    grid = images[0].reshape(colors, rows, merged, size, columns, merged, size)
    patches = grid.transpose(1, 4, 2, 5, 0, 3, 6)
    twice = np.broadcast_to(patches[:, :, :, :, :, None], (*patches.shape[:5], 2, size, size))
    return twice.reshape(-1, colors * 2 * size * size)


def _rows_of_patches(images: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """The patches of one image as Gemma 4's processor orders them: (1, patches, size * size * 3)."""
    _, colors, height, width = images.shape
    grid = images[0].reshape(colors, height // size, size, width // size, size)
    rows: NDArray[np.float32] = grid.transpose(1, 3, 2, 4, 0).reshape(1, -1, size * size * colors)
    return rows


@pytest.mark.parametrize("case", CASES)
def test_pixels_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    processor, read, info = _read(case, tmp_path)
    for number, (height, width) in enumerate(SIZES):
        picture = drawn(height, width, seed=number)
        planned = layout(info, height, width)
        pixels = picture_pixels(info.geometry, picture, planned)
        assert len(pixels) == sum(item.images for item in planned.items)
        assert all(pixels.shape[1:] == item.shape[1:] for item in planned.items)
        images = _normalized(pixels, read.normalization())
        expected = processor(images=picture, return_tensors="np")["pixel_values"]
        if case in ("qwen2_vl", "glm4v"):
            images = _patches(images, 14, 2)
        if case == "gemma4":
            images = _rows_of_patches(images, 4)
            expected = expected[:, : images.shape[1]]
        if case == "paddleocr_vl":
            _, colors, height, width = images.shape
            squares = images.reshape(colors, height // 14, 14, width // 14, 14)
            images = squares.transpose(1, 3, 0, 2, 4).reshape(-1, colors, 14, 14)
        np.testing.assert_allclose(images, np.reshape(expected, images.shape), atol=2e-6, err_msg=f"{height}x{width}")


def test_tiles_of_phi4(tmp_path: Path) -> None:
    """Their number, pixels and tokens. transformers has its image processor for torchvision alone."""
    processor = Phi4Tiles()
    (tmp_path / "preprocessor_config.json").write_text(processor.to_json_string())
    read = ImageProcessor.read(tmp_path, "unknown")
    info = PictureInfo(placeholder=9, placeholder_text="<image>", geometry=read.padded_tiles())
    for number, (height, width) in enumerate((*SIZES, (28, 28), (29, 28), (300, 20), (13, 100))):
        if max(height, width) > 15 * min(height, width):  # too long for it
            with pytest.raises(LayoutError, match="too long and narrow"):
                layout(info, height, width)
            continue
        picture = drawn(height, width, seed=number)
        planned = layout(info, height, width)
        images = _normalized(picture_pixels(info.geometry, picture, planned), read.normalization())
        expected, _, _ = processor.prepared(picture)
        np.testing.assert_allclose(images, expected[1:], atol=2e-6, err_msg=f"{height}x{width}")
        assert planned.tokens == processor.tokens(picture)


@pytest.mark.parametrize("enlarges", [False, True])
def test_tiles_of_llama4(enlarges: bool, tmp_path: Path) -> None:
    """Pixels and grids of many shapes, with Pillow's resizing in the place of torchvision's."""
    kind = image_processor("llama4", "Llama4ImageProcessor")
    processor = kind(size={"height": 28, "width": 28}, max_patches=7, resize_to_max_canvas=enlarges)
    (tmp_path / "preprocessor_config.json").write_text(processor.to_json_string())
    read = ImageProcessor.read(tmp_path, "unknown")
    info = PictureInfo(
        placeholder=9, placeholder_text="<|image|>", geometry=read.canvas_tiles(4), token_text="<|patch|>"
    )
    assert read.normalization().in_bfloat16
    text = Llama4Processor._prompt_split_image
    for number, (height, width) in enumerate((*SIZES, (28, 28), (56, 28), (29, 28), (300, 20), (13, 100), (84, 85))):
        picture = drawn(height, width, seed=number)
        planned = layout(info, height, width)
        pixels = picture_pixels(info.geometry, picture, planned)
        made = processor(images=picture, return_tensors="pt")
        images = (torch.tensor(pixels).permute(0, 3, 1, 2).bfloat16() * (1 / 255) - 0.5) / 0.5
        assert torch.equal(images, made["pixel_values"].flatten(0, -4)), f"{height}x{width}"
        written = text(None, made["aspect_ratios"][0].tolist(), 1)
        assert f"<|image_start|>{planned.text}<|image_end|>" == written


def test_grids_of_llama4() -> None:
    """Of pictures of all shapes, as transformers chooses and fills them."""
    module = sys.modules[image_processor("llama4", "Llama4ImageProcessor").__module__]
    square = SizeDict(height=336, width=336)
    for tiles, enlarges in ((16, False), (16, True), (5, False)):
        geometry = CanvasTiles(tile=336, tokens=144, max_tiles=tiles, enlarges=enlarges)
        module.find_supported_resolutions.cache_clear()
        sizes = torch.tensor(module.find_supported_resolutions(max_num_chunks=tiles, patch_size=square))
        rng = np.random.default_rng(tiles)
        for height, width in [(336, 672), (1008, 336), (3, 500), *rng.integers(1, 3000, (300, 2)).tolist()]:
            target = module.get_best_fit((height, width), sizes, resize_to_max_canvas=enlarges)
            assert [336 * edge for edge in canvas_grid(geometry, height, width)] == target.tolist(), (height, width)
            if not enlarges:
                target = [min(max(edge, 336), most) for edge, most in zip((height, width), target, strict=True)]
            fitted = module.get_max_res_without_distortion((height, width), tuple(target))
            assert canvas_size(geometry, height, width) == tuple(max(1, int(edge)) for edge in fitted), (height, width)


def test_a_picture_that_is_too_long_is_refused(tmp_path: Path) -> None:
    _, _, info = _read("qwen2_vl", tmp_path)
    with pytest.raises(LayoutError, match="at most 200 times"):
        layout(info, 2, 401)
    assert layout(info, 2, 400).tokens


def test_rows_end_with_text_tokens(tmp_path: Path) -> None:
    _, _, info = _read("pixtral", tmp_path)
    (item,) = layout(info, 56, 80).items
    assert (item.rows, item.row_length, item.length) == (2, 3, 8)
    offsets = item.text_offsets()
    assert offsets is not None
    assert offsets.tolist() == [3, 7]
    assert layout(info, 56, 80).text == "<image>[IMG_BREAK]<image>[IMG_END]"


def test_rotary_positions_are_those_of_the_grid(tmp_path: Path) -> None:
    _, _, info = _read("qwen2_vl", tmp_path)
    planned: PictureLayout = layout(info, 56, 84)
    (item,) = planned.items
    positions = item.positions()
    assert positions is not None
    assert positions.tolist() == [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    assert item.advance == 3
    assert planned.tokens == 6


def test_a_config_without_a_type_is_of_the_familys_kind(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 336, "crop_size": 336}))
    fixed = ImageProcessor.read(tmp_path, "clip").fixed_size(576)
    assert (fixed.shortest_edge, fixed.height, fixed.width, fixed.resample) == (336, 336, 336, "bicubic")


@pytest.mark.parametrize("size", [(64, 64), (45, 31), (31, 45), (3, 150), (211, 2), (230, 97)])
@pytest.mark.parametrize("target", [(56, 56), (28, 84), (84, 28)])
def test_the_square_around_a_picture_is_resized_in_pieces(
    size: tuple[int, int], target: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.multimodal.pictures.pixels._SQUARE_BAND", 1)
    color = (30, 140, 250)
    picture, edge = drawn(*size), max(size)
    whole = Image.new("RGB", (edge, edge), color)
    whole.paste(picture, ((edge - size[1]) // 2, (edge - size[0]) // 2))
    height, width = target
    geometry = FixedSize(height=height, width=width, tokens=4, square_color=color)
    info = PictureInfo(placeholder=9, placeholder_text="<image>", geometry=geometry)
    (pixels,) = picture_pixels(geometry, picture, layout(info, *size))
    np.testing.assert_array_equal(pixels, resized(np.asarray(whole), height, width, geometry.resample))
