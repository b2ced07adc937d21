"""Prepares pictures with transformers' processor of a model, in worker processes that import it, and never torch.

What becomes of a picture is found out first, from a blank picture of its size.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image

from quire.engine.client.picture_processor import PictureProcessor, ProcessedPicture, ProcessorError, placeholder_runs
from quire.engine.client.pictures import Color, PictureInfo
from quire.engine.client.protocol import EncoderInput
from quire.multimodal.pictures.decode import WHITE, Inspect, PictureError, PictureHeader, decoded, inspect
from quire.multimodal.pictures.layout import PictureLayout, ProcessedItemLayout
from quire.multimodal.pictures.limits import PictureLimits

_KNOWN_SIZES = 256  # of pictures, whose layouts a process remembers


@dataclass(frozen=True, slots=True)
class Measure:
    """A job: find out what becomes of a picture of this size."""

    header: PictureHeader
    info: PictureInfo


@dataclass(frozen=True, slots=True)
class MeasuredPicture:
    """The header of a file, and the layout of its picture."""

    header: PictureHeader
    layout: PictureLayout

    @property
    def height(self) -> int:
        """In pixels."""
        return self.header.height

    @property
    def width(self) -> int:
        """In pixels."""
        return self.header.width


@dataclass(frozen=True, slots=True)
class Process:
    """A job: decode a file and make the inputs of its item. `background`: behind transparent pixels."""

    content: bytes
    measured: MeasuredPicture
    info: PictureInfo
    background: Color = WHITE


Job = Inspect | Measure | Process
Inputs = tuple[EncoderInput, ...]


def worker(limits: PictureLimits, folder: str) -> Callable[[Job], PictureHeader | PictureLayout | Inputs]:
    """The function of a worker process. `folder`: that of the model."""
    # `import torch` fails: it would take seconds, and the memory of pictures.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # hides the warning that torch is missing
    os.environ["HF_HUB_OFFLINE"] = "1"
    Image.MAX_IMAGE_PIXELS = None  # our own limit is checked
    processor = PictureProcessor(folder)

    @lru_cache(_KNOWN_SIZES)
    def measured(info: PictureInfo, height: int, width: int) -> PictureLayout:
        _check_count(processor, info, height, width)
        blank = Image.new("RGB", (width, height))
        return processed_layout(info, _prepared(processor, blank))

    def do(job: Job) -> PictureHeader | PictureLayout | Inputs:
        match job:
            case Inspect(content):
                return inspect(content, limits)
            case Measure(header, info):
                return measured(info, header.height, header.width)
            case Process(content, expected, info, background):
                picture = _prepared(processor, decoded(content, expected.header, background))
                if processed_layout(info, picture) != expected.layout:
                    raise PictureError("The model's processor makes something else of this picture than of others.")
                return encoder_inputs(picture)

    return do


def _check_count(processor: PictureProcessor, info: PictureInfo, height: int, width: int) -> None:
    """Refuse a picture that has too many tokens, if the processor can tell before it prepares one."""
    count = processor.count(height, width)
    if count is not None and count > 2 * info.item_tokens > 0:  # it may count tokens of text around the picture
        raise PictureError(
            f"A picture of {width} x {height} pixels has {count} tokens; this model accepts {info.item_tokens}."
        )


def _prepared(processor: PictureProcessor, picture: Image.Image) -> ProcessedPicture:
    try:
        return processor.prepare(picture)
    except ProcessorError as error:
        raise PictureError(
            f"The model's processor cannot prepare a picture of {picture.width} x {picture.height} pixels: {error}."
        ) from error


def encoder_inputs(picture: ProcessedPicture) -> Inputs:
    """The inputs of a picture's item."""
    return tuple(EncoderInput(name=name, values=values) for name, values in picture.inputs.items())


def processed_layout(info: PictureInfo, picture: ProcessedPicture) -> PictureLayout:
    """The layout of a picture that the processor has prepared.

    Raises:
        PictureError: it has no placeholder tokens.
    """
    runs = placeholder_runs(picture.token_ids, info.placeholder)
    token = re.escape(info.token)
    text, replaced = re.subn(f"(?:{token})+", lambda _: info.token, picture.text)
    if not runs or replaced != len(runs):
        raise PictureError("The model's processor writes no placeholder tokens for this picture.")
    item = ProcessedItemLayout(images=0, height=0, width=0, row_length=0, runs=runs, input_bytes=picture.nbytes)
    return PictureLayout(text, (item,))
