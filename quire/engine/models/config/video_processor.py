"""Reads which frames of videos a model reads, and how they are resized: the config of its video processor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from quire.engine.client.json_file import read_json
from quire.engine.client.pictures import FixedSize, FrameSampling, SmartResize, SplitTiles, VideoInfo
from quire.engine.models.config.image_processor import ImageProcessor, Normalization
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

logger = logging.getLogger(__name__)
_CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "resample": 3,
}
_HALF = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5), "resample": 3}
_PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_SQUARE = {"size": {"height": 384, "width": 384}}
_GEMMA4 = {
    "image_mean": (0.0, 0.0, 0.0),
    "image_std": (1.0, 1.0, 1.0),
    "resample": 3,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "max_soft_tokens": 70,
    "num_frames": 32,
}
_GLM = {**_CLIP, **_PATCHES, "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}, "fps": 2}
# What fields are if a config does not have them, by the processor's name in small letters. Those that leave it to the
# caller how many frames are read get two in a second, as Qwen's own tools do, or 32, as vLLM does.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma4": _GEMMA4,
    "gemma4unified": _GEMMA4,
    "qwen2vl": {
        **_CLIP,
        **_PATCHES,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "fps": 2,
        "min_frames": 4,
        "max_frames": 768,
    },
    "qwen3vl": {
        **_HALF,
        **_PATCHES,
        "patch_size": 16,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "fps": 2,
        "min_frames": 4,
        "max_frames": 768,
    },
    "glm4v": {**_GLM, "max_duration": 300},
    "glm46v": _GLM,
    "smolvlm": {
        **_HALF,
        "resample": 1,
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "fps": 1,
        "num_frames": 64,
    },
    "internvl": {**_CLIP, **_SQUARE, "num_frames": 32, "initial_shift": True},
    "llavaonevision": {**_CLIP, **_SQUARE, "num_frames": 32},
}
_PART = "VideoProcessor"
_BY_AREA = ("qwen2vl", "qwen3vl", "glm4v", "glm46v")  # whose frames keep their shape


class VideoProcessor(ImageProcessor):
    """The config of a model's video processor."""

    @classmethod
    def read(cls, folder: Path, default: str) -> VideoProcessor:
        """Read the config of a model; without one of its own, that of its image processor counts, as in transformers.

        Args:
            folder: the model's directory.
            default: the kind of processor that models of this family have, if the config does not name one.

        Raises:
            BrokenFolder: a file cannot be read.
            UnsupportedModel: it is of a kind that is not supported.
        """
        processor = read_json(folder / "processor_config.json", BrokenFolder)
        config = processor.get("video_processor")
        if not isinstance(config, dict):
            config = read_json(folder / "video_preprocessor_config.json", BrokenFolder)
            config = config or read_json(folder / "preprocessor_config.json", BrokenFolder)
        name = config.get("video_processor_type")
        kind = name.removesuffix(_PART).lower() if isinstance(name, str) else default
        if kind not in _DEFAULTS:
            raise UnsupportedModel(f"the video processor {name!r} is not supported")
        fields = {**_DEFAULTS[kind], **{key: value for key, value in config.items() if value is not None}}
        sampling = fields.get("video_sampling")
        if kind == "smolvlm" and isinstance(sampling, dict):
            names = {"fps": "fps", "max_frames": "num_frames", "video_size": "size"}
            fields |= {names[key]: value for key, value in sampling.items() if key in names and value is not None}
        if config.get("num_frames") is None and config.get("fps") is not None and kind != "smolvlm":
            fields["num_frames"] = None
        if kind != "qwen2vl":  # others have no such fields; they may be those of the image processor
            fields.pop("min_pixels", None)
            fields.pop("max_pixels", None)
        video_processor = cls(kind, fields, processor)
        video_processor._check_switches()
        return video_processor

    def sampling(self) -> FrameSampling:
        """Which frames are read.

        Raises:
            UnsupportedModel: the config is not valid.
        """
        match self.kind:
            case "qwen2vl":
                bounds = {"min_frames": self._number("min_frames"), "max_frames": self._number("max_frames")}
                return FrameSampling(rule="qwen2_vl", fps=self._rate(), num_frames=self._count(), **bounds)
            case "qwen3vl":
                bounds = {"min_frames": self._number("min_frames"), "max_frames": self._number("max_frames")}
                return FrameSampling(rule="qwen3_vl", fps=self._rate(), num_frames=self._count(), **bounds)
            case "glm4v":
                return FrameSampling(rule="glm4v", fps=self._rate(), max_seconds=self._number("max_duration"))
            case "glm46v":
                return FrameSampling(rule="glm46v", fps=self._rate())
            case "smolvlm":
                return FrameSampling(rule="smolvlm", fps=self._rate(), num_frames=self._count())
            case "internvl":
                return FrameSampling(
                    rule="internvl", fps=self._rate(), num_frames=self._count(), shift=self._initial_shift()
                )
            case _:
                return FrameSampling(rule="uniform", fps=self._rate(), num_frames=self._count())

    def frame_area(self) -> SmartResize:
        """The geometry of frames that keep their shape (Qwen-VL, GLM-V).

        Raises:
            UnsupportedModel: the processor makes something else.
        """
        self._check_kind(*_BY_AREA)
        if self._fields.get("cap_pixels_per_frame"):
            raise self._invalid("cap_pixels_per_frame")
        smart = ImageProcessor("qwen2vl", self._fields, self.processor).smart_resize()
        return structs.replace(smart, enlarges=self.kind != "qwen2vl")

    def frame_size(self, tokens: int) -> FixedSize:
        """The geometry of frames of one size (InternVL, LLaVA-OneVision). `tokens`: placeholders of a frame.

        Raises:
            UnsupportedModel: the processor makes something else.
        """
        self._check_kind("internvl", "llavaonevision")
        return ImageProcessor("siglip", self._fields, self.processor).fixed_size(tokens)

    def frame_tile(self, tokens: int) -> SplitTiles:
        """The geometry of frames that are one tile (SmolVLM). `tokens`: placeholders of a frame.

        Raises:
            UnsupportedModel: the processor makes something else.
        """
        self._check_kind("smolvlm")
        return structs.replace(self.split_tiles(tokens), splits=False)

    def _rate(self) -> float | None:
        fps = self._fields.get("fps")
        if fps is not None and (type(fps) not in (int, float) or fps <= 0):
            raise self._invalid("fps")
        return None if fps is None else float(fps)

    def _count(self) -> int | None:
        return None if self._fields.get("num_frames") is None else self._number("num_frames")

    def _initial_shift(self) -> float | None:
        shift = self._fields["initial_shift"]
        if isinstance(shift, bool):
            return None if shift else 0.0
        if type(shift) not in (int, float) or shift < 0:
            raise self._invalid("initial_shift")
        return float(shift)


def video_of(
    folder: Path, normalization: Normalization, read: Callable[[], tuple[VideoProcessor, VideoInfo]]
) -> VideoInfo | None:
    """How a model reads videos; None if it does not, or in a way that is not supported.

    Args:
        folder: the model's directory, for the log.
        normalization: of its pictures, which is that of frames as well.
        read: reads its video processor, and how its videos become items.

    Raises:
        BrokenFolder: a file cannot be read.
    """
    try:
        processor, info = read()
        if processor.normalization() != normalization:
            raise UnsupportedModel("frames of videos are normalized in another way than pictures")
    except UnsupportedModel as error:
        logger.warning("%s: videos are not supported: %s", folder.name, error)
        return None
    return info
