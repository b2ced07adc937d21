"""The small language models of `vision_models` that read videos, and how transformers prepares videos for them."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from quire.engine.client.pictures import PictureInfo, VideoInfo
from quire.engine.client.protocol import PictureItem
from quire.engine.models.model_config import read_model_config
from quire.multimodal.videos.decode import PrepareVideo, prepare
from quire.multimodal.videos.formats import packed
from quire.multimodal.videos.layout import VideoHeader, video_layout
from quire.multimodal.videos.limits import VideoLimits
from tests.support.pictures import drawn, encoded
from tests.support.video_processors import video_processor
from tests.support.vision_models import (
    COMPOSITES,
    PICTURE,
    SEES,
    SEPARATOR,
    VIDEO,
    greedy_tokens,
    seen,
    write_image_processor,
)

LIMITS = VideoLimits(1 << 26, 1 << 23, 768)
_AREA = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 9}
_SHARED_AREA = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 40}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_TILES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}


@dataclass(frozen=True)
class Watches:
    """How a model reads videos.

    Attributes:
        family, processor: package and name of its video processor in transformers.
        fields: of that.
        inputs: names of the arguments of `generate` for videos.
    """

    family: str
    processor: str
    fields: dict[str, Any]
    inputs: tuple[str, ...]

    def build(self) -> Any:
        """The processor."""
        return video_processor(self.family, self.processor)(**self.fields)


_GRIDS = ("pixel_values_videos", "video_grid_thw")
_QWEN2 = Watches("qwen2_vl", "Qwen2VLVideoProcessor", {"size": _AREA, "fps": 2, "max_frames": 16}, _GRIDS)
_QWEN3 = Watches(
    "qwen3_vl", "Qwen3VLVideoProcessor", {"size": _SHARED_AREA, "patch_size": 14, "max_frames": 16, **_HALF}, _GRIDS
)
_BUDGET = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70, "num_frames": 4}
_PATCHES = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")
_GLM = Watches("glm4v", "Glm4vVideoProcessor", {"size": _SHARED_AREA, "max_duration": 20}, _GRIDS)
WATCHES: dict[str, Watches] = {
    "gemma4": Watches("gemma4", "Gemma4VideoProcessor", _BUDGET, _PATCHES),
    "gemma4_unified": Watches("gemma4_unified", "Gemma4UnifiedVideoProcessor", _BUDGET, _PATCHES),
    "glm4v": _GLM,
    "glm46v": Watches("glm46v", "Glm46VVideoProcessor", {"size": _SHARED_AREA}, _GRIDS),
    "internvl": Watches(
        "internvl", "InternVLVideoProcessor", {"size": {"height": 56, "width": 56}, "num_frames": 4}, ("pixel_values",)
    ),
    "llava_onevision": Watches(
        "llava_onevision",
        "LlavaOnevisionVideoProcessor",
        {"size": {"height": 28, "width": 28}, "num_frames": 4},
        ("pixel_values_videos",),
    ),
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_5": _QWEN3,
    "smolvlm": Watches("smolvlm", "SmolVLMVideoProcessor", {**_TILES, "num_frames": 6, "fps": 1}, ("pixel_values",)),
}


def cases(*fast: str) -> list[Any]:
    """All models that read videos, as parameters of a test; all but some are slow."""
    return [pytest.param(case, marks=() if case in fast else pytest.mark.slow) for case in WATCHES]


def save_watching(model: Any, case: str, folder: Path) -> Path:
    """Save a model with the configs of its image processor and its video processor."""
    model.save_pretrained(folder)
    write_processors(case, folder)
    return folder


def write_processors(case: str, folder: Path) -> None:
    """Write the configs of a model's image processor and its video processor."""
    write_image_processor(case, folder)
    config = json.loads(WATCHES[case].build().to_json_string())
    (folder / "video_preprocessor_config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Clip:
    """Frames of a video, of which all are read, and their rate."""

    frames: tuple[Image.Image, ...]
    fps: float = 2.0

    @property
    def header(self) -> VideoHeader:
        """What is known of it."""
        count, first = len(self.frames), self.frames[0]
        return VideoHeader(count, self.fps, count / self.fps, first.height, first.width, tuple(range(count)))

    @property
    def content(self) -> bytes:
        """The frames as files without loss."""
        return packed([encoded(frame) for frame in self.frames])

    @property
    def pixels(self) -> Any:
        """All frames: (frames, height, width, 3)."""
        return np.stack([np.asarray(frame) for frame in self.frames])

    @property
    def metadata(self) -> dict[str, Any]:
        """The same for transformers."""
        count = len(self.frames)
        return {
            "total_num_frames": count,
            "fps": self.fps,
            "duration": count / self.fps,
            "frames_indices": list(range(count)),
        }


def filmed(count: int, height: int, width: int, *, fps: float = 2.0, seed: int = 0) -> Clip:
    """A clip of drawn frames."""
    return Clip(tuple(drawn(height, width, seed=100 * seed + index) for index in range(count)), fps)


def processed(case: str, clips: Sequence[Clip]) -> list[Any]:
    """What transformers' video processor makes of each clip."""
    processor = WATCHES[case].build()
    return [
        processor(
            videos=[clip.pixels],
            video_metadata=[clip.metadata],
            do_sample_frames=False,
            return_metadata=True,
            return_tensors="pt",
        )
        for clip in clips
    ]


def watched(info: PictureInfo, clip: Clip, start: int) -> tuple[list[int], list[PictureItem]]:
    """The tokens of a video that begin at `start`, and its items. Text between items is one token."""
    assert info.video is not None
    video, header = info.video, clip.header
    planned = video_layout(video, header)
    pixels = prepare(PrepareVideo(clip.content, header, video), LIMITS)
    tokens: list[int] = []
    items: list[PictureItem] = []
    texts = planned.text.split(video.token)
    for index, place in enumerate(planned.items):
        tokens += [SEPARATOR] * bool(texts[index])
        images = np.ascontiguousarray(pixels[index * place.images : (index + 1) * place.images])
        items.append(
            PictureItem(
                hash=hashlib.sha256(images.tobytes() + repr((images.shape, place)).encode()).digest(),
                start=start + len(tokens),
                length=place.length,
                pixels=images,
                positions=place.positions(),
                advance=place.advance,
                is_video=True,
            )
        )
        tokens += [video.placeholder] * place.length
    return [*tokens, *[SEPARATOR] * bool(texts[-1])], items


def prompt_with_media(info: PictureInfo, *parts: Any) -> tuple[list[int], tuple[PictureItem, ...]]:
    """The prompt of tokens, pictures and clips one behind the other, and its items."""
    tokens: list[int] = []
    items: list[PictureItem] = []
    readers: dict[type, Callable[..., tuple[list[int], list[PictureItem]]]] = {Clip: watched, Image.Image: seen}
    for part in parts:
        reader = readers.get(type(part))
        added, of_part = ([*part], []) if reader is None else reader(info, part, len(tokens))
        tokens += added
        items += of_part
    return tokens, tuple(items)


def expected_of_media(model: Any, case: str, info: PictureInfo, parts: Sequence[Any], max_tokens: int) -> list[int]:
    """Greedy tokens of transformers' `generate` for pictures and clips."""
    ids, inputs = _arguments(case, info, parts)
    model.model.rope_deltas = None  # of the call before
    return greedy_tokens(model, ids, max_tokens, inputs)


@torch.inference_mode()
def hidden_of_media(model: Any, case: str, info: PictureInfo, parts: Sequence[Any]) -> torch.Tensor:
    """The hidden states (tokens, size) behind the last norm of a model without a head."""
    ids, inputs = _arguments(case, info, parts)
    model.rope_deltas = None  # of the call before
    hidden: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)[0]
    return hidden[0]


