"""Training steps: windows of one or more recorded sentences with pauses and noise, and the tokens of their text."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.multimodal.audio.features import SAMPLE_RATE
from training.hear.noise import Samples, add_noise, make_noise
from training.hear.recipe import Recipe
from training.hear.recordings import Recordings
from training.hear.sentences import LANGUAGES
from training.hear.tokens import Ids

IGNORED = -100  # label that does not count
_HIGHEST_RATIO, _EASY_RATIO = 30.0, 12.0  # dB
_PAUSE = (0.05, 1.2)  # seconds around and between sentences
_GAIN = (-24.0, 4.0)  # dB
_ALONE = 0.5  # share of windows with one sentence


@dataclass(slots=True)
class Window:
    """A window.

    Attributes:
        samples: 1-D; what follows them is silent.
        segments: start, end in seconds, and text of each sentence.
    """

    language: str
    samples: Samples
    segments: list[tuple[float, float, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    """A step.

    Attributes:
        samples: (windows, samples), padded with silence.
        inputs, labels: (windows, tokens) of the decoder; padding is IGNORED in `labels`.
        text: the text tokens alone, of all windows one behind the other.
        text_lengths: how many each window has.
    """

    samples: Tensor
    inputs: Tensor
    labels: Tensor
    text: Tensor
    text_lengths: Tensor


class Steps:
    """Make the steps; each depends on the recipe and its number only."""

    def __init__(self, recordings: Recordings, ids: Ids, recipe: Recipe) -> None:
        self._recordings, self._ids, self._recipe = recordings, ids, recipe
        self._by_language = {code: recordings.of_language(code) for code in LANGUAGES}

    def make(self, number: int) -> Step:
        """Make a step."""
        generator = np.random.default_rng((self._recipe.seed, number))
        easy = number < self._recipe.easy
        seconds = self._recipe.easy_seconds if easy else int(generator.choice(self._recipe.lengths))
        windows = [self.window(generator, seconds, easy=easy) for _ in range(self._recipe.seconds // seconds)]
        samples = np.zeros((len(windows), seconds * SAMPLE_RATE), np.float32)
        for row, window in zip(samples, windows, strict=True):
            row[: len(window.samples)] = window.samples
        sequences = [self._tokens(generator, window) for window in windows]
        longest = max(len(inputs) for inputs, _ in sequences)
        inputs = np.full((len(windows), longest), self._ids.end)
        labels = np.full((len(windows), longest), IGNORED)
        for at, (own_inputs, own_labels) in enumerate(sequences):
            inputs[at, : len(own_inputs)], labels[at, : len(own_labels)] = own_inputs, own_labels
        texts = [[token for _, _, text in window.segments for token in self._ids.text(text)] for window in windows]
        return Step(
            torch.from_numpy(samples),
            torch.from_numpy(inputs),
            torch.from_numpy(labels),
            torch.tensor([token for text in texts for token in text]),
            torch.tensor([len(text) for text in texts]),
        )

    def window(self, generator: np.random.Generator, seconds: int, *, easy: bool = False) -> Window:
        """Draw a window of at most so many seconds. `easy`: with one sentence and little noise."""
        recipe, limit = self._recipe, seconds * SAMPLE_RATE
        language = LANGUAGES[generator.integers(len(LANGUAGES))]
        speech = np.zeros(limit, np.float32)
        window = Window(language, speech)
        end, power, sounding = 0, 0.0, 0
        alone = generator.random() < _ALONE or easy
        while generator.random() >= recipe.silent or window.segments:
            start = end + int(generator.uniform(*_PAUSE) * SAMPLE_RATE)
            said = self._recordings[self._drawn(generator, language)]
            if start + len(said.samples) > limit:
                break
            samples = said.samples.astype(np.float32) / np.float32(32768)
            end = start + len(samples)
            speech[start:end] = samples
            window.segments.append((start / SAMPLE_RATE, end / SAMPLE_RATE, said.text))
            power, sounding = power + float(np.sum(samples.astype(np.float64) ** 2)), sounding + len(samples)
            if alone:
                break
        length = min(limit, end + int(generator.uniform(*_PAUSE) * SAMPLE_RATE))
        if not window.segments:
            length, power, sounding = int(generator.integers(limit // 4, limit + 1)), 0.005, 1
        lowest = _EASY_RATIO if easy else recipe.loudest_noise
        window.samples = self._with_noise(generator, speech[:length], power / sounding, lowest)
        return window

    def _drawn(self, generator: np.random.Generator, language: str) -> int:
        indices = self._by_language[language]
        return indices[generator.integers(len(indices))]

    def _with_noise(self, generator: np.random.Generator, samples: Samples, power: float, lowest: float) -> Samples:
        if generator.random() >= self._recipe.clean:
            noise = make_noise(generator, len(samples), self._voice)
            # More often loud than not: the mean ratio is below the middle.
            ratio = lowest + (_HIGHEST_RATIO - lowest) * generator.random() ** 1.5
            samples = add_noise(samples, noise, power, ratio)
        gained: NDArray[np.float32] = samples * np.float32(10 ** (generator.uniform(*_GAIN) / 20))
        return gained.clip(-1, 1)

    def _voice(self, number: int) -> Samples:
        return self._recordings[number % len(self._recordings)].samples.astype(np.float32) / np.float32(32768)

    def _tokens(self, generator: np.random.Generator, window: Window) -> tuple[list[int], list[int]]:
        """What the decoder reads, and what it has to write behind each token."""
        ids, recipe = self._ids, self._recipe
        timed = generator.random() < recipe.timed
        before: list[int] = []
        if generator.random() < recipe.earlier:
            while len(before) < (room := recipe.shape.targets // 2 - 1) and (not before or generator.random() < 0.7):
                before += ids.text(self._recordings[self._drawn(generator, window.language)].text)
            before = [ids.previous, *before[-room:]]
        prompt = [ids.start, ids.languages[window.language], ids.transcribe, *([] if timed else [ids.no_timestamps])]
        body: list[int] = []
        for start, end, text in window.segments:
            body += [ids.time(start), *ids.text(text), ids.time(end)] if timed else ids.text(text)
        if timed and not window.segments:
            body = [ids.time(0)]
        tokens = [*before, *prompt, *body, ids.end]
        labels = [IGNORED] * (len(tokens) - 1)
        start = len(before)
        labels[start] = tokens[start + 1] if window.segments else ids.no_speech
        labels[start + len(prompt) - 1 :] = tokens[start + len(prompt) :]
        return tokens[: recipe.shape.targets + 1][:-1], labels[: recipe.shape.targets]
