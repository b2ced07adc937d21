"""Models that transcribe audio in pieces, with a prediction network over the text so far (RNN-T)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.layers.embedding import Embedding
from quire.engine.models.layers.inputs import StepAttention, StepStates
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.lstm import LSTM
from quire.engine.models.layers.stem import CausalConv2dStemLayer
from quire.engine.models.networks.audio_encoder import AudioEncoder
from quire.engine.models.specs.audio import ChunkedAttention
from quire.engine.models.specs.cache import CacheGroup, group_layers
from quire.engine.models.specs.decoder import TransducerSpec
from quire.kernels.activation import activation


class PredictionState(NamedTuple):
    """The states of the prediction network of several sequences: the arrays of `TransducerSpec.prediction_state`.

    Attributes:
        hidden, cell: (rows, layers, size).
        output: (rows, size), of the network.
    """

    hidden: Tensor
    cell: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of a sequence.

    Attributes:
        features: (bands, columns).
        start: number of positions before it.
        last: no audio follows. Otherwise whole chunks of positions become complete.
    """

    features: Tensor
    start: int
    last: bool


class TransducerModel(nn.Module):
    """Encoder, prediction network and joint network; see `TransducerSpec`."""

    def __init__(self, spec: TransducerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = AudioEncoder(spec.encoder)
        self.embedding = Embedding(spec.vocab, spec.hidden)
        self.lstm = LSTM(spec.hidden, spec.lstm_layers)
        self.predicted = Linear(spec.hidden, spec.hidden, bias=True)
        self.head = Linear(spec.hidden, spec.vocab, bias=True)

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Return what is kept of a sequence; the layers of the groups are indices of `TransducerSpec.states`."""
        return group_layers(self.spec.states(self.encoder.state_dtype), 0)

    def encode(self, pieces: Sequence[Piece], states: StepStates, attend: StepAttention) -> list[Tensor]:
        """Encode pieces of different sequences together.

        Args:
            pieces: the next piece of each.
            states: those of the same sequences.
            attend: not called: the layers attend to their states.

        Returns:
            For each piece (positions, hidden).
        """
        embedded = self._embedded(pieces, states)
        lengths = [len(x) for x in embedded]
        filled = [F.pad(x, (0, 0, 0, -len(x) % self.spec.chunk)) for x in embedded]
        offsets = torch.tensor([0, *map(len, filled)]).cumsum(0)
        mask = self._chunk_mask(pieces, lengths)
        encoded = self.encoder.run(filled, attend, offsets, states=states, chunk_mask=mask)
        return [part[:length] for part, length in zip(encoded, lengths, strict=True)]

    def _embedded(self, pieces: Sequence[Piece], states: StepStates) -> list[Tensor]:
        """The input of the encoder's layers for each piece: (positions, hidden)."""
        stem, index = self.encoder.stem, self.spec.stem_state
        assert isinstance(stem, CausalConv2dStemLayer)
        embedded, after = [], []
        for piece, *before in zip(pieces, *states.read(index), strict=True):
            x, state = stem(piece.features, before, first=not piece.start, last=piece.last)
            embedded.append(x)
            after.append(state)
        states.write(index, [torch.stack(arrays) for arrays in zip(*after, strict=True)])
        return embedded

    def predict(self, tokens: Tensor, state: PredictionState) -> PredictionState:
        """Append a token to each of several sequences. tokens: (rows,) int64; the state has rows."""
        out, hidden, cell = self.lstm(self.embedding(tokens), state.hidden, state.cell)
        return PredictionState(hidden, cell, self.predicted(out))

    def logits(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Logits (rows, vocab) float32 of positions (rows, hidden) and outputs of the prediction network."""
        joined = activation(encoded + predicted, self.spec.act, in_place=True)
        logits: Tensor = self.head(joined, out_dtype=torch.float32)
        return logits

    def _chunk_mask(self, pieces: Sequence[Piece], lengths: Sequence[int]) -> Tensor:
        """Which positions of the window of each chunk exist; see `StepContext`."""
        attn = self.spec.encoder.layers[0].attn
        assert isinstance(attn, ChunkedAttention)
        size, past = self.spec.chunk, attn.past
        firsts, ends = [], []
        for piece, length in zip(pieces, lengths, strict=True):
            chunks = -(-length // size)
            firsts += [piece.start + chunk * size - past for chunk in range(chunks)]
            ends += [piece.start + length] * chunks
        positions = torch.tensor(firsts)[:, None] + torch.arange(past + size)
        return ((positions >= 0) & (positions < torch.tensor(ends)[:, None])).to(self.encoder.sample.device)
