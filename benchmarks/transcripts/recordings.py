"""Recordings of sentences, joined to long audio; where each sentence begins and ends is known by construction."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

RATE = 16_000  # samples per second
_FRAME = RATE // 50  # samples whose loudness is measured
_ABOVE_NOISE = 8.0  # decibels from which on two frames in a row are speech
_HISS = 20.0 / 32768  # standard deviation of the noise in pauses


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded sentence.

    Attributes:
        onset, offset: seconds at which speech begins and ends, by its loudness.
    """

    samples: NDArray[np.float32]
    text: str
    onset: float
    offset: float


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence in joined audio, with the seconds at which its speech begins and ends."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class JoinedSpeech:
    """Audio with sentences and pauses."""

    samples: NDArray[np.float32]
    sentences: tuple[Sentence, ...]

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return len(self.samples) / RATE

    @property
    def wav(self) -> bytes:
        """Return a file of 16-bit samples."""
        file = io.BytesIO()
        soundfile.write(file, self.samples, RATE, format="WAV", subtype="PCM_16")
        return file.getvalue()


def read_recordings(folder: Path, kinds: Sequence[str] = ("librivox",)) -> list[Recording]:
    """Read the recordings whose names begin with one of `kinds`, with what was said."""
    said = json.loads((folder / "transcripts.json").read_text())
    return [_read(folder / name, text) for name, text in sorted(said.items()) if name.startswith(tuple(kinds))]


def _read(path: Path, text: str) -> Recording:
    samples, rate = soundfile.read(path, dtype="float32")
    assert rate == RATE, f"{path} has {rate} samples per second"
    frames = samples[: len(samples) // _FRAME * _FRAME].reshape(-1, _FRAME)
    decibels = 10 * np.log10(np.square(frames, dtype=np.float64).mean(axis=1) + 1e-12)
    loud = decibels > np.percentile(decibels, 5) + _ABOVE_NOISE
    pairs = np.flatnonzero(loud[:-1] & loud[1:])
    return Recording(samples, text, float(pairs[0]) * _FRAME / RATE, float(pairs[-1] + 2) * _FRAME / RATE)


def join(
    recordings: Sequence[Recording], pauses: Sequence[float], seconds: float, *, lead: float = 0.0
) -> JoinedSpeech:
    """Join recordings, in turn, with these pauses, in turn, until the audio is at least so long.

    Args:
        recordings: sentences; the audio ends after the last one of them.
        pauses: seconds between two recordings, with a faint hiss.
        seconds: shortest duration.
        lead: seconds of the pause at the beginning.
    """
    noise = np.random.default_rng(0)
    parts, sentences, length = [_pause(lead, noise)], list[Sentence](), round(lead * RATE)
    waits: Iterator[float] = cycle(pauses)
    while length < seconds * RATE:
        for recording in recordings:
            begin = length / RATE
            sentences.append(Sentence(recording.text, begin + recording.onset, begin + recording.offset))
            parts += [recording.samples, _pause(next(waits), noise)]
            length += len(parts[-1]) + len(parts[-2])
    return JoinedSpeech(np.concatenate(parts).astype(np.float32), tuple(sentences))


def _pause(seconds: float, noise: np.random.Generator) -> NDArray[np.float32]:
    return noise.normal(scale=_HISS, size=round(seconds * RATE)).astype(np.float32)
