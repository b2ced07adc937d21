"""A CTC model without a model: it spells the words of the tones in its samples."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from quire.engine.client.convolutions import Convolution
from quire.engine.client.model_info import Transcribes
from quire.engine.client.protocol import AddRequest
from tests.support.ctc import CHARACTERS
from tests.support.fake_core import INFO, FakeCore
from tests.support.speech import HEARD

POSITION = 320  # samples
SPEECH = Transcribes(
    kind="ctc",
    features="samples",
    sample_rate=16_000,
    num_mel_bins=1,
    num_columns=480_000,
    convolutions=(Convolution(POSITION, POSITION),),
    window_seconds=30.0,
    num_positions=1500,
    max_output_tokens=1500,
    blank_token=0,
    aligns_words=True,
)


def spells(message: AddRequest) -> np.ndarray:
    """A letter at every fourth position of a tone, and a space behind it."""
    samples = message.audio_items[0].features[0]
    frames = samples[: len(samples) // POSITION * POSITION].reshape(-1, POSITION)
    loud = np.abs(frames).max(axis=1) > 0.2
    tokens = np.zeros(len(frames))
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loud.astype(int), [0]])))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        spectrum = np.abs(np.fft.rfft(frames[start:end].reshape(-1)))
        hertz = float(spectrum.argmax()) * 16_000 / ((end - start) * POSITION)
        word = HEARD[min(HEARD, key=lambda known: abs(known - hertz))].upper()
        for index, char in enumerate(word):
            tokens[start + 4 * index : start + 4 * index + 2] = CHARACTERS.index(char)
        tokens[min(end, len(tokens) - 1)] = CHARACTERS.index("|")
    return np.stack([tokens, np.where(tokens > 0, -0.25, -0.5)], 1).astype(np.float32)


def write_characters(folder: Path) -> None:
    """Write the tokenizer's files to a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({text: token for token, text in enumerate(CHARACTERS)}))


@dataclass
class CTCCore(FakeCore):
    """A core that spells what it hears."""

    def __post_init__(self) -> None:
        self.alignment = spells
        self.info = msgspec.structs.replace(INFO, vocab_size=len(CHARACTERS), max_model_len=1500, kind=SPEECH)
