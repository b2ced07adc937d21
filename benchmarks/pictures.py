"""What a picture costs the front end: decoding, resizing and dividing it, beside transformers' processors with Pillow.

    python -m benchmarks.pictures

Prints milliseconds of CPU time for a picture of 1,024 x 1,024 pixels, the smallest of seven runs: of a JPEG file as a
worker process prepares it, of its pixels alone, and of transformers' processor on the decoded picture, which also
normalizes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from quire.engine.client.pictures import (
    AnyResolution,
    FixedSize,
    Geometry,
    GridTiles,
    PanAndScan,
    PatchRows,
    PictureInfo,
    SmartResize,
    SplitTiles,
)
from quire.multimodal.pictures.decode import Prepare, inspect, prepare
from quire.multimodal.pictures.layout import layout
from quire.multimodal.pictures.limits import PictureLimits
from quire.multimodal.pictures.pixels import picture_pixels
from tests.support.pictures import encoded

RUNS = 7
EDGE = 1024
LIMITS = PictureLimits(1 << 30, 1 << 30)
CANVASES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_SQUARE = {"height": 336, "width": 336}
CASES: dict[str, tuple[Geometry, Any]] = {
    "LLaVA 1.5": (
        FixedSize(height=336, width=336, tokens=576, shortest_edge=336),
        CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size=_SQUARE),
    ),
    "Gemma 3": (
        PanAndScan(height=896, width=896, tokens=256),
        Gemma3ImageProcessorPil(size={"height": 896, "width": 896}),
    ),
    "Qwen2.5-VL": (
        SmartResize(multiple=28, min_pixels=3136, max_pixels=12_845_056),
        Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 12_845_056}),
    ),
    "Mistral 3": (
        PatchRows(patch=28, longest_edge=1540),
        PixtralImageProcessorPil(size={"longest_edge": 1540}, patch_size={"height": 28, "width": 28}),
    ),
    "LLaVA-NeXT": (
        AnyResolution(tile=336, canvases=CANVASES, patches=24, tokens=576),
        LlavaNextImageProcessorPil(
            size={"shortest_edge": 336}, crop_size=_SQUARE, image_grid_pinpoints=[list(size) for size in CANVASES]
        ),
    ),
    "InternVL 3": (
        GridTiles(height=448, width=448, tokens=256),
        GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True, max_patches=12),
    ),
    "SmolVLM": (
        SplitTiles(tile=512, longest_edge=2048, tokens=64),
        SmolVLMImageProcessorPil(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}),
    ),
}


def smooth_picture() -> Image.Image:
    """Noise of low frequency, which takes about as long to decode as a photograph."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    return Image.fromarray(noise).resize((EDGE, EDGE), Image.Resampling.BICUBIC)


def milliseconds(work: Callable[[], object]) -> float:
    """CPU time of the fastest run."""
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return 1000 * min(times)


def measure(geometry: Geometry, processor: Any, picture: Image.Image, content: bytes) -> tuple[float, float, float]:
    """Times of the file, of its pixels, and of the processor of transformers."""
    info = PictureInfo(placeholder=0, placeholder_text="<image>", geometry=geometry)
    header, planned = inspect(content, LIMITS), layout(info, EDGE, EDGE)
    return (
        milliseconds(lambda: prepare(Prepare(content, header, info))),
        milliseconds(lambda: picture_pixels(geometry, picture, planned)),
        milliseconds(lambda: processor(images=picture, return_tensors="np")),
    )


def main() -> None:
    """Print a table."""
    picture = smooth_picture()
    content = encoded(picture, "JPEG", quality=90)
    print(f"{'':12}{'file':>8}{'pixels':>8}{'transformers':>14}")
    for name, (geometry, processor) in CASES.items():
        file, pixels, reference = measure(geometry, processor, picture, content)
        print(f"{name:12}{file:8.1f}{pixels:8.1f}{reference:14.1f}")


if __name__ == "__main__":
    main()
