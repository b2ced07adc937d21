"""Reads how a model's pictures are resized and normalized: the config of its image processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.client.json_file import read_json
from quire.engine.client.pictures import (
    MAX_TILES,
    TOKEN_BUDGETS,
    AnyResolution,
    CanvasTiles,
    Color,
    Filter,
    FixedSize,
    GridTiles,
    PaddedTiles,
    PanAndScan,
    PatchBudget,
    PatchRows,
    SmartResize,
    SplitTiles,
    TokenBudget,
)
from quire.engine.models.errors import BrokenFolder, UnsupportedModel

_FILTERS: tuple[Filter, ...] = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's numbers
_CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "resample": 3,
}
_HALF = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5), "resample": 3}
_CROPPED = {"size": {"shortest_edge": 224}, "crop_size": 224, "do_center_crop": True}
_IDEFICS = {"resample": 1, "size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}}
_VISION_PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_EDGES = range(384, 2305, 384)
# What fields are if a config does not have them, by the processor's name in small letters.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "clip": {**_CLIP, **_CROPPED},
    "llava": {**_CLIP, **_CROPPED},
    "siglip": {**_HALF, "size": {"height": 224, "width": 224}},
    "siglip2": {**_HALF, "resample": 2, "patch_size": 16, "max_num_patches": 256},
    "gemma3": {**_HALF, "resample": 2, "size": {"height": 224, "width": 224}},
    "gemma4": {
        "image_mean": (0.0, 0.0, 0.0),
        "image_std": (1.0, 1.0, 1.0),
        "do_normalize": False,
        "resample": 3,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "max_soft_tokens": 280,
    },
    "idefics3": {**_HALF, **_IDEFICS},
    "smolvlm": {**_HALF, **_IDEFICS},
    "pixtral": {**_CLIP, "size": {"longest_edge": 1024}, "patch_size": 16},
    "llavanext": {
        **_CLIP,
        **_CROPPED,
        "image_grid_pinpoints": ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)),
    },
    "llavaonevision": {
        **_CLIP,
        "size": {"height": 384, "width": 384},
        "image_grid_pinpoints": tuple((height, width) for height in _EDGES for width in _EDGES),
    },
    "gotocr2": {**_CLIP, "size": {"height": 384, "width": 384}, "min_patches": 1, "max_patches": 12},
    "qwen2vl": {**_CLIP, **_VISION_PATCHES, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
    "paddleocrvl": {
        **_CLIP,
        **_VISION_PATCHES,
        "temporal_patch_size": 1,
        "size": {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536},
    },
    "phi4multimodal": {**_HALF, "size": {"height": 448, "width": 448}, "patch_size": 14},
    "llama4": {
        **_HALF,
        "resample": 2,
        "size": {"height": 336, "width": 336},
        "max_patches": 16,
        "resize_to_max_canvas": False,
    },
    "glm4v": {**_CLIP, **_VISION_PATCHES, "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}},
}
_SAME = {
    "gemma4unified": "gemma4",
    "glm46v": "glm4v",
    "qwen2_5_vl": "qwen2vl",
    "qwen3vl": "qwen2vl",
    "internvl": "gotocr2",
    "phi4mm": "phi4multimodal",
}
_PARTS = ("ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor")
_GEMMA4 = ("gemma4", "gemma4unified")  # of pictures and of videos
_AREA_MULTIPLIED = "glm4v"  # counts a picture's area for each frame of a patch
_ROUNDED = "paddleocrvl"  # rounds the edges of pictures that are smaller than a token


@dataclass(frozen=True, slots=True)
class Normalization:
    """How values of pixels, from 0 to 255, become an encoder's: (value * scale - mean) / std, for each colour.

    Attributes:
        scale, mean, std: see above.
        in_bfloat16: each step of it is rounded to bfloat16, whatever dtype the encoder has (Llama 4).
        stays_float32: the encoder goes on in float32, whatever dtype its weights have (Gemma 4).
    """

    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    in_bfloat16: bool = False
    stays_float32: bool = False


class ImageProcessor:
    """The config of a model's image processor.

    Attributes:
        kind: its name in small letters, without "ImageProcessor".
        processor: the config of the processor around it.
    """

    def __init__(self, kind: str, fields: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self.kind = kind
        self.processor = processor
        self._fields = fields

    @classmethod
    def read(cls, folder: Path, default: str) -> ImageProcessor:
        """Read the config of a model.

        Args:
            folder: the model's directory.
            default: the kind of processor that models of this family have, if the config does not name one.

        Raises:
            BrokenFolder: a file cannot be read.
            UnsupportedModel: there is no config, or it is of a kind that is not supported.
        """
        file = read_json(folder / "preprocessor_config.json", BrokenFolder)
        processor = read_json(folder / "processor_config.json", BrokenFolder)
        inside = processor.get("image_processor")
        config = {**(inside if isinstance(inside, dict) else {}), **file}
        if not config:
            raise UnsupportedModel("there is no preprocessor_config.json, which says how pictures are resized")
        kind = _kind(config.get("image_processor_type") or config.get("feature_extractor_type"), default)
        if kind not in _DEFAULTS:
            raise UnsupportedModel(f"the image processor {config.get('image_processor_type')!r} is not supported")
        given = {name: value for name, value in config.items() if value is not None}
        image_processor = cls(kind, {**_DEFAULTS[kind], **given}, processor)
        image_processor._check_switches()
        return image_processor

    def normalization(self) -> Normalization:
        """How pixels are normalized.

        Raises:
            UnsupportedModel: the config is not valid.
        """
        scale = self._fields.get("rescale_factor", 1 / 255)
        if type(scale) not in (int, float):
            raise self._invalid("rescale_factor")
        if not self._fields.get("do_normalize", True):
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        else:
            mean, std = self._colors("image_mean"), self._colors("image_std")
        return Normalization(
            float(scale), mean, std, in_bfloat16=self.kind == "llama4", stays_float32=self.kind in _GEMMA4
        )

    def fixed_size(self, tokens: int) -> FixedSize:
        """The geometry of an encoder of images of one size. `tokens`: placeholders of an image.

        Raises:
            UnsupportedModel: the processor makes something else.
        """
        self._check_kind("clip", "llava", "siglip")
        size = self._size("size")
        crop = self._size("crop_size") if self._fields.get("do_center_crop") else {}
        color: Color | None = None
        if self.kind == "llava" and self._fields.get("do_pad"):
            red, green, blue = (int(255 * mean) for mean in self._colors("image_mean"))
            color = red, green, blue
        if set(size) == {"height", "width"} and (not crop or crop == size):
            height, width, shortest = size["height"], size["width"], None
        elif set(size) == {"shortest_edge"} and set(crop) == {"height", "width"}:
            height, width, shortest = crop["height"], crop["width"], size["shortest_edge"]
        else:
            raise self._invalid("size")
        return FixedSize(
            height=height,
            width=width,
            tokens=tokens,
            resample=self._resample(),
            shortest_edge=shortest,
            square_color=color,
        )

    def patch_budget(self, tokens: int) -> PatchBudget:
        """The geometry of SigLIP 2 for pictures of any shape. `tokens`: placeholders of a picture.

        Raises:
            UnsupportedModel: the processor makes something else.
        """
        self._check_kind("siglip2")
        return PatchBudget(
            patch=self._number("patch_size"),
            max_patches=self._number("max_num_patches"),
            tokens=tokens,
            resample=self._resample(),
        )

    def token_budget(self, most_tokens: int) -> TokenBudget:
        """The geometry of Gemma 4. `most_tokens`: those of a picture that the encoder can read.

        Raises:
            UnsupportedModel: the processor makes something else.
        """
        self._check_kind(*_GEMMA4)
        tokens = self._number("max_soft_tokens")
        possible = [budget for budget in TOKEN_BUDGETS if budget <= most_tokens]
        if tokens not in possible:
            raise UnsupportedModel(
                f"max_soft_tokens is {tokens} in the config of the processor; supported are "
                f"{', '.join(map(str, TOKEN_BUDGETS))}, but not more than config.json allows, {most_tokens}"
            )
        multiple = self._number("patch_size") * self._number("pooling_kernel_size")
        return TokenBudget(multiple=multiple, max_tokens=tokens, largest=max(possible), resample=self._resample())

    def canvas_tiles(self, tokens: int) -> CanvasTiles:
        """The geometry of Llama 4. `tokens`: placeholders of a tile.

        Raises:
            UnsupportedModel: the processor makes something else.
        """
        self._check_kind("llama4")
        most = self._number("max_patches")
        if most > MAX_TILES:
            raise self._invalid("max_patches")
        return CanvasTiles(
            tile=self._square("size"),
            tokens=tokens,
            max_tiles=most,
            enlarges=bool(self._fields.get("resize_to_max_canvas")),
            resample=self._resample(),
        )

    def smart_resize(self) -> SmartResize:
        """The geometry of Qwen-VL, GLM-V and PaddleOCR-VL.

        Raises:
            UnsupportedModel: the processor makes something else.
        """
        self._check_kind("qwen2vl", "glm4v", _ROUNDED)
        size = self._size("size")
        least, most = (
            self._fields.get(name, size.get(edge))
            for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
        )
        if type(least) is not int or type(most) is not int or not 0 < least <= most:
            raise self._invalid("size")
        by_frames = self.kind == _AREA_MULTIPLIED
        return SmartResize(
            multiple=self._number("patch_size") * self._number("merge_size"),
            merged=self._number("merge_size"),
            min_pixels=least,
            max_pixels=most,
            resample=self._resample(),
            frames=self._number("temporal_patch_size") if by_frames else 1,
            enlarges=by_frames or self.kind == _ROUNDED,
            rounds=self.kind == _ROUNDED,
        )

    def split_tiles(self, tokens: int) -> SplitTiles:
        """The geometry of Idefics 3 and SmolVLM. `tokens`: placeholders of a tile.

        Raises:
            UnsupportedModel: the processor makes something else.
        """
        self._check_kind("idefics3", "smolvlm")
        tile, longest = (self._size(name).get("longest_edge") for name in ("max_image_size", "size"))
        if tile is None or longest is None:
            raise self._invalid("size")
        splits = bool(self._fields.get("do_image_splitting", True))
        return SplitTiles(tile=tile, longest_edge=longest, tokens=tokens, resample=self._resample(), splits=splits)

    def patch_rows(self, merged: int = 1, *, row_end: str = "[IMG_BREAK]", end: str = "[IMG_END]") -> PatchRows:
        """The geometry of Pixtral and Mistral 3.

        Args:
            merged: edge of the square of patches that a token stands for.
            row_end, end: texts of the tokens between rows and behind the last one.

        Raises:
            UnsupportedModel: the processor makes something else.
        """
        self._check_kind("pixtral")
        longest = self._size("size").get("longest_edge")
        patch = self._square("patch_size") if "patch_size" not in self.processor else self._of_processor("patch_size")
        if longest is None:
            raise self._invalid("size")
        return PatchRows(
            patch=patch * merged, longest_edge=longest, row_end=row_end, end=end, resample=self._resample()
        )

    def any_resolution(self, *, patches: int, tokens: int, max_tiles: int | None = None) -> AnyResolution:
        """The geometry of LLaVA-NeXT and LLaVA-OneVision.

        Args:
            patches: number of patches along the edge of a tile.
            tokens: placeholders of a picture as one tile.
            max_tiles: see `AnyResolution`.

        Raises:
            UnsupportedModel: the processor makes something else.
        """
        self._check_kind("llavanext", "llavaonevision")
        size = self._size("size")
        edges = set(size.values())
        if self._fields.get("do_center_crop"):
            edges |= set(self._size("crop_size").values())
        if len(edges) != 1:
            raise self._invalid("size")
        (tile,) = edges
        canvases = self._fields["image_grid_pinpoints"]
        if not _is_list_of_sizes(canvases) or any(edge % tile for canvas in canvases for edge in canvas):
            raise self._invalid("image_grid_pinpoints")
        return AnyResolution(
            tile=tile,
            canvases=tuple((height, width) for height, width in canvases),
            patches=patches,
            tokens=tokens,
            max_tiles=max_tiles,
            resample=self._resample(),
        )

    def grid_tiles(self, tokens: int) -> GridTiles:
        """The geometry of InternVL. `tokens`: placeholders of a tile.

        Raises:
            UnsupportedModel: the processor makes something else.
        """
        self._check_kind("gotocr2")
        size = self._size("size")
        if set(size) != {"height", "width"}:
            raise self._invalid("size")
        return GridTiles(
            height=size["height"],
            width=size["width"],
            tokens=tokens,
            min_tiles=self._number("min_patches"),
            max_tiles=self._number("max_patches"),
            resample=self._resample(),
        )

    def pan_and_scan(self, tokens: int) -> PanAndScan:
        """The geometry of Gemma 3. `tokens`: placeholders of an image.

        Raises:
            UnsupportedModel: the processor makes something else.
        """
        self._check_kind("gemma3")
        size = self._size("size")
        if set(size) != {"height", "width"}:
            raise self._invalid("size")
        names = {"min_crop_size": "min_crop", "max_num_crops": "max_crops", "min_ratio_to_activate": "min_ratio"}
        settings = {
            ours: self._fields[f"pan_and_scan_{theirs}"]
            for theirs, ours in names.items()
            if f"pan_and_scan_{theirs}" in self._fields
        }
        if any(type(value) not in (int, float) or value <= 0 for value in settings.values()):
            raise self._invalid("pan_and_scan_min_crop_size")
        return PanAndScan(
            height=size["height"],
            width=size["width"],
            tokens=tokens,
            resample=self._resample(),
            splits=bool(self._fields.get("do_pan_and_scan")),
            **settings,
        )

    def padded_tiles(self) -> PaddedTiles:
        """The geometry of Phi-4. Tiles are resized with bilinear filters, whatever `resample` says.

        Raises:
            UnsupportedModel: the processor makes something else.
        """
        self._check_kind("phi4multimodal")
        tile, patch = self._square("size"), self._number("patch_size")
        if tile % patch:
            raise self._invalid("size")
        return PaddedTiles(tile=tile, patches=tile // patch, max_tiles=self._number("dynamic_hd"))

    def _check_switches(self) -> None:
        for name in ("do_resize", "do_rescale"):
            if not self._fields.get(name, True):
                raise UnsupportedModel(f"preprocessor_config.json: {name} must be true")

    def _check_kind(self, *known: str) -> None:
        if self.kind not in known:
            raise UnsupportedModel(
                f"the image processor is of the kind {self.kind!r}; models of this type have {' or '.join(known)}"
            )

    def _invalid(self, name: str) -> UnsupportedModel:
        return UnsupportedModel(f"preprocessor_config.json: {name} is {self._fields.get(name)!r}: not supported")

    def _size(self, name: str) -> dict[str, int]:
        """A size: an object with edges, or in old configs one number, or height and width."""
        value = self._fields.get(name)
        if type(value) is int:
            one_edge = name == "size" and self.kind in ("clip", "llava", "llavanext")
            value = {"shortest_edge": value} if one_edge else {"height": value, "width": value}
        elif isinstance(value, Sequence) and _is_size(value):
            value = {"height": value[0], "width": value[1]}
        if not isinstance(value, dict):
            raise self._invalid(name)
        edges = {edge: length for edge, length in value.items() if length is not None}
        if any(type(length) is not int or length < 1 for length in edges.values()):
            raise self._invalid(name)
        return edges

    def _square(self, name: str) -> int:
        """The edge of a size, which must be square."""
        edges = set(self._size(name).values())
        if len(edges) != 1:
            raise self._invalid(name)
        return edges.pop()

    def _number(self, name: str) -> int:
        value = self._fields.get(name)
        if type(value) is not int or value < 1:
            raise self._invalid(name)
        return value

    def _of_processor(self, name: str) -> int:
        value = self.processor[name]
        if type(value) is not int or value < 1:
            raise UnsupportedModel(f"processor_config.json: {name} is {value!r}: not supported")
        return value

    def _colors(self, name: str) -> tuple[float, float, float]:
        values = self._fields.get(name)
        if not isinstance(values, list | tuple) or len(values) != 3 or any(type(v) not in (int, float) for v in values):
            raise self._invalid(name)
        red, green, blue = map(float, values)
        return red, green, blue

    def _resample(self) -> Filter:
        number = self._fields.get("resample")
        if type(number) is not int or not 0 <= number < len(_FILTERS):
            raise self._invalid("resample")
        return _FILTERS[number]


def check_image_size(geometry: FixedSize | PanAndScan | CanvasTiles, vision: Any) -> None:
    """Check that an encoder, whose config `vision` is, reads images of the size that the processor makes.

    Raises:
        UnsupportedModel: it does not.
    """
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size
    made = (geometry.tile,) * 2 if isinstance(geometry, CanvasTiles) else (geometry.height, geometry.width)
    if made != (height, width):
        raise UnsupportedModel(
            f"the encoder reads pictures of {height}x{width} pixels, but preprocessor_config.json makes "
            f"{made[0]}x{made[1]}"
        )


def _kind(name: Any, default: str) -> str:
    """The kind of a processor's class."""
    kind = name if isinstance(name, str) else default
    for part in _PARTS:
        kind = kind.removesuffix(part)
    kind = kind.lower()
    return _SAME.get(kind, kind)


def _is_size(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(type(edge) is int and edge > 0 for edge in value)


def _is_list_of_sizes(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and all(map(_is_size, value))
