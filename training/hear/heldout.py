"""The utterances of the evaluation: sentences and voices that training never uses, clean and with noise."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import soundfile

from quire.multimodal.audio.features import SAMPLE_RATE
from training.hear.noise import KINDS, Samples, add_noise, make_noise
from training.hear.recordings import record
from training.hear.sentences import normalized

# Names and lists of words are left out: they may be the same in both languages.
SENTENCES = ("commands", "times", "numbers", "colours", "short")
_FEWEST_WORDS = 3  # so that there is enough to tell the language by
_SILENCE = 0.3  # seconds around an utterance


@dataclass(frozen=True, slots=True)
class Utterance:
    """An utterance.

    Attributes:
        noise: its kind; empty: none.
        samples: 1-D at 16 kHz.
    """

    language: str
    kind: str
    text: str
    voice: str
    noise: str
    samples: Samples

    @property
    def speech(self) -> tuple[float, float]:
        """Start and end of the speech in seconds."""
        return _SILENCE, len(self.samples) / SAMPLE_RATE - _SILENCE

    def wav(self) -> bytes:
        """A file of it."""
        file = io.BytesIO()
        soundfile.write(file, self.samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
        return file.getvalue()


def utterances(count: int, seed: int) -> list[Utterance]:
    """Make clean utterances."""
    return [utterance for _, utterance in zip(range(count), _all(seed), strict=False)]


def _all(seed: int) -> Iterator[Utterance]:
    number = 0
    silence = np.zeros(int(_SILENCE * SAMPLE_RATE), np.float32)
    while True:
        said = record(f"heldout-{seed}-{number}", heldout=True, kinds=SENTENCES)
        number += 1
        if len(normalized(said.text).split()) >= _FEWEST_WORDS:
            samples = np.concatenate([silence, said.samples.astype(np.float32) / 32768, silence])
            yield Utterance(said.language, said.kind, said.text, said.voice, "", samples)


def _other(clean: Sequence[Utterance], at: int, number: int) -> Samples:
    """The samples of another utterance than that at an index."""
    return clean[(at + 1 + number % (len(clean) - 1)) % len(clean)].samples


def with_noise(clean: Sequence[Utterance], decibels: float, seed: int) -> list[Utterance]:
    """Add noise of the three kinds in turn. `decibels`: ratio of the speech's power to that of the noise."""
    generator = np.random.default_rng(seed)
    noisy = []
    for at, utterance in enumerate(clean):
        kind = KINDS[at % len(KINDS)]
        voice = partial(_other, clean, at)
        noise = make_noise(generator, len(utterance.samples), voice, kind)
        start, end = (round(time * SAMPLE_RATE) for time in utterance.speech)
        power = float(np.mean(utterance.samples[start:end].astype(np.float64) ** 2))
        mixed = add_noise(utterance.samples, noise, power, decibels)
        noisy.append(replace(utterance, noise=kind, samples=mixed / max(1.0, float(np.abs(mixed).max()))))
    return noisy
