"""The decoder that runs every `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from quire.engine.models.distributed.group import RankGroup
from quire.engine.models.layers.inputs import ModelInputs, StepAttention, StepCrossAttention
from quire.engine.models.layers.linear import Head, Linear
from quire.engine.models.networks.audio_encoder import AudioEncoder
from quire.engine.models.networks.stack import TransformerLayer
from quire.engine.models.networks.transformer import Transformer
from quire.engine.models.networks.vision_encoder import VisionEncoder
from quire.engine.models.specs.audio import CausalConvStem
from quire.engine.models.specs.cache import CacheGroup, CacheShape
from quire.engine.models.specs.decoder import DecoderSpec
from quire.kernels.multiply import scale_in_place
from quire.kernels.softcap import softcap_in_place


class LanguageModel(Protocol):
    """The interface of a model for the model runner."""

    @property
    def caches(self) -> Mapping[int, CacheShape]:
        """The elements that each layer's KV cache holds of a token, by the layer's index; not of those with states."""

    def cache_groups(self, context_len: int) -> tuple[CacheGroup, ...]:
        """Return the groups of the whole model's layers, with the indices of those that this rank has."""

    @property
    def rope_switch(self) -> int | None:
        """Length of the longest sequence before a long rope takes other frequencies, for all of its tokens.

        None if the context is not longer, or the model has no such rope.
        """

    @property
    def lm_head(self) -> LogitsHead:
        """The head that gives logits."""

    def run(
        self,
        inputs: ModelInputs,
        attend: StepAttention,
        *,
        last_token_only: bool = False,
        cross: StepCrossAttention | None = None,
    ) -> Tensor:
        """Hidden states after the final norm.

        Args:
            inputs: the tokens of a step.
            attend: the step's attention.
            last_token_only: compute only the rows `inputs.logits_indices`, where it is not None.
            cross: the step's cross-attention, of a model that has it.

        Returns:
            (tokens, hidden), or (len(logits_indices), hidden).
        """

    def set_context(self, context_len: int) -> None:
        """Set the length of the longest sequence."""


class LogitsHead(Protocol):
    """Logits of hidden states: a projection, then scale and softcap.

    Attributes:
        vocab_size: tokens that have logits.
    """

    vocab_size: int

    def logits(self, hidden: Tensor, *, rows: Tensor | slice | None = None, out: Tensor | None = None) -> Tensor:
        """Return logits.

        Args:
            hidden: the result of the model's last run, (tokens, hidden).
            rows: rows of `hidden` whose logits are wanted; None for all.
            out: memory for the result.

        Returns:
            (rows, vocab) float32.
        """


class LMHead(nn.Module):
    """The output projection of a decoder; see `LogitsHead`."""

    def __init__(self, spec: DecoderSpec, linear: Linear) -> None:
        super().__init__()
        self.vocab_size = spec.vocab
        self._scale, self._softcap = spec.logit_scale, spec.logit_softcap
        self._linear = (linear,)  # in a tuple: it is registered with the decoder, under the checkpoint's name

    def logits(self, hidden: Tensor, *, rows: Tensor | slice | None = None, out: Tensor | None = None) -> Tensor:
        """See `LogitsHead`."""
        hidden = hidden if rows is None else hidden[rows]
        logits: Tensor = self._linear[0](hidden, out_dtype=torch.float32, out=out)
        if self._scale != 1.0:
            scale_in_place(logits, self._scale)
        if self._softcap is not None:
            softcap_in_place(logits, self._softcap)
        return logits


class Decoder(Transformer):
    """A transformer with a cache and an output projection.

    Attributes:
        vision: the encoder of pictures; None: the model does not read any.
    """

    lm_head: LogitsHead

    def __init__(self, spec: DecoderSpec, group: RankGroup | None = None) -> None:
        """`group`: see `Transformer`."""
        head = Head(spec.hidden, spec.vocab, bias=spec.head_bias)
        super().__init__(spec, head if spec.tied else None, group)
        self.head = head
        self.lm_head = LMHead(spec, head)
        shapes = [layer.attn.cache_shape() for layer in spec.layers]
        self.caches: Mapping[int, CacheShape] = {
            index: shape for index, shape in enumerate(shapes) if shape is not None
        }
        self.encoder = None if spec.encoder is None else AudioEncoder(spec.encoder)
        self.vision: VisionEncoder | None = None

    @override
    def _with_token_rows(self, embedded: Tensor, inputs: ModelInputs) -> Tensor:
        return embedded if self.vision is None else self.vision.with_token_rows(embedded, inputs.token_ids)

    def cache_groups(self, context_len: int) -> tuple[CacheGroup, ...]:
        assert isinstance(self.spec, DecoderSpec)
        groups = self.spec.cache_groups(context_len)
        if self.encoder is None or not isinstance(self.encoder.spec.stem, CausalConvStem):
            return groups
        state = self.encoder.spec.stem.state(self.encoder.spec.hidden, self.encoder.state_dtype)
        return (*groups, CacheGroup(state, (self.stem_state,)))

    @property
    def stem_state(self) -> int:
        """The index of the state of the encoder's stem, if audio arrives in pieces: behind those of the layers."""
        return len(self.layers)

    def cross_keys_and_values(self, encoded: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Index, keys and values of each layer with cross-attention; see `CrossAttentionLayer.keys_and_values`."""
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, TransformerLayer)
            if layer.cross is not None:
                yield index, *layer.cross.keys_and_values(encoded)
