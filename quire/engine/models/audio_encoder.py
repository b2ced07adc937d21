"""The encoder that runs every `AudioEncoderSpec`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.engine.models.inputs import Attend
from quire.engine.models.layers.stem import ConvStemLayer
from quire.engine.models.layers.step import StepContext
from quire.engine.models.spec import AudioEncoderSpec
from quire.engine.models.stack import LayerStack
from quire.kernels.add_scaled import add_scaled


class AudioEncoder(LayerStack):
    """Stem, positions, layers; items lie one behind the other without padding."""

    def __init__(self, spec: AudioEncoderSpec) -> None:
        super().__init__(spec)
        self.stem = ConvStemLayer(spec.stem, spec.hidden)
        self.positions = nn.Parameter(torch.empty(spec.max_positions, spec.hidden), requires_grad=False)

    def run(self, items: Sequence[Tensor], attend: Attend, cu_seqlens: Tensor) -> Tensor:
        """Encode items.

        Args:
            items: features (channels, columns) of each, in the dtype of the parameters.
            attend: attention within each item.
            cu_seqlens: see `ModelInputs`.

        Returns:
            (positions of all items, hidden)
        """
        parts = [self.stem(features) for features in items]
        parts = [add_scaled(part, self.positions[: len(part)]) for part in parts]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.run_layers(x, StepContext({}, attend, cu_seqlens=cu_seqlens))
