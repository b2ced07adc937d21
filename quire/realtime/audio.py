"""Audio of append events: base64 to samples of 16 bits at 16 kHz."""

from __future__ import annotations

import binascii
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import soxr
from numpy.typing import NDArray

from quire.realtime.errors import EventError
from quire.workers.tenant import take_turn

Samples = NDArray[np.int16]
RATE = 16000  # of what models and voice activity get
_CHARACTERS = 1 << 18  # of base64 that are decoded before others have their turn: a millisecond
_FULL_SCALE = 32768.0


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """The format of a client's audio: 16-bit little-endian PCM, or G.711; one channel.

    Attributes:
        rate: samples per second; 8000 for G.711.
    """

    encoding: Literal["pcm", "pcmu", "pcma"]
    rate: int

    @property
    def bytes_per_sample(self) -> int:
        return 2 if self.encoding == "pcm" else 1


PCM_24K = AudioFormat("pcm", 24000)
PCM_16K = AudioFormat("pcm", RATE)
PCMU = AudioFormat("pcmu", 8000)
PCMA = AudioFormat("pcma", 8000)


class AudioDecoder:
    """Decode a session's append events into samples. Chunks may have any size; state is kept between them."""

    def __init__(self, audio_format: AudioFormat) -> None:
        self.format = audio_format
        self._odd = b""  # first byte of a sample whose second one has not come
        self._resampler: soxr.ResampleStream | None = None
        self._start_resampler()

    def seconds(self, audio: str) -> float:
        """Duration of base64-encoded audio."""
        size = len(audio) * 3 // 4 - audio[-2:].count("=")
        return size / self.format.bytes_per_sample / self.format.rate

    async def decode(self, audio: str) -> AsyncIterator[Samples]:
        """Samples at 16 kHz, at most a second or two at a time.

        Raises:
            EventError: the text is not base64. Then nothing has been decoded.
        """
        encoded = [await _bytes_of(audio[at : at + _CHARACTERS]) for at in range(0, len(audio), _CHARACTERS)]
        step = self.format.rate * self.format.bytes_per_sample
        for part in encoded:
            for at in range(0, len(part), step):
                yield self._samples(part[at : at + step])

    def flush(self) -> Samples:
        """The samples that the resampler holds back; what is decoded next is not connected with them."""
        self._odd = b""
        if self._resampler is None:
            return np.empty(0, np.int16)
        left = self._resampler.resample_chunk(np.empty(0, np.float32), last=True)
        self._start_resampler()
        return _rounded(left)

    def _samples(self, data: bytes) -> Samples:
        if self.format.encoding == "pcm":
            data = self._odd + data
            whole = len(data) // 2 * 2
            data, self._odd = data[:whole], data[whole:]
            samples = np.frombuffer(data, "<i2")
        else:
            samples = _TABLES[self.format.encoding][np.frombuffer(data, np.uint8)]
        if self._resampler is None:
            return samples
        return _rounded(self._resampler.resample_chunk(samples.astype(np.float32) / _FULL_SCALE))

    def _start_resampler(self) -> None:
        if self.format.rate != RATE:
            self._resampler = soxr.ResampleStream(self.format.rate, RATE, 1, dtype="float32")


def to_float(samples: Samples) -> NDArray[np.float32]:
    """Samples between -1 and 1."""
    return samples.astype(np.float32) / np.float32(_FULL_SCALE)


async def _bytes_of(audio: str) -> bytes:
    if len(audio) == _CHARACTERS:
        await take_turn()
    try:
        return binascii.a2b_base64(audio, strict_mode=True)
    except ValueError as error:  # binascii.Error is one; so is what it says of characters outside of ASCII
        raise EventError(f"`audio` is not valid base64: {error}.", "invalid_audio", "audio") from error


def _rounded(samples: NDArray[np.float32]) -> Samples:
    limits = np.iinfo(np.int16)
    rounded: Samples = np.clip(np.rint(samples * _FULL_SCALE), limits.min, limits.max).astype(np.int16)
    return rounded


def _mu_law() -> Samples:
    """Linear values of the 256 codes of G.711 µ-law."""
    codes = ~np.arange(256, dtype=np.uint8)
    exponent = (codes >> 4 & 7).astype(np.int32)
    mantissa = (codes & 15).astype(np.int32)
    magnitude = ((mantissa << 3) + 0x84 << exponent) - 0x84
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.int16)


def _a_law() -> Samples:
    """Linear values of the 256 codes of G.711 A-law."""
    codes = np.arange(256, dtype=np.uint8) ^ 0x55
    exponent = (codes >> 4 & 7).astype(np.int32)
    mantissa = (codes & 15).astype(np.int32)
    shifted = (mantissa << 4) + 0x108 << np.maximum(exponent - 1, 0)
    magnitude = np.where(exponent == 0, (mantissa << 4) + 8, shifted)
    return np.where(codes & 0x80, magnitude, -magnitude).astype(np.int16)


_TABLES: dict[str, Samples] = {"pcmu": _mu_law(), "pcma": _a_law()}
