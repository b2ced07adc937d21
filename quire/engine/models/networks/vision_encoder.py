"""The encoders of pictures of composite models, and of audio where transformers' modules encode both."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from quire.engine.client.protocol import AudioItem, PictureItem
from quire.engine.models.config.image_processor import Normalization
from quire.engine.models.family import AudioTower

_PATCH = 8  # pixels of the edge of a patch of towers that have none: of MobileNet, whose first layers take most memory


class PictureRefused(Exception):
    """A picture cannot be encoded, which is not known before it is tried: its request ends.

    Attributes:
        stand_in: zeros in place of its embeddings, for the step that it is in.
    """

    def __init__(self, reason: str, stand_in: Tensor) -> None:
        super().__init__(reason)
        self.stand_in = stand_in


class VisionEncoder(nn.Module):
    """Encodes pictures with modules of transformers.

    Items are encoded one by one, so that the bits of an encoding do not depend on what else is encoded.

    Attributes:
        tower: transformers' model without its language model, with a method `initialize_weights`.
        largest: a picture that takes about as much memory as any; None: the model's geometry tells.
        audio: how it encodes audio; None: it does not.
    """

    derived_from_weights = ("_token_rows",)  # made when first needed
    largest: PictureItem | None = None
    audio: AudioTower | None = None
    _token_embeddings: Callable[[Any], tuple[int, Tensor]] | None = None
    _token_rows: tuple[int, Tensor] | None = None

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower = tower

    @property
    def patch_area(self) -> int:
        """Pixels of a patch."""
        size = getattr(self.tower.config.vision_config, "patch_size", _PATCH)
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

    def check(self) -> None:
        """Check that pictures can be encoded as they should; of families it is known.

        Raises:
            UnsupportedModel: they cannot.
        """

    def encode(self, item: PictureItem) -> Tensor:
        """Encode a picture: (tokens, size).

        Raises:
            PictureRefused: it cannot be encoded.
        """
        if item.encoding is None:
            return self._encoded(item)
        sample = next(self.tower.parameters())
        return torch.tensor(item.encoding, device=sample.device, dtype=sample.dtype)

    def encode_audio(self, item: AudioItem) -> Tensor:
        """Encode an item of audio: (tokens, size)."""
        if self.audio is None:
            raise TypeError(f"this {type(self).__name__} does not encode audio")
        sample = next(self.tower.parameters())
        features = torch.tensor(item.features[:, : item.columns], dtype=sample.dtype, device=sample.device)
        return self.audio.encode(self.tower, features, item)

    def with_token_rows(self, embeddings: Tensor, token_ids: Tensor) -> Tensor:
        """The embeddings (tokens, size) of tokens, with those that only the tower knows; see `Tower`."""
        if self._token_embeddings is None:
            return embeddings
        if self._token_rows is None:
            first, rows = self._token_embeddings(self.tower)
            self._token_rows = first, rows.to(embeddings.dtype)
        first, rows = self._token_rows
        places = token_ids.long() - first
        return torch.where((places >= 0)[:, None], rows[places.clamp(min=0)], embeddings)

    @property
    def audio_modules(self) -> list[nn.Module]:
        """The modules that only audio needs."""
        names = () if self.audio is None else self.audio.modules
        return [module for name in names if isinstance(module := getattr(self.tower, name), nn.Module)]

    def _encoded(self, item: PictureItem) -> Tensor:
        """Encode a picture whose encoding the client has not computed."""
        raise TypeError(f"{type(self).__name__} does not encode pictures")


class PixelEncoder(VisionEncoder):
    """Normalizes the pixels of an item, and lets a family's tower encode it."""

    def __init__(
        self,
        tower: Any,
        encode: Callable[[Any, Tensor, PictureItem], Tensor],
        normalization: Normalization | None,
        audio: AudioTower | None = None,
        token_embeddings: Callable[[Any], tuple[int, Tensor]] | None = None,
    ) -> None:
        """Make the encoder.

        Args:
            tower: see `VisionEncoder`.
            encode: see `Tower.encode`.
            normalization: of pixels.
            audio: see `VisionEncoder`.
            token_embeddings: see `Tower`.
        """
        super().__init__(tower)
        self.audio = audio
        self._token_embeddings = token_embeddings
        assert normalization is not None
        self._encode = encode
        self._normalization = normalization

    @override
    def _encoded(self, item: PictureItem) -> Tensor:
        return self._encode(self.tower, self._normalized(item), item)

    def _normalized(self, item: PictureItem) -> Tensor:
        """The pixels as the tower reads them: (images, 3, height, width)."""
        sample = next(self.tower.parameters())
        device = sample.device
        normalization = self._normalization
        dtype = torch.bfloat16 if normalization.in_bfloat16 else torch.float32
        pixels = torch.tensor(item.pixels, device=device).permute(0, 3, 1, 2).to(dtype)
        mean, std = (
            torch.tensor(values, device=device, dtype=dtype)[:, None, None]
            for values in (normalization.mean, normalization.std)
        )
        normalized = (pixels * normalization.scale - mean) / std
        return normalized.to(torch.float32 if normalization.stays_float32 else sample.dtype).contiguous()
