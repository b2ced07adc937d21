"""Recorded sentences in files of a thousand: samples one behind the other, and what is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from quire.multimodal.audio.features import SAMPLE_RATE
from training.hear.sentences import LANGUAGES, split_sentence
from training.hear.voices import make_voice, speak

SHARD = 1000  # recordings of a file
LONGEST = 8.0  # seconds; a longer recording is replaced by another sentence


@dataclass(frozen=True, slots=True)
class Recording:
    """A spoken sentence.

    Attributes:
        samples: 1-D at 16 kHz, 16 bits.
    """

    language: str
    kind: str
    text: str
    voice: str
    samples: NDArray[np.int16]


def record(seed: str, *, heldout: bool, kinds: Sequence[str] = ()) -> Recording:
    """Speak a sentence that depends on the seed only. `kinds`: to choose from; empty: training's mix."""
    rng = Random(seed)
    while True:
        language = rng.choice(LANGUAGES)
        sentence = split_sentence(rng, language, heldout=heldout, kind=rng.choice(kinds) if kinds else None)
        voice = make_voice(rng, language, heldout=heldout)
        samples = speak(sentence.spoken, voice)
        if len(samples) <= LONGEST * SAMPLE_RATE:
            return Recording(language, sentence.kind, sentence.text, voice.name, samples)


def record_all(seeds: Sequence[str], threads: int, *, heldout: bool, kinds: Sequence[str] = ()) -> Iterator[Recording]:
    """Speak a sentence for each seed. Each is a short-lived process; none outlives its sentence."""
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(lambda seed: record(seed, heldout=heldout, kinds=kinds), seeds)


class Recordings:
    """The recordings of training in a folder. Samples are read from disk when they are needed."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        shards: int,
        threads: int = 1,
        size: int = SHARD,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the files that do not exist yet. `wait`: called before each file."""
        folder.mkdir(parents=True, exist_ok=True)
        self._entries: list[tuple[str, str, str, str]] = []
        self._parts: list[tuple[NDArray[np.int16], int, int]] = []
        for index in range(shards):
            samples, facts = folder / f"{index:03}.npy", folder / f"{index:03}.json"
            if not facts.exists():
                wait()
                seeds = [f"{seed}-{index}-{at}" for at in range(size)]
                _write(samples, facts, list(record_all(seeds, threads, heldout=False)))
                print(f"recorded {index + 1} of {shards} files", flush=True)
            joined = np.load(samples, mmap_mode="r")
            for *entry, start, end in json.loads(facts.read_text("utf-8")):
                self._entries.append(tuple(entry))
                self._parts.append((joined, start, end))

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Recording:
        joined, start, end = self._parts[index]
        return Recording(*self._entries[index], np.asarray(joined[start:end]))

    def of_language(self, language: str) -> list[int]:
        """Indices of the recordings in a language."""
        return [index for index, entry in enumerate(self._entries) if entry[0] == language]

    def texts(self) -> list[str]:
        """What is said in all of them."""
        return [entry[2] for entry in self._entries]

    def seconds(self, index: int) -> float:
        """Length of one."""
        _, start, end = self._parts[index]
        return (end - start) / SAMPLE_RATE


def _write(samples: Path, facts: Path, recordings: Sequence[Recording]) -> None:
    ends = np.cumsum([len(recording.samples) for recording in recordings]).tolist()
    entries = [
        (recording.language, recording.kind, recording.text, recording.voice, end - len(recording.samples), end)
        for recording, end in zip(recordings, ends, strict=True)
    ]
    np.save(samples, np.concatenate([recording.samples for recording in recordings]))
    facts.write_text(json.dumps(entries, ensure_ascii=False), encoding="utf-8")
