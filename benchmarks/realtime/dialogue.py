"""Held-out sentences, recorded with espeak-ng, with pauses between them; and what a session is told of each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray

from training.hear.recordings import record
from training.hear.sentences import normalized

RATE = 24_000
_RECORDED = 16_000
_KINDS = ("commands", "times", "numbers", "colours", "lists")
_PAUSES = (0.9, 2.0)  # seconds
_HISS = 20.0  # standard deviation of the noise in the pauses, of 32,768
_SLACK = 0.4  # seconds: an utterance that the server begins this long before it belongs to it


@dataclass
class Utterance:
    """A sentence in the audio of a session, and when the server said something of it.

    Attributes:
        start, end: seconds of audio before its first and last sample.
        started, stopped, first_delta, completed: seconds between the beginning of the session's audio and an event.
        transcripts: texts of the completed events. One is right.
    """

    text: str
    start: float
    end: float
    started: float | None = None
    stopped: float | None = None
    first_delta: float | None = None
    completed: float | None = None
    transcripts: list[str] = field(default_factory=list)


def make_dialogue(seed: str, seconds: float) -> tuple[NDArray[np.int16], list[Utterance]]:
    """Return samples at 24 kHz, of about so many seconds, and the utterances in them, in English."""
    rng = Random(seed)
    parts, utterances, length = [_silence(1.0, rng)], [], 1.0
    while length < seconds - 4:
        sentence = record(f"{seed}-{rng.random()}", heldout=True, kinds=_KINDS)
        if sentence.language != "en":
            continue
        samples = soxr.resample(sentence.samples, _RECORDED, RATE)
        pause = _silence(rng.uniform(*_PAUSES), rng)
        utterances.append(Utterance(sentence.text, length, length + len(samples) / RATE))
        parts += [samples, pause]
        length += (len(samples) + len(pause)) / RATE
    return np.concatenate(parts), utterances


def _silence(seconds: float, rng: Random) -> NDArray[np.int16]:
    noise = np.random.default_rng(rng.randrange(1 << 30)).normal(scale=_HISS, size=int(seconds * RATE))
    return noise.astype(np.int16)


class Listener:
    """Sort the events of a session to the utterances of its audio.

    Attributes:
        complete: set when every utterance has a transcript.
    """

    def __init__(self, utterances: list[Utterance]) -> None:
        self.utterances = utterances
        self.unexpected: list[str] = []
        self.order: list[int] = []
        self.complete = asyncio.Event()
        self._items: dict[str, Utterance] = {}

    def take(self, event: Any, now: float) -> None:
        """Take an event of OpenAI's dialect that arrived `now` seconds after the session's audio began."""
        kind = event.type.removeprefix("conversation.item.input_audio_transcription.")
        if kind == "input_audio_buffer.speech_started":
            self._start(event.item_id, event.audio_start_ms / 1000, now)
            return
        utterance = self._items.get(getattr(event, "item_id", None) or "")
        if kind == "error" or kind == "failed":
            self.unexpected.append(event.to_json())
        elif utterance is None:
            return
        elif kind == "input_audio_buffer.speech_stopped":
            utterance.stopped = now
        elif kind == "delta" and utterance.first_delta is None:
            utterance.first_delta = now
        elif kind == "completed":
            utterance.completed = now
            utterance.transcripts.append(event.transcript)
            self.order.append(self.utterances.index(utterance))
            if all(utterance.transcripts for utterance in self.utterances):
                self.complete.set()

    def _start(self, item: str, at: float, now: float) -> None:
        """Find the utterance that an item begins with. One whose audio begins within another is a second part of it."""
        for utterance in self.utterances:
            if utterance.start - _SLACK - 0.3 <= at <= utterance.end:
                self._items[item] = utterance
                if utterance.started is None:
                    utterance.started = now
                return
        if at <= self.utterances[-1].end:  # behind it is what a session is cut off in
            self.unexpected.append(f"speech_started at {at} s, where nobody speaks")

    def faults(self) -> list[str]:
        """What went wrong: utterances that did not come once, or not in order."""
        counts = [
            f"{utterance.text!r} came {len(utterance.transcripts)} times"
            for utterance in self.utterances
            if len(utterance.transcripts) != 1
        ]
        disorder = [] if self.order == sorted(self.order) else [f"order: {self.order}"]
        return counts + disorder + self.unexpected


def word_errors(utterances: list[Utterance]) -> tuple[int, int]:
    """Word errors of the transcripts, and words."""
    errors = words = 0
    for utterance in utterances:
        said, heard = normalized(utterance.text).split(), normalized(" ".join(utterance.transcripts)).split()
        words += len(said)
        row = list(range(len(heard) + 1))
        for index, word in enumerate(said, 1):
            diagonal, row[0] = row[0], index
            for at, other in enumerate(heard, 1):
                diagonal, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, diagonal + (word != other))
        errors += row[-1]
    return errors, words
