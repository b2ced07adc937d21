"""The encoder that runs every `EncoderSpec`."""

from __future__ import annotations

from quire.engine.models.spec import EncoderSpec
from quire.engine.models.transformer import Transformer


class Encoder(Transformer):
    """A transformer without a cache, whose tokens attend in both directions."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__(spec)
