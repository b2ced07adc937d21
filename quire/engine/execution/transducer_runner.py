"""The runner of transducers: encodes pieces of audio, and generates the tokens of their frames (RNN-T, Graves 2012)."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.client.protocol import TokenLogprobs
from quire.engine.client.streaming import TransducerInfo
from quire.engine.execution.attention.varlen import VarlenAttention
from quire.engine.execution.executor import Runner
from quire.engine.execution.inputs import Span
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.state_slots import StateSlots
from quire.engine.execution.states import StateCaches
from quire.engine.models.networks.transducer import Piece, PredictionState, TransducerModel
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
    """Run a transducer. The states of sequences change only if a step succeeds."""

    def __init__(self, model: TransducerModel, info: TransducerInfo, slots: StateSlots, table: RequestTable) -> None:
        """`slots`: memory of the states; `table`: the sequences, without tokens."""
        self.model = model
        self._info = info
        self._table = table
        self._states = StateCaches(slots, len(table.lengths))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        self._table.apply(plan)
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
        """Assert that the request table is consistent."""
        self._table.check()
        self._states.check()

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def _run_alone(self, audio: EncodedAudio, result: StepResult) -> None:
        try:
            self._run([audio], result)
        except Exception as error:  # error boundary: only this sequence fails
            logger.exception("the model failed for request %s", audio.request_id)
            result.errors[audio.request_id] = SequenceError(f"the model failed: {type(error).__name__}: {error}")

    def _run(self, audio: Sequence[EncodedAudio], result: StepResult) -> None:
        """Compute pieces of different sequences together. If that fails, nothing has changed."""
        states, index = self._states.of_step(self._spans(audio)), self.model.spec.prediction_state
        pieces = [self._piece(piece) for piece in audio]
        encoded = self.model.encode(pieces, states, VarlenAttention(torch.zeros(1, dtype=torch.int64)))
        decodings = [_Decoding(frames, 0, 0, [], []) for frames in encoded]
        prediction = PredictionState(*states.read(index))
        beginning = [number for number, piece in enumerate(pieces) if not piece.start]
        self._advance(prediction, beginning, [self._info.blank_token] * len(beginning))
        self._decode(decodings, prediction)
        states.write(index, prediction)
        states.commit()
        rows = [self._table.row_of(piece.request_id) for piece in audio]
        for piece, decoding, params in zip(audio, decodings, self._table.params_of(rows), strict=True):
            if all(map(math.isfinite, decoding.logprobs)):
                logprobs = None if params.logprobs is None else _logprobs(decoding)
                result.sampled.append(SampledTokens(piece.request_id, decoding.tokens, logprobs))
            else:
                result.errors[piece.request_id] = NOT_FINITE

    def _spans(self, audio: Sequence[EncodedAudio]) -> list[Span]:
        """The spans of pieces, whose tokens are columns of features."""
        counts = [piece.features.shape[1] for piece in audio]
        return [
            Span(self._table.row_of(piece.request_id), end - count, piece.first, count, False, False)
            for piece, count, end in zip(audio, counts, itertools.accumulate(counts), strict=True)
        ]

    def _piece(self, audio: EncodedAudio) -> Piece:
        like, columns = self.model.encoder.sample, self._info.columns_per_frame
        # The first position needs one column, each further one as many as a frame has.
        start = -(-audio.first // columns)
        return Piece(torch.tensor(audio.features, dtype=like.dtype, device=like.device), start, audio.last)

    def _decode(self, decodings: list[_Decoding], state: PredictionState) -> None:
        """Generate the tokens of frames; the state of their sequences is then that behind them.

        The prediction network advances only after a token that is not the blank. So all frames up to it are computed
        with the same output of that network, at once for all sequences.
        """
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
            self._advance(state, advancing, chosen)

    def _advance(self, state: PredictionState, rows: list[int], tokens: list[int]) -> None:
        """Let the prediction network read a token of each of these rows."""
        if not rows:
            return
        changed = torch.tensor(rows, device=state.output.device)
        before = PredictionState(*(array[changed] for array in state))
        after = self.model.predict(torch.tensor(tokens, device=changed.device), before)
        for array, values in zip(state, after, strict=True):
            array[changed] = values

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
