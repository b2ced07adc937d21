"""The encoder of pictures of a composite model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.client.protocol import PictureItem
from quire.engine.models.config.image_processor import Normalization


class VisionEncoder(nn.Module):
    """Normalizes the pixels of an item, and lets modules of transformers encode it.

    Items are encoded one by one, so that the bits of an encoding do not depend on what else is encoded.
    """

    def __init__(
        self,
        tower: Any,
        encode: Callable[[Any, Tensor, PictureItem], Tensor],
        normalization: Normalization,
    ) -> None:
        """Make the encoder.

        Args:
            tower: transformers' model without its language model, with a method `initialize_weights`.
            encode: see `Tower.encode`.
            normalization: of pixels.
        """
        super().__init__()
        self.tower = tower
        self._encode = encode
        self._normalization = normalization

    @property
    def patch_area(self) -> int:
        """Pixels of a patch."""
        size = self.tower.config.vision_config.patch_size
        return int(size**2 if isinstance(size, int) else math.prod(size))

    def make_buffers(self, device: torch.device) -> None:
        """Make the tables that no checkpoint has, on a device; the parameters have been allocated."""
        for module in self.tower.modules():
            module._is_hf_initialized = False  # it was, on the meta device
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=device)
        for parameter in self.tower.parameters():
            parameter._is_hf_initialized = True  # it is read from the checkpoint
        self.tower.initialize_weights()

    def encode(self, item: PictureItem) -> Tensor:
        """Encode a picture: (tokens, size)."""
        if item.encoding is not None:
            sample = next(self.tower.parameters())
            return torch.tensor(item.encoding, device=sample.device, dtype=sample.dtype)
        return self._encode(self.tower, self._normalized(item), item)

    def _normalized(self, item: PictureItem) -> Tensor:
        """The pixels as the tower reads them: (images, 3, height, width)."""
        sample = next(self.tower.parameters())
        device = sample.device
        pixels = torch.tensor(item.pixels, device=device).permute(0, 3, 1, 2).float()
        normalization = self._normalization
        mean, std = (
            torch.tensor(values, device=device)[:, None, None] for values in (normalization.mean, normalization.std)
        )
        return ((pixels * normalization.scale - mean) / std).to(sample.dtype).contiguous()
