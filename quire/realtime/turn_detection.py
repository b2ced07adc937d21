"""Turn detection: where utterances begin and end in the audio of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.multimodal.audio.cuts import SEARCH_SECONDS, last_pause
from quire.multimodal.audio.voice_activity import SpeechEvent, SpeechStarted, VoiceActivity
from quire.realtime.audio import RATE, Samples, to_float
from quire.realtime.errors import EventError
from quire.realtime.settings import TurnDetection

_SMALLEST = RATE  # samples
_KEPT_SECONDS = 2.0  # beyond the prefix padding: how much later than it began speech may be noticed
_LONGEST_SECONDS = 30.0  # of an utterance; then it is cut
_SHORTEST_SECONDS = 0.1  # of audio that a client commits, as with OpenAI
_GATE = RATE // 50  # samples that the noise floor is compared with


class AudioBuffer:
    """Samples from `start` to `end`, counted from the beginning of the session. It grows as its user needs it."""

    def __init__(self) -> None:
        self._data: Samples = np.empty(_SMALLEST, np.int16)
        self._first = 0  # index of `start` in `_data`
        self.start = self.end = 0

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self._data.nbytes

    def append(self, samples: Samples) -> None:
        """Add samples at the end."""
        self._make_room(len(samples))
        at = self._first + len(self)
        self._data[at : at + len(samples)] = samples
        self.end += len(samples)

    def drop_before(self, position: int) -> None:
        """Forget what lies before a position."""
        dropped = min(max(position - self.start, 0), len(self))
        self._first += dropped
        self.start += dropped

    def copy(self, start: int, end: int) -> Samples:
        """The samples of a range, as far as they are there."""
        first = self._first - self.start
        return self._data[first + max(start, self.start) : first + max(min(end, self.end), self.start)].copy()

    def _make_room(self, count: int) -> None:
        needed = len(self) + count
        if self._first + needed <= len(self._data):
            return
        capacity = max(_SMALLEST, 1 << (2 * needed - 1).bit_length() - 1)  # the power of two from `needed` up
        data = self._data
        if capacity != len(data) or 2 * needed > len(data):
            data = np.empty(max(capacity, needed), np.int16)
        data[: len(self)] = self._data[self._first : self._first + len(self)]
        self._data = data
        self._first = 0


@dataclass(frozen=True, slots=True)
class UtteranceStarted:
    """Speech has begun, `start` samples after the session did."""

    start: int


@dataclass(frozen=True, slots=True)
class UtteranceEnded:
    """The utterance has ended.

    Attributes:
        audio: all of it.
        start, end: positions in samples since the beginning of the session.
        by_voice_activity: voice activity detection ended it, not a commit of the client.
    """

    audio: Samples
    start: int
    end: int
    by_voice_activity: bool


class SpeechDetector(Protocol):
    """A detector of speech with state. Positions are counted from its own first sample."""

    def push(self, samples: NDArray[np.float32]) -> list[SpeechEvent]:
        """Take further samples and return what was noticed, with padding included."""


SpeechDetectorOf = Callable[[TurnDetection], SpeechDetector]


def voice_activity(detection: TurnDetection) -> SpeechDetector:
    """The detector with these settings."""
    return VoiceActivity(RATE, detection.threshold, detection.prefix_padding_ms, detection.silence_duration_ms)


class TurnDetector:
    """Cut a session's audio into utterances: by voice activity, or where the client commits.

    Attributes:
        speaking_since: start of the current utterance in samples; None outside of utterances.
    """

    def __init__(self, detection: TurnDetection | None, detector_of: SpeechDetectorOf, max_seconds: float) -> None:
        """`max_seconds`: how much audio may wait for the client's commit."""
        self._activity_of = detector_of
        self._max_samples = int(max_seconds * RATE)
        self._buffer = AudioBuffer()
        self.speaking_since: int | None = None
        self._ignored_before = 0  # audio that was committed or cleared; no utterance begins in it
        self.detect(detection)

    @property
    def position(self) -> int:
        """Samples of the session so far."""
        return self._buffer.end

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the audio takes."""
        return self._buffer.nbytes

    @property
    def automatic(self) -> bool:
        """Whether voice activity ends utterances."""
        return self._activity is not None

    def detect(self, detection: TurnDetection | None) -> None:
        """Change the settings; an utterance that has begun continues."""
        self._detection = detection
        self._activity = None if detection is None else self._activity_of(detection)
        self._origin = self.position  # of the activity's positions

    def check_room(self, seconds: float) -> None:
        """Refuse audio that there is no room for.

        Raises:
            EventError: the client has not committed for too long.
        """
        if not self.automatic and len(self._buffer) + seconds * RATE > self._max_samples:
            raise EventError(
                f"The audio buffer holds at most {self._max_samples / RATE:g} s of audio that is not committed; "
                "commit or clear it first.",
                "input_audio_buffer_full",
                "audio",
            )

    def push(
        self, samples: Samples, streaming_seconds: float | None = None
    ) -> Iterator[UtteranceStarted | UtteranceEnded]:
        """Add audio; returns what happened in it, in order.

        Args:
            samples: further audio.
            streaming_seconds: longest utterance of a `StreamingTranscriber`, which is split at its end, as the model
                has read all of it. None: utterances are transcribed as a whole, and long ones split in a pause.
        """
        self._buffer.append(samples)
        if self._activity is None:
            return
        for event in self._activity.push(self._gated(to_float(samples))):
            at = self._origin + event.at_sample
            if isinstance(event, SpeechStarted):
                if self.speaking_since is None:
                    yield self._begin(at)
            elif self.speaking_since is not None:
                yield self._end(at, by_voice_activity=True)
        longest = int((_LONGEST_SECONDS if streaming_seconds is None else streaming_seconds) * RATE)
        while self.speaking_since is not None and self.position - self.speaking_since >= longest:
            cut = self._last_pause(self.speaking_since + longest) if streaming_seconds is None else self.position
            yield self._end(cut, by_voice_activity=True)
            yield self._begin(cut)
        if self.speaking_since is None:
            self._keep_tail()

    def current(self, index: int = 0) -> Samples:
        """The samples from `index` on of the utterance so far; without voice activity, of the uncommitted audio."""
        start = self._buffer.start if self.speaking_since is None else self.speaking_since
        return self._buffer.copy(start + index, self.position)

    def commit(self) -> UtteranceEnded:
        """End the utterance now.

        Raises:
            EventError: there is none, or it is shorter than models can use.
        """
        start = self.speaking_since
        if start is None:
            if self.automatic:
                raise EventError("There is no speech in the audio buffer.", "input_audio_buffer_commit_empty")
            start = max(self._buffer.start, self._ignored_before)
        seconds = (self.position - start) / RATE
        if seconds < _SHORTEST_SECONDS:
            raise EventError(
                f"The audio buffer is too small: it holds {1000 * seconds:.0f} ms of audio, and at least "
                f"{1000 * _SHORTEST_SECONDS:.0f} ms are required.",
                "input_audio_buffer_commit_empty",
            )
        self.speaking_since = start
        ended = self._end(self.position, by_voice_activity=False)
        self.detect(self._detection)
        return ended

    def finish(self) -> UtteranceEnded:
        """End the utterance that has begun, however short it is."""
        ended = self._end(self.position, by_voice_activity=True)
        self.detect(self._detection)
        return ended

    def clear(self) -> None:
        """Forget all audio that has not been committed."""
        self.speaking_since = None
        self._ignored_before = self.position
        self._buffer.drop_before(self.position)
        self.detect(self._detection)

    def _begin(self, at: int) -> UtteranceStarted:
        self.speaking_since = max(at, self._buffer.start, self._ignored_before)
        return UtteranceStarted(self.speaking_since)

    def _end(self, at: int, *, by_voice_activity: bool) -> UtteranceEnded:
        assert self.speaking_since is not None
        start = self.speaking_since
        end = min(max(at, start + int(_SHORTEST_SECONDS * RATE)), self.position)
        self.speaking_since = None
        self._ignored_before = end
        audio = self._buffer.copy(start, end)
        self._buffer.drop_before(end)
        return UtteranceEnded(audio, start, end, by_voice_activity)

    def _keep_tail(self) -> None:
        assert self._detection is not None
        tail = int((self._detection.prefix_padding_ms / 1000 + _KEPT_SECONDS) * RATE)
        self._buffer.drop_before(self.position - tail)

    def _last_pause(self, end: int) -> int:
        """Return where to cut an utterance that should end before `end`."""
        start = end - int(SEARCH_SECONDS * RATE)
        return start + last_pause(to_float(self._buffer.copy(start, end)))

    def _gated(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The samples for voice activity: what is below the noise floor is silence to it."""
        assert self._detection is not None
        if self._detection.noise_floor is None:
            return samples
        padded = np.zeros(-(-len(samples) // _GATE) * _GATE, np.float32)
        padded[: len(samples)] = samples
        frames = padded.reshape(-1, _GATE)
        frames[np.square(frames).mean(axis=1) < 10 ** (self._detection.noise_floor / 10)] = 0
        return padded[: len(samples)]
