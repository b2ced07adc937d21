"""Finds where somebody speaks, in audio that arrives in pieces of any size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.multimodal.audio.features import SAMPLE_RATE
from quire.multimodal.audio.silero import CONTEXT, FRAME, STATE, network

_HYSTERESIS = 0.15  # below the threshold, at which speech goes on
_ONSET_FRAMES = 2  # in a row, before speech has begun: a click is one
_TAIL_MS = 100  # added to the end of speech: fading sounds
_BATCH = 256  # frames that are encoded at once


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Speech has begun; `at_sample` is before it, by the prefix padding."""

    at_sample: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """Speech has ended `silence_duration_ms` ago; `at_sample` is where it did, with the tail added."""

    at_sample: int


SpeechEvent = SpeechStarted | SpeechStopped


class VoiceActivity:
    """The detector of one stream. Events do not depend on how the audio is divided into pieces.

    An event is found at the end of a frame of 32 ms: the start of speech two frames after its onset, its end
    `silence_duration_ms` after it.

    Attributes:
        speaking: speech has started and not stopped.
        position: samples that were pushed.
    """

    def __init__(
        self,
        sample_rate: int = SAMPLE_RATE,
        threshold: float = 0.5,
        prefix_padding_ms: int = 300,
        silence_duration_ms: int = 500,
        tail_ms: int = _TAIL_MS,
    ) -> None:
        """A detector at the start of a stream.

        Args:
            sample_rate: 16,000.
            threshold: probability of speech from which on a frame counts as speech, 0 to 1.
            prefix_padding_ms: audio before the onset that counts as speech, in milliseconds.
            silence_duration_ms: silence that ends speech, in milliseconds.
            tail_ms: audio behind the end that counts as speech, in milliseconds.

        Raises:
            ValueError: of another sample rate.
        """
        if sample_rate != SAMPLE_RATE:
            raise ValueError(f"voice activity is found at {SAMPLE_RATE} samples per second, not {sample_rate}")
        self._network = network()
        self._threshold = threshold
        self._padding = prefix_padding_ms * SAMPLE_RATE // 1000
        self._silence = silence_duration_ms * SAMPLE_RATE // 1000
        self._tail = tail_ms * SAMPLE_RATE // 1000
        self._hidden = np.zeros(STATE, np.float32)
        self._cell = np.zeros(STATE, np.float32)
        self._pending = np.zeros(CONTEXT, np.float32)  # the context of the next frame, and what there is of it
        self.speaking = False
        self.position = 0
        self._judged = 0  # samples in frames that were looked at
        self._onset: int | None = None  # of speech that may have begun
        self._voiced_until = 0  # end of the last frame with speech
        self._stopped_at = 0

    def push(self, samples: NDArray[np.float32]) -> list[SpeechEvent]:
        """Take further samples, 1-D in [-1, 1], and return what they have shown."""
        self.position += len(samples)
        audio = np.concatenate([self._pending, np.asarray(samples, np.float32)])
        events: list[SpeechEvent] = []
        start = 0
        while len(audio) - start >= CONTEXT + FRAME:
            # One by one: the bits of a product may depend on how many rows it has.
            encoded = self._network.encode(audio[None, start : start + CONTEXT + FRAME])[0]
            self._judge(encoded, events)
            start += FRAME
        self._pending = audio[start:].copy()
        return events

    def push_all(self, samples: NDArray[np.float32]) -> list[SpeechEvent]:
        """Read audio like `push`, several times as fast for long audio; a probability may differ in its last bits."""
        self.position += len(samples)
        audio = np.concatenate([self._pending, np.asarray(samples, np.float32)])
        events: list[SpeechEvent] = []
        count = (len(audio) - CONTEXT) // FRAME
        if count:
            frames = np.lib.stride_tricks.sliding_window_view(audio, CONTEXT + FRAME)[::FRAME]
            for start in range(0, count, _BATCH):
                for encoded in self._network.encode(frames[start : start + _BATCH]):
                    self._judge(encoded, events)
        self._pending = audio[count * FRAME :].copy()
        return events

    def finish(self) -> list[SpeechEvent]:
        """The end of speech that goes on at the end of the stream."""
        if not self.speaking:
            return []
        self.speaking = False
        return [SpeechStopped(min(self._voiced_until + self._tail, self.position))]

    def _judge(self, encoded: NDArray[np.float32], events: list[SpeechEvent]) -> None:
        probability, self._hidden, self._cell = self._network.step(encoded, self._hidden, self._cell)
        begin = self._judged
        self._judged = end = begin + FRAME
        if self.speaking:
            if probability >= self._threshold - _HYSTERESIS:
                self._voiced_until = end
            elif end - self._voiced_until >= self._silence:
                self.speaking = False
                self._stopped_at = self._voiced_until + min(self._tail, self._silence)
                events.append(SpeechStopped(self._stopped_at))
            return
        if probability < self._threshold:
            self._onset = None
            return
        if self._onset is None:
            self._onset = begin
        if end - self._onset >= _ONSET_FRAMES * FRAME:
            events.append(SpeechStarted(max(self._onset - self._padding, self._stopped_at)))
            self.speaking = True
            self._voiced_until = end
            self._onset = None


def find_speech(
    samples: NDArray[np.float32],
    threshold: float = 0.5,
    prefix_padding_ms: int = 300,
    silence_duration_ms: int = 500,
    tail_ms: int = _TAIL_MS,
) -> list[tuple[int, int]]:
    """Start and end, in samples, of each stretch of speech in a whole audio file, found by `VoiceActivity`."""
    detector = VoiceActivity(SAMPLE_RATE, threshold, prefix_padding_ms, silence_duration_ms, tail_ms)
    step = _BATCH * FRAME  # in pieces: each is copied
    pieces = (samples[start : start + step] for start in range(0, len(samples), step))
    events = [*(event for piece in pieces for event in detector.push_all(piece)), *detector.finish()]
    return [(start.at_sample, end.at_sample) for start, end in zip(events[::2], events[1::2], strict=True)]
