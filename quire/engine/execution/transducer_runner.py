"""The runner of transducers: encodes pieces of audio, and generates the tokens of their frames (RNN-T, Graves 2012)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.client.protocol import TokenLogprobs
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.streaming import TransducerInfo
from quire.engine.execution.attention.varlen import VarlenAttention
from quire.engine.execution.executor import Runner
from quire.engine.models.networks.transducer import EncoderState, Piece, PredictionState, TransducerModel
from quire.engine.scheduling.plan import (
    NOT_FINITE,
    EncodedAudio,
    SampledTokens,
    SequenceError,
    StepPlan,
    StepResult,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    """The state of one sequence.

    Attributes:
        encoder, prediction: states behind the audio so far.
        logprobs: log-probabilities of tokens are reported.
    """

    encoder: EncoderState
    prediction: PredictionState
    logprobs: bool


@dataclass(slots=True)
class _Decoding:
    """The tokens of one sequence in a step.

    Attributes:
        encoded: (frames, hidden).
        frame: index of the frame that the next token belongs to.
        symbols: number of its tokens so far.
        tokens, logprobs: tokens so far, with blanks, and their log-probabilities.
    """

    encoded: Tensor
    frame: int
    symbols: int
    tokens: list[int]
    logprobs: list[float]

    @property
    def left(self) -> int:
        """Number of frames whose tokens are not complete."""
        return len(self.encoded) - self.frame


class TransducerRunner(Runner):
    """Run a transducer. States have a fixed size, and change only if a step succeeds."""

    def __init__(self, model: TransducerModel, info: TransducerInfo) -> None:
        self.model = model
        self._info = info
        self._streams: dict[str, _Stream] = {}
        self._start: tuple[EncoderState, PredictionState] | None = None  # of every sequence: states are immutable

    @property
    def streams(self) -> int:
        """Number of sequences with a state."""
        return len(self._streams)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        for name in plan.removed:
            del self._streams[name]
        for new in plan.new:
            assert isinstance(new.params, SamplingParams)
            self._streams[new.request_id] = _Stream(*self._initial(), new.params.logprobs is not None)
        result = StepResult()
        if not plan.audio:
            return result
        try:
            self._run(plan.audio, result)
        except Exception:  # error boundary: only the sequences for which it fails alone end
            logger.exception("a step failed; its sequences are computed one by one")
            for audio in plan.audio:
                self._run_alone(audio, result)
        return result

    def check(self) -> None:
        """Assert that states do not grow."""
        for name, stream in self._streams.items():
            for state, layer in zip(stream.encoder.layers, self._initial()[0].layers, strict=True):
                assert state.keys.shape == layer.keys.shape, f"the state of {name} has another size"
                assert state.columns.shape == layer.columns.shape, f"the state of {name} has another size"

    def close(self) -> None:
        """Release all states."""
        self._streams.clear()

    @torch.inference_mode()
    def _initial(self) -> tuple[EncoderState, PredictionState]:
        """The states of a sequence without audio; the prediction network has read the blank."""
        if self._start is None:
            blank = torch.tensor([self._info.blank_token], device=self.model.encoder.sample.device)
            read = self.model.predict(blank, _stacked([self.model.start_prediction()]))
            self._start = self.model.start_encoder(), _row(read, 0)
        return self._start

    def _run_alone(self, audio: EncodedAudio, result: StepResult) -> None:
        try:
            self._run([audio], result)
        except Exception as error:  # error boundary: only this sequence fails
            logger.exception("the model failed for request %s", audio.request_id)
            result.errors[audio.request_id] = SequenceError(f"the model failed: {type(error).__name__}: {error}")

    def _run(self, audio: Sequence[EncodedAudio], result: StepResult) -> None:
        """Compute pieces of different sequences together. If that fails, nothing has changed."""
        like = self.model.encoder.sample
        streams = [self._streams[piece.request_id] for piece in audio]
        pieces = [
            Piece(torch.tensor(piece.features, dtype=like.dtype, device=like.device), stream.encoder, piece.last)
            for piece, stream in zip(audio, streams, strict=True)
        ]
        encoded, encoders = self.model.encode(pieces, VarlenAttention(torch.zeros(1, dtype=torch.int64)))
        decodings = [_Decoding(frames, 0, 0, [], []) for frames in encoded]
        predictions = self._decode(decodings, [stream.prediction for stream in streams])
        for stream, encoder, prediction in zip(streams, encoders, predictions, strict=True):
            stream.encoder, stream.prediction = encoder, prediction
        for piece, decoding, stream in zip(audio, decodings, streams, strict=True):
            if all(map(math.isfinite, decoding.logprobs)):
                logprobs = _logprobs(decoding) if stream.logprobs else None
                result.sampled.append(SampledTokens(piece.request_id, decoding.tokens, logprobs))
            else:
                result.errors[piece.request_id] = NOT_FINITE

    def _decode(self, decodings: list[_Decoding], before: list[PredictionState]) -> list[PredictionState]:
        """Generate the tokens of frames; returns the states behind them.

        The prediction network advances only after a token that is not the blank. So all frames up to it are computed
        with the same output of that network, at once for all sequences.
        """
        state = _stacked(before)
        while active := [index for index, decoding in enumerate(decodings) if decoding.left]:
            counts = torch.tensor([decodings[index].left for index in active])
            rows = torch.tensor(active).repeat_interleave(counts).to(state.output.device)
            encoded = torch.cat([decodings[index].encoded[decodings[index].frame :] for index in active])
            logits = self.model.logits(encoded, state.output[rows])
            best = logits.argmax(-1, keepdim=True)
            tokens, logprobs = best[:, 0].tolist(), logits.log_softmax(-1).gather(1, best)[:, 0].tolist()
            begin, advancing, chosen = 0, [], []
            for index, count in zip(active, counts.tolist(), strict=True):
                token = self._take(decodings[index], tokens[begin : begin + count], logprobs[begin : begin + count])
                begin += count
                if token is not None:
                    advancing.append(index)
                    chosen.append(token)
            if advancing:
                changed = torch.tensor(advancing, device=state.output.device)
                old = PredictionState(state.hidden[changed], state.cell[changed], state.output[changed])
                new = self.model.predict(torch.tensor(chosen, device=changed.device), old)
                state.hidden[changed], state.cell[changed], state.output[changed] = new.hidden, new.cell, new.output
        return [_row(state, index) for index in range(len(decodings))]

    def _take(self, decoding: _Decoding, tokens: list[int], logprobs: list[float]) -> int | None:
        """Append the tokens of frames up to the first one that is not the blank, which is returned, if there is one."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            decoding.tokens.append(token)
            decoding.logprobs.append(logprob)
            is_blank = token == self._info.blank_token
            decoding.symbols += not is_blank
            if is_blank or decoding.symbols == self._info.max_symbols:
                decoding.frame += 1
                decoding.symbols = 0
            if not is_blank:
                return token
        return None


def _logprobs(decoding: _Decoding) -> list[TokenLogprobs]:
    """Log-probabilities of tokens, each the most likely one."""
    return [TokenLogprobs([t], [p], [1]) for t, p in zip(decoding.tokens, decoding.logprobs, strict=True)]


def _stacked(states: Sequence[PredictionState]) -> PredictionState:
    """States of several sequences as one, in new tensors."""
    return PredictionState(
        torch.stack([state.hidden for state in states]),
        torch.stack([state.cell for state in states]),
        torch.stack([state.output for state in states]),
    )


def _row(states: PredictionState, index: int) -> PredictionState:
    """The state of one of several sequences, in new tensors: a view would keep all of them."""
    return PredictionState(states.hidden[index].clone(), states.cell[index].clone(), states.output[index].clone())
