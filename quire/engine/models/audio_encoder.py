"""The encoder that runs every `AudioEncoderSpec`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from quire.engine.models.audio_spec import ConvPositions
from quire.engine.models.inputs import Attend
from quire.engine.models.layers.conformer import sinusoids
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import LayerNorm, RMSNorm, make_norm
from quire.engine.models.layers.positions import make_positions
from quire.engine.models.layers.rope import RopeTables
from quire.engine.models.layers.stem import make_stem
from quire.engine.models.layers.step import StepContext
from quire.engine.models.spec import AudioEncoderSpec, ConformerLayer, CTCSpec, Rope
from quire.engine.models.stack import LayerStack
from quire.kernels.qk_norm_rope import CosSin


class AudioEncoder(LayerStack):
    """Stem, positions, layers; items lie one behind the other without padding."""

    def __init__(self, spec: AudioEncoderSpec) -> None:
        super().__init__(spec)
        self.spec = spec
        self.stem = make_stem(spec.stem, spec.hidden)
        self.positions = make_positions(spec.positions, spec.max_positions, spec.hidden)
        normed = isinstance(spec.positions, ConvPositions) and spec.positions.norm
        self.positions_norm = make_norm(spec.hidden, spec.norm) if normed else nn.Identity()
        self._tables: RopeTables | None = None

    @property
    def sample(self) -> Tensor:
        """A parameter that is never packed: it has the dtype and the device of features."""
        return next(module.weight for module in self.modules() if isinstance(module, LayerNorm | RMSNorm))

    def run(
        self,
        items: Sequence[Tensor],
        attend: Attend,
        cu_seqlens: Tensor,
        between_layers: Callable[[], None] | None = None,
    ) -> Tensor:
        """Encode items.

        Args:
            items: features (channels, columns) of each, in the dtype of the parameters.
            attend: attention within each item.
            cu_seqlens: see `ModelInputs`.
            between_layers: called after each layer but the last.

        Returns:
            (positions of all items, hidden)
        """
        parts = [self.positions_norm(self.positions(self.stem(features))) for features in items]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        lengths = [len(part) for part in parts]
        distances = None
        if any(isinstance(layer, ConformerLayer) for layer in self.spec.layers):
            distances = sinusoids(max(lengths), self.spec.hidden, x.dtype, x.device)
        step = StepContext(self._ropes(lengths), attend, cu_seqlens=cu_seqlens, relative_positions=distances)
        return self.run_layers(x, step, between_layers)

    def _ropes(self, lengths: Sequence[int]) -> dict[Rope, CosSin]:
        """Cosines and sines of the positions of items."""
        layers = (layer for layer in self.spec.layers if not isinstance(layer, ConformerLayer))
        ropes = {layer.attn.rope for layer in layers if layer.attn.rope is not None}
        if not ropes:
            return {}
        device = self.sample.device
        if self._tables is None:
            self._tables = RopeTables(ropes, self.spec.max_positions, None, device)
        return self._tables.at(torch.cat([torch.arange(length, device=device) for length in lengths]))


class CTCModel(nn.Module):
    """An encoder of audio and a projection; see `CTCSpec`."""

    def __init__(self, spec: CTCSpec) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = AudioEncoder(spec.encoder)
        self.head = Linear(spec.encoder.hidden, spec.vocab, bias=True)

    def run(
        self,
        items: Sequence[Tensor],
        attend: Attend,
        cu_seqlens: Tensor,
        between_layers: Callable[[], None] | None = None,
    ) -> Tensor:
        """Logits (positions of all items, vocab) float32; see `AudioEncoder.run`."""
        hidden = self.encoder.run(items, attend, cu_seqlens, between_layers)
        logits: Tensor = self.head(hidden, out_dtype=torch.float32)
        return logits
