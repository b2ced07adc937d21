"""An encoder of texts and one of pictures, whose embeddings are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from quire.engine.client.protocol import PictureItem
from quire.engine.models.layers.heads import PoolerHeads
from quire.engine.models.networks.vision_encoder import VisionEncoder
from quire.engine.models.specs.dual_encoder import DualEncoderSpec


class DualEncoder(nn.Module):
    """Run a `DualEncoderSpec`: the modules of transformers in a `VisionEncoder` encode texts as well."""

    def __init__(
        self,
        spec: DualEncoderSpec,
        vision: VisionEncoder,
        encode_texts: Callable[[Any, Tensor], Tensor],
        heads: PoolerHeads,
    ) -> None:
        """Make the model.

        Args:
            spec: its architecture.
            vision: both encoders.
            encode_texts: see `TwoTowers`.
            heads: without layers; they normalize.
        """
        super().__init__()
        self.spec = spec
        self.vision = vision
        self.heads = heads
        self._encode_texts = encode_texts

    @property
    def hidden_size(self) -> int:
        """Elements of an embedding."""
        return self.spec.size

    @property
    def pooler_heads(self) -> PoolerHeads:
        """What normalizes embeddings."""
        return self.heads

    def encode_texts(self, tokens: Tensor) -> Tensor:
        """Encode texts of equal length, (texts, tokens): (texts, size)."""
        return self._encode_texts(self.vision.tower, tokens)

    def encode_picture(self, item: PictureItem) -> Tensor:
        """Encode a picture: (1, size)."""
        return self.vision.encode(item)
