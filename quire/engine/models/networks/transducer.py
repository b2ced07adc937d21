"""Models that transcribe audio in pieces, with a prediction network over the text so far (RNN-T)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.engine.models.layers.embedding import Embedding
from quire.engine.models.layers.inputs import StepAttention
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.lstm import LSTM
from quire.engine.models.layers.pieces import LayerState, Pieces
from quire.engine.models.layers.stem import CausalConv2dStemLayer
from quire.engine.models.networks.audio_encoder import AudioEncoder
from quire.engine.models.specs.audio import ChunkedAttention, TimeConv
from quire.engine.models.specs.decoder import ConformerLayer, TransducerSpec
from quire.kernels.activation import activation


@dataclass(frozen=True, slots=True)
class EncoderState:
    """The state of the encoder of a sequence, of a fixed size.

    Attributes:
        stem: see `CausalConv2dStemLayer.start`.
        layers: state of each layer.
        positions: number of positions before.
    """

    stem: Sequence[Tensor]
    layers: Sequence[LayerState]
    positions: int = 0


@dataclass(frozen=True, slots=True)
class PredictionState:
    """The state of the prediction network, of one sequence or (with a first dimension) several.

    Attributes:
        hidden, cell: (layers, size).
        output: (size,), of the network.
    """

    hidden: Tensor
    cell: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of a sequence.

    Attributes:
        features: (bands, columns).
        state: state of the encoder before it.
        last: no audio follows. Otherwise whole chunks of positions become complete.
    """

    features: Tensor
    state: EncoderState
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

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence, for the dtype of the model."""
        state, prediction = self.start_encoder(), self.start_prediction()
        tensors = [*state.stem, prediction.hidden, prediction.cell, prediction.output]
        for layer in state.layers:
            tensors += [layer.keys, layer.values, layer.columns]
        return sum(tensor.nbytes for tensor in tensors)

    def start_encoder(self) -> EncoderState:
        """The state of the encoder before the first piece."""
        like, layers = self.encoder.sample, []
        for layer in self.spec.encoder.layers:
            attn, conv = _conformer(layer)
            nothing = like.new_zeros(attn.heads, attn.past, attn.head_dim)
            layers.append(LayerState(nothing, nothing, like.new_zeros(conv.kernel - 1, conv.size)))
        return EncoderState(self._stem.start(like), layers)

    def start_prediction(self) -> PredictionState:
        """The state of the prediction network of a sequence before its first step."""
        zeros = self.encoder.sample.new_zeros(self.spec.lstm_layers, self.spec.hidden)
        return PredictionState(zeros, zeros, zeros[0])

    def encode(self, pieces: Sequence[Piece], attend: StepAttention) -> tuple[list[Tensor], list[EncoderState]]:
        """Encode pieces of different sequences together.

        Args:
            pieces: the next piece of each.
            attend: not called: attention is that of `Pieces`.

        Returns:
            For each piece (positions, hidden), and the state behind it.
        """
        size = self.spec.chunk
        embedded, stems = [], []
        for piece in pieces:
            x, stem = self._stem(piece.features, piece.state.stem, last=piece.last)
            embedded.append(x)
            stems.append(stem)
        lengths = [len(x) for x in embedded]
        filled = [F.pad(x, (0, 0, 0, -len(x) % size)) for x in embedded]
        offsets = torch.tensor([0, *map(len, filled)]).cumsum(0)
        step = Pieces([piece.state.layers for piece in pieces], self._valid(pieces, lengths))
        encoded = self.encoder.run(filled, attend, offsets, pieces=step)
        states = [
            EncoderState(stem, layers, piece.state.positions + length)
            for piece, length, stem, layers in zip(pieces, lengths, stems, step.after(), strict=True)
        ]
        return [part[:length] for part, length in zip(encoded, lengths, strict=True)], states

    def predict(self, tokens: Tensor, state: PredictionState) -> PredictionState:
        """Append a token to each of several sequences. tokens: (rows,) int64; the state has rows."""
        out, hidden, cell = self.lstm(self.embedding(tokens), state.hidden, state.cell)
        return PredictionState(hidden, cell, self.predicted(out))

    def logits(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Logits (rows, vocab) float32 of positions (rows, hidden) and outputs of the prediction network."""
        joined = activation(encoded + predicted, self.spec.act, in_place=True)
        logits: Tensor = self.head(joined, out_dtype=torch.float32)
        return logits

    @property
    def _stem(self) -> CausalConv2dStemLayer:
        stem = self.encoder.stem
        assert isinstance(stem, CausalConv2dStemLayer)
        return stem

    def _valid(self, pieces: Sequence[Piece], lengths: Sequence[int]) -> Tensor:
        """Which positions of the window of each chunk exist; see `Pieces`."""
        size, past = self.spec.chunk, _conformer(self.spec.encoder.layers[0])[0].past
        firsts, ends = [], []
        for piece, length in zip(pieces, lengths, strict=True):
            chunks = -(-length // size)
            firsts += [piece.state.positions + chunk * size - past for chunk in range(chunks)]
            ends += [piece.state.positions + length] * chunks
        positions = torch.tensor(firsts)[:, None] + torch.arange(past + size)
        return ((positions >= 0) & (positions < torch.tensor(ends)[:, None])).to(self.encoder.sample.device)


def _conformer(layer: object) -> tuple[ChunkedAttention, TimeConv]:
    assert isinstance(layer, ConformerLayer)
    assert isinstance(layer.attn, ChunkedAttention)
    return layer.attn, layer.conv
