"""transformers' video processors, which need torchvision: here Pillow resizes in its place, as it does for pictures."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers.image_utils
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
    mean, std = (torch.as_tensor(value)[:, None, None] for value in (mean, std))
    normalized: torch.Tensor = (image - mean) / std
    return normalized


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
    return modules


@cache
def video_processor(family: str, name: str) -> Any:
    """The class of a video processor. `family`: the package of the model in transformers."""
    missing = {name: module for name, module in _stand_in().items() if name not in sys.modules}
    sys.modules.update(missing)
    try:
        module = importlib.import_module(f"transformers.models.{family}.video_processing_{family}")
    finally:
        for stand_in in missing:
            del sys.modules[stand_in]
    return getattr(module, name)
