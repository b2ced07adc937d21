"""Encoders of text: the one that runs every `EncoderSpec`, and what it has in common with those of transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from quire.engine.models.layers.heads import PoolerHeads
from quire.engine.models.layers.inputs import ModelInputs, StepAttention
from quire.engine.models.networks.transformer import Transformer
from quire.engine.models.specs.decoder import EncoderSpec


class TextEncoder(ABC):
    """What a runner of encoders needs of a model."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Elements of a hidden state."""

    @property
    @abstractmethod
    def token_types(self) -> int:
        """Number of types of tokens; 0 if the model knows none."""

    @property
    @abstractmethod
    def pooler_heads(self) -> PoolerHeads:
        """The heads behind the model."""

    @abstractmethod
    def set_context(self, context_len: int) -> None:
        """Prepare for texts of so many tokens."""

    @abstractmethod
    def encode(self, inputs: ModelInputs, attend: StepAttention) -> Sequence[Tensor]:
        """What the pooler reads of each text: a row for each token, or a single one."""


class Encoder(Transformer, TextEncoder):
    """A transformer without a cache, whose tokens attend in both directions."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__(spec)

    @property
    @override
    def token_types(self) -> int:
        return self.spec.embeddings.types

    @override
    def encode(self, inputs: ModelInputs, attend: StepAttention) -> Sequence[Tensor]:
        assert inputs.cu_seqlens is not None
        hidden: Sequence[Tensor] = self.run(inputs, attend).split(inputs.cu_seqlens.diff().tolist())
        return hidden
