"""transformers' processors that need torchvision: here Pillow resizes in its place, as it does in the others."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers.image_utils
import transformers.utils
from PIL import Image
from transformers import image_processing_backends, video_processing_utils

_NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def _resize(_: Any, image: torch.Tensor, size: Any, resample: int = 0, **__: Any) -> torch.Tensor:
    """Resize frames (..., 3, height, width) of 8 bits."""
    frames = image.flatten(0, -4).permute(0, 2, 3, 1).numpy()
    shape = (size.width, size.height)
    resized = [np.asarray(Image.fromarray(frame).resize(shape, Image.Resampling(resample))) for frame in frames]
    pixels: torch.Tensor = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).unflatten(0, image.shape[:-3])
    return pixels


def _normalize(image: torch.Tensor, mean: Any, std: Any, **_: Any) -> torch.Tensor:
    mean, std = (torch.as_tensor(value, dtype=image.dtype)[:, None, None] for value in (mean, std))
    normalized: torch.Tensor = (image - mean) / std
    return normalized


def _resize_to(image: torch.Tensor, size: Any, interpolation: int, **_: Any) -> torch.Tensor:
    """Resize as functions of torchvision do. `interpolation`: Pillow's number."""
    shape = SimpleNamespace(height=size[0], width=size[1])
    frames = image[None] if image.dim() == 3 else image
    return _resize(None, frames, shape, interpolation).view(*image.shape[:-2], *size)


def _pad(image: torch.Tensor, padding: Any, fill: Any) -> torch.Tensor:
    """Pad on the right and below with zeros."""
    assert padding[:2] == [0, 0]
    assert not any(fill)
    return torch.nn.functional.pad(image, (0, padding[2], 0, padding[3]))


@cache
def _stand_in() -> dict[str, ModuleType]:
    """Modules of torchvision with nothing in them."""
    transformers.image_utils.is_torchvision_available()  # it remembers that there is none
    image_processing_backends.tvF = SimpleNamespace(normalize=_normalize, grayscale_to_rgb=lambda image: image)
    image_processing_backends.TorchvisionBackend.resize = _resize
    video_processing_utils.BaseVideoProcessor.convert_to_rgb = lambda _, video: video
    modules = {}
    for name in _NAMES:
        modules[name] = ModuleType(name)
        modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, modules[name])
    functional: Any = modules[_NAMES[-1]]
    functional.resize, functional.pad, functional.InterpolationMode = _resize_to, _pad, int
    return modules


def video_processor(family: str, name: str) -> Any:
    """The class of a video processor. `family`: the package of the model in transformers."""
    return _processor(family, name, "video")


def image_processor(family: str, name: str) -> Any:
    """The class of an image processor. `family`: the package of the model in transformers."""
    return _processor(family, name, "image")


@cache
def _processor(family: str, name: str, medium: str) -> Any:
    missing = {name: module for name, module in _stand_in().items() if name not in sys.modules}
    sys.modules.update(missing)
    try:
        with patch.object(transformers.utils, "is_torchvision_v2_available", return_value=True):
            module = importlib.import_module(f"transformers.models.{family}.{medium}_processing_{family}")
    finally:
        for stand_in in missing:
            del sys.modules[stand_in]
    return getattr(module, name)