def _arguments(case: str, info: PictureInfo, parts: Sequence[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The tokens of a prompt, and what a model gets beside them."""
    prompt, _ = prompt_with_media(info, *parts)
    ids = torch.tensor([prompt])
    inputs = _inputs(case, parts)
    if SEES[case].types(ids):
        kinds = torch.zeros_like(ids)
        kinds[ids == PICTURE] = 2 if info.video is not None and info.video.placeholder == PICTURE else 1
        kinds[ids == VIDEO] = 2
        inputs["mm_token_type_ids"] = kinds.int()
    return ids, inputs


def _inputs(case: str, parts: Sequence[Any]) -> dict[str, torch.Tensor]:
    pictures = [part for part in parts if isinstance(part, Image.Image)]
    clips = [part for part in parts if isinstance(part, Clip)]
    inputs = SEES[case].inputs(SEES[case].processor, pictures) if pictures else {}
    made = processed(case, clips)
    if case == "smolvlm":  # frames are pictures, in the order of the prompt
        pixels = _in_order(parts, [clip["pixel_values"][0] for clip in made], inputs, _tiles)
        return {} if pixels is None else {"pixel_values": pixels[None]}
    if case == "internvl":
        pixels = _in_order(parts, [clip["pixel_values_videos"][0] for clip in made], inputs, _grid)
        return {} if pixels is None else {"pixel_values": pixels}
    for name in WATCHES[case].inputs if clips else ():
        inputs[name] = torch.cat([clip[name] for clip in made])
    if case == "qwen2_5_vl" and clips:
        inputs["second_per_grid_ts"] = torch.tensor([2 / clip.fps for clip in clips])
    return inputs


def _in_order(
    parts: Sequence[Any], clips: list[torch.Tensor], inputs: dict[str, torch.Tensor], count: Callable[[Any], int]
) -> torch.Tensor | None:
    """The images of pictures and clips as a prompt has them. `count`: of the images of a picture."""
    frames = iter(clips)
    images = iter(inputs["pixel_values"].flatten(0, -4).split(1) if inputs else ())
    of_parts = [
        next(frames) if isinstance(part, Clip) else torch.cat([next(images) for _ in range(count(part))])
        for part in parts
        if isinstance(part, Clip | Image.Image)
    ]
    return torch.cat(of_parts) if of_parts else None


def _tiles(picture: Image.Image) -> int:
    processed = SEES["smolvlm"].processor(images=[[picture]], return_tensors="pt")
    return int(processed["pixel_values"].shape[1])


def _grid(picture: Image.Image) -> int:
    return int(SEES["internvl"].processor(images=[picture], return_tensors="pt")["pixel_values"].shape[0])


def video_info(case: str, folder: Path, **fields: Any) -> VideoInfo | None:
    """How a model reads videos, by a folder with its configs alone. `fields`: others of its video processor."""
    kind, of_model = COMPOSITES[case]
    AutoConfig.for_model(kind, **copy.deepcopy(of_model)).save_pretrained(folder)
    write_processors(case, folder)
    config = json.loads((folder / "video_preprocessor_config.json").read_text())
    (folder / "video_preprocessor_config.json").write_text(json.dumps({**config, **fields}))
    pictures = read_model_config(folder).facts.pictures
    assert pictures is not None
    return pictures.info.video
