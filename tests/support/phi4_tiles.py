"""What Phi-4's image processor makes of pictures. transformers has it for torchvision alone."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from tests.support.audio_models import feature_extractor


class Phi4Tiles:
    """Tiles of a size, with their masks of patches."""

    def __init__(self, tile: int = 28, patch: int = 7, most: int = 6) -> None:
        """`most`: tiles of a picture."""
        self.tile, self.patch, self.most = tile, patch, most

    def to_json_string(self) -> str:
        """The config of the image processor, with that of the feature extractor of audio."""
        fields = {
            "image_processor_type": "Phi4MultimodalImageProcessor",
            "size": {"height": self.tile, "width": self.tile},
            "patch_size": self.patch,
            "dynamic_hd": self.most,
        }
        return json.dumps({**json.loads(feature_extractor("phi4_multimodal").to_json_string()), **fields})

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles."""
        rows, columns = math.ceil(height / self.tile), math.ceil(width / self.tile)
        if rows * columns <= self.most:
            return rows, columns
        best, least = (1, 1), math.inf
        numbers = range(1, self.most + 1)
        grids = {(across, down) for across in numbers for down in numbers if across * down <= self.most}
        for across, down in sorted(grids, key=math.prod):
            difference = abs(width / height - across / down)
            many = width * height > 0.5 * self.tile**2 * across * down
            if difference < least or (difference == least and many):
                best, least = (down, across), difference
        return best

    def fitted(self, picture: Image.Image) -> Image.Image:
        """The picture as large as its grid allows."""
        rows, columns = self.grid(picture.height, picture.width)
        down, across = rows * self.tile / picture.height, columns * self.tile / picture.width
        if across < down:
            size = columns * self.tile, int(picture.height * across)
        else:
            size = int(picture.width * down), rows * self.tile
        return picture.resize(size, Image.Resampling.BILINEAR)

    def prepared(self, picture: Image.Image) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
        """The images of a picture, their masks, and the size of the canvas."""
        rows, columns = self.grid(picture.height, picture.width)
        fitted = self.fitted(picture)
        canvas = torch.full((3, rows * self.tile, columns * self.tile), 1.0)
        normalized = torch.from_numpy(np.array(fitted)).permute(2, 0, 1) / 255 * 2 - 1
        canvas[:, : fitted.height, : fitted.width] = normalized
        patches = self.tile // self.patch
        mask = torch.ones(rows * patches, columns * patches)
        for dimension, edge in enumerate((fitted.height, fitted.width)):
            padding = canvas.shape[1 + dimension] - edge
            kept = mask.shape[dimension] - padding // self.patch
            mask.narrow(dimension, kept, mask.shape[dimension] - kept).zero_()
        whole = F.interpolate(canvas[None], (self.tile, self.tile), mode="bicubic")
        tiles = canvas.view(3, rows, self.tile, columns, self.tile).permute(1, 3, 0, 2, 4).flatten(0, 1)
        masks = mask.view(rows, patches, columns, patches).transpose(1, 2).flatten(0, 1)
        images, all_masks = torch.cat([whole, tiles]), torch.cat([torch.ones(1, patches, patches), masks])
        return images, all_masks, (rows * self.tile, columns * self.tile)

    def tokens(self, picture: Image.Image) -> int:
        """The number of tokens that stand for a picture."""
        rows, columns = self.grid(picture.height, picture.width)
        _, masks, _ = self.prepared(picture)
        sampled = masks[1:, ::2, ::2]
        edge = sampled.shape[1]
        first = sampled.view(rows, columns, edge, edge)[:, 0, :, 0]
        return edge * (edge + 1) + 1 + int(sampled.sum()) + int(first.sum())

    def inputs(self, pictures: list[Image.Image]) -> dict[str, Any]:
        """The arguments of `generate`: those with fewer tiles are filled up."""
        prepared = [self.prepared(picture) for picture in pictures]
        most = max(len(images) for images, _, _ in prepared)
        pixels = [F.pad(images, (0, 0, 0, 0, 0, 0, 0, most - len(images))) for images, _, _ in prepared]
        masks = [F.pad(mask, (0, 0, 0, 0, 0, most - len(mask)), value=1.0) for _, mask, _ in prepared]
        return {
            "image_pixel_values": torch.stack(pixels),
            "image_attention_mask": torch.stack(masks),
            "image_sizes": torch.tensor([size for _, _, size in prepared]),
        }
