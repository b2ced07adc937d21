"""A model that transcribes, without a model: what it hears are the tones in its features."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers
from tokenizers import AddedToken

from quire.engine.client.model_info import Transcribes
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import AddRequest
from tests.support.audio import Samples, tone
from tests.support.fake_core import INFO, FakeCore
from tests.support.server import Server, running_server
from tests.support.tokenizer import byte_level

LANGUAGES = ("en", "de", "ja")
_CONTROL = (
    *("<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>"),
    *("<|transcribe|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
TOKEN = {text: 256 + index for index, text in enumerate(_CONTROL)}
END = TOKEN["<|endoftext|>"]
TIMES = 256 + len(_CONTROL)  # the token of 0.00
VOCAB = TIMES + 1501
SPEECH = Transcribes(
    kind="whisper",
    sample_rate=16_000,
    num_mel_bins=80,
    num_columns=3000,
    window_seconds=30.0,
    num_positions=1500,
    max_output_tokens=448,
    languages={code: TOKEN[f"<|{code}|>"] for code in LANGUAGES},
    start_token=TOKEN["<|startoftranscript|>"],
    transcribe_token=TOKEN["<|transcribe|>"],
    translate_token=TOKEN["<|translate|>"],
    no_timestamps_token=TOKEN["<|notimestamps|>"],
    timestamp_begin=TIMES,
    max_initial_timestamp=50,
    no_speech_token=TOKEN["<|nospeech|>"],
    previous_token=TOKEN["<|startofprev|>"],
    end_token=END,
    suppress_tokens=(1, 2),
    begin_suppress_tokens=(220, END),
    aligns_words=True,
)
# What is heard, by the frequency of a tone.
HEARD = {300.0: "alpha", 600.0: "bravo", 1200.0: "charlie", 2400.0: "delta"}


@lru_cache(maxsize=1)
def speech_tokenizer() -> tokenizers.Tokenizer:
    """Bytes, then the special tokens of whisper, then its timestamps."""
    tokenizer = byte_level(_CONTROL)
    tokenizer.add_tokens([AddedToken(f"<|{step * 0.02:.2f}|>", special=False) for step in range(1501)])
    return tokenizer


def write_speech_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files to a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    speech_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


def text(words: str) -> list[int]:
    """Tokens of a text."""
    return speech_tokenizer().encode(words).ids


def at(seconds: float) -> int:
    """The token of a time in a window."""
    return TIMES + round(seconds / 0.02)


def spoken(*parts: tuple[float, float], seconds: float | None = None) -> Samples:
    """Tones of frequency and duration one after the other, with 0.4 s of silence around each; 1-D."""
    pause = np.zeros(6400, np.float32)
    pieces = [pause]
    for hertz, duration in parts:
        pieces += [tone(duration, hertz=hertz)[:, 0], pause]
    samples = np.concatenate(pieces)
    if seconds is not None:
        samples = np.pad(samples, (0, max(0, round(seconds * 16_000) - len(samples))))
    return samples


def heard(message: AddRequest) -> list[tuple[str, float, float]]:
    """The words in the features of a request, with their times in seconds."""
    features = message.audio_items[0].features
    loud = features.max(axis=0) > features.max() - 0.4
    words: list[tuple[str, float, float]] = []
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loud.astype(int), [0]])))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        if end - start < 8:
            continue
        word = _WORDS[int(features[:, start:end].mean(axis=1).argmax())]
        words.append((word, start / 100, end / 100))
    return words


def hears(message: AddRequest) -> list[int]:
    """The words in the audio, as whisper would write them: with timestamps unless the prompt turns them off."""
    timed = TOKEN["<|notimestamps|>"] not in message.prompt.tolist()
    output: list[int] = []
    for word, start, end in heard(message):
        tokens = text(f" {word}")
        output += [at(start), *tokens, at(end)] if timed else tokens
    return [*output, END]


def speaks(code: str, no_speech: float = 0.01) -> Callable[[AddRequest], list[float]]:
    """Probabilities: of this language where languages are asked for, else of no speech."""

    def probs(message: AddRequest) -> list[float]:
        asked = message.sampling_params.token_probs
        assert asked is not None
        if len(asked.token_ids) == 1:
            return [no_speech]
        return [0.5 if token == SPEECH.languages[code] else 0.01 for token in asked.token_ids]

    return probs


def aligned(message: AddRequest) -> np.ndarray:
    """Each token belongs to the time at which its word is heard."""
    task = message.params
    assert isinstance(task, PoolingParams)
    assert task.num_positions is not None
    rows = len(message.prompt) - task.skip_tokens
    result = np.zeros((rows, task.num_positions), np.float32)
    row = 0
    for word, start, end in heard(message):
        first, last = round(start * 50), round(end * 50)
        for index in range(len(word) + 1):
            begin = first + (last - first) * index // (len(word) + 1)
            result[row, begin : max(begin + 1, first + (last - first) * (index + 1) // (len(word) + 1))] = 1.0
            row += 1
        result[row, last:] = 0.5  # the next token, until its own word begins
    return result


@dataclass
class SpeechCore(FakeCore):
    """A core that hears tones."""

    answer: Callable[[AddRequest], list[int]] = hears
    probs: Callable[[AddRequest], list[float]] = field(default_factory=lambda: speaks("en"))
    alignment: Callable[[AddRequest], np.ndarray] | None = aligned

    def __post_init__(self) -> None:
        self.info = msgspec.structs.replace(INFO, vocab_size=VOCAB, max_model_len=448, kind=SPEECH)


def english_only(core: SpeechCore) -> SpeechCore:
    """The core of a model without languages."""
    speech = msgspec.structs.replace(SPEECH, languages={}, transcribe_token=None, translate_token=None)
    core.info = msgspec.structs.replace(core.info, kind=speech)
    return core


@asynccontextmanager
async def speech_server(
    folder: Path, core: SpeechCore | None = None, *others: FakeCore, **options: Any
) -> AsyncIterator[Server]:
    """A server of the model; `others` are further models."""
    async with running_server(folder, core or SpeechCore(), *others, write=write_speech_tokenizer, **options) as server:
        yield server


def added(core: FakeCore) -> list[AddRequest]:
    """The requests that the core has got."""
    return [message for message in core.received if isinstance(message, AddRequest)]


def generating(core: FakeCore) -> list[AddRequest]:
    """The requests that generate text or a language."""
    return [message for message in added(core) if not isinstance(message.params, PoolingParams)]


def prompts(core: FakeCore) -> list[Sequence[int]]:
    """Prompts of the requests that generate text: those for the language are left out."""
    return [message.prompt.tolist() for message in generating(core) if len(message.prompt) > 1]


def _bin_of(hertz: float) -> int:
    from quire.multimodal.audio.features import log_mel

    return int(log_mel(tone(2.0, hertz=hertz)[:, 0], 80, 2.0).mean(axis=1).argmax())


class _Words(dict[int, str]):
    """Words by the loudest mel bin; the nearest one."""

    def __missing__(self, key: int) -> str:
        return self[min(self, key=lambda known: abs(known - key))]


_WORDS = _Words({_bin_of(hertz): word for hertz, word in HEARD.items()})
