"""Decodes audio files to mono float32 at 16 kHz, by libsndfile or, for other formats, by FFmpeg's libraries.

Runs in worker processes: parsers of media formats are native code that reads what a stranger has sent.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from quire.multimodal.audio.features import SAMPLE_RATE
from quire.multimodal.audio.formats import NAMES, AudioFormat, recognize
from quire.multimodal.audio.headers import complete, is_chained, wav_frames
from quire.multimodal.audio.limits import AudioLimits
from quire.multimodal.errors import PromptError
from quire.multimodal.videos import formats as video_formats

PARAM = "file"
_VIDEO = "video"  # of any format, in error texts
_BLOCK = 1 << 16  # frames that are read at once
_MIN_RATE, _MAX_RATE = 1000, 768_000  # samples per second
_MAX_CHANNELS = 64
_MISSING = 0.25  # seconds of the announced length that may be missing: encoders pad
_CONTAINERS = frozenset({"wav", "ogg"})  # of codecs that libsndfile does not know, or cut off where it needs the end
_ESTIMATE_ERROR = 0.01
_MARGIN = 1600  # samples that resampling and codecs may add
_MOST_FRAMES = 1 << 40  # libsndfile announces more if it does not know how many there are
_ESTIMATED = frozenset({"mp3", "ogg", "aac"})  # whose length is a guess
Block = NDArray[np.float32]  # (frames, channels)
Source = Iterator[tuple[Block, int]]  # with the sample rate


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    """Decoded audio.

    Attributes:
        samples: 1-D float32 at 16 kHz; all channels averaged.
        format: name of the file's format.
    """

    samples: NDArray[np.float32]
    format: str

    @property
    def seconds(self) -> float:
        """Duration."""
        return len(self.samples) / SAMPLE_RATE


class AudioError(PromptError):
    """A file is not audio, is broken, or exceeds a limit."""

    def __init__(self, message: str, param: str = PARAM) -> None:
        super().__init__(message, param)

    def __reduce__(self) -> tuple[Any, ...]:
        return AudioError, (str(self), self.param)


class LongerAudio(Exception):
    """The audio may be longer than what memory was reserved for.

    Attributes:
        samples: how long it may be, at 16 kHz.
    """

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.samples = samples


class _Unreadable(AudioError):
    """A library cannot make sense of the file; another one may."""


class _Silent(_Unreadable):
    """The file has no audio."""


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """A job: decode a file. `reserved`: how many samples there is memory for; `is_video`: it is a video."""

    content: bytes
    reserved: int
    is_video: bool


def worker(limits: AudioLimits) -> Callable[[DecodeJob], DecodedAudio]:
    """The function of a worker process."""

    def do(job: DecodeJob) -> DecodedAudio:
        return (decode_sound if job.is_video else decode)(job.content, limits, job.reserved)

    return do


def check_size(size: int, limits: AudioLimits) -> None:
    """Check the size of a file in bytes.

    Raises:
        AudioError: the file is empty or too large.
    """
    if not size:
        raise AudioError("The file is empty.")
    if size > limits.size:
        raise AudioError(
            f"Maximum file size exceeded: the file has {size} bytes, this server accepts {limits.size} "
            "(--max-audio-size)."
        )


def decode(content: bytes, limits: AudioLimits, reserved: int | None = None) -> DecodedAudio:
    """Decode a file.

    Args:
        content: the file.
        limits: limits of files.
        reserved: samples that there is memory for; None: as many as the limits allow.

    Raises:
        AudioError: it is empty, not audio, broken, or beyond a limit.
        LongerAudio: there may be more samples than reserved. Nothing has been decoded, if the header announces them.
    """
    check_size(len(content), limits)
    kind = recognize(content)
    if kind is None:
        raise AudioError(f"Invalid or unsupported audio file. Supported formats: {NAMES}.")
    target = _Target(kind, limits, reserved)
    if kind.library == "av" or (kind.name == "ogg" and is_chained(content)):
        return DecodedAudio(_collect(_through_av(content, target), target), kind.name)
    try:
        return DecodedAudio(_collect(_through_soundfile(content, target), target), kind.name)
    except _Unreadable as error:
        if kind.name not in _CONTAINERS or find_spec("av") is None:
            raise
        target = _Target(kind, limits, reserved)
        try:
            return DecodedAudio(_collect(_through_av(content, target), target), kind.name)
        except _Unreadable:
            raise error from None


def decode_sound(content: bytes, limits: AudioLimits, reserved: int | None = None) -> DecodedAudio:
    """Decode the sound of a video; no samples if it is silent.

    Args, Raises: as of `decode`.
    """
    if len(content) > limits.video_size:
        raise AudioError(
            f"The file has {len(content)} bytes; this server accepts videos of {limits.video_size} (--max-video-size)."
        )
    silence = DecodedAudio(np.zeros(0, np.float32), _VIDEO)
    demuxer = video_formats.recognize(content)
    if demuxer is None:
        if video_formats.is_video(content):  # a list of frames
            return silence
        raise AudioError(f"The file is not a video of a supported format: {video_formats.NAMES}.")
    target = _Target(AudioFormat(_VIDEO, "av", demuxer), limits, reserved)
    try:
        return DecodedAudio(_collect(_through_av(content, target), target), _VIDEO)
    except _Silent:
        return silence


def _collect(source: Source, target: _Target) -> NDArray[np.float32]:
    """All blocks, mixed down, resampled once, and checked against the limits while they arrive."""
    kind, limits = target.kind, target.limits
    resampler: soxr.ResampleStream | None = None
    rate = decoded = 0
    for block, new_rate in source:
        if not rate:
            rate = new_rate
            if rate != SAMPLE_RATE:
                resampler = soxr.ResampleStream(rate, SAMPLE_RATE, 1, "float32", "HQ")
        elif rate != new_rate:
            raise AudioError(f"The {kind.name} file changes its sample rate from {rate} to {new_rate}.")
        decoded += block.nbytes
        if decoded > limits.decoded_size:
            raise AudioError(
                f"The {kind.name} file decodes to more than {limits.decoded_size} bytes (--max-audio-decoded-size)."
            )
        mono = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1, dtype=np.float32)
        target.add(mono if resampler is None else resampler.resample_chunk(np.ascontiguousarray(mono)))
    if resampler is not None:
        target.add(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
    if not target.length:
        # FFmpeg would take what follows the audio of a wav file for audio.
        raise (AudioError if kind.name == "wav" else _Silent)(f"The {kind.name} file contains no audio.")
    return target.samples()


class _Target:
    """The samples of a file: a float32 array that grows up to a limit, without a second copy for long."""

    def __init__(self, kind: AudioFormat, limits: AudioLimits, reserved: int | None) -> None:
        self.kind = kind
        self.limits = limits
        self._most = round(limits.seconds * SAMPLE_RATE)
        self._reserved = self._most if reserved is None else min(reserved, self._most)
        self._buffer = np.empty(min(self._reserved, 1 << 18), np.float32)
        self.length = 0

    def expect(self, seconds: float) -> None:
        """Check the duration that a header announces.

        Raises:
            AudioError: it is beyond the limit.
            LongerAudio: it is more than what is reserved.
        """
        if self.kind.name in _ESTIMATED:
            seconds += 1.0 + seconds * _ESTIMATE_ERROR
        elif seconds > self.limits.seconds + _MISSING:
            raise self._too_long()
        samples = min(self._most, math.ceil(seconds * SAMPLE_RATE) + _MARGIN)
        if samples > self._reserved:
            raise LongerAudio(samples)

    def add(self, samples: NDArray[np.float32]) -> None:
        """Append samples."""
        end = self.length + len(samples)
        if end > self._most:
            raise self._too_long()
        if end > self._reserved:
            raise LongerAudio(self._most)
        if end > len(self._buffer):
            self._buffer.resize(min(self._reserved, max(end, 2 * len(self._buffer))), refcheck=False)
        self._buffer[self.length : end] = samples
        if not np.isfinite(self._buffer[self.length : end]).all():
            raise AudioError("The file contains samples that are not finite numbers.")
        self.length = end

    def samples(self) -> NDArray[np.float32]:
        """All samples."""
        return self._buffer[: self.length]

    def _too_long(self) -> AudioError:
        return AudioError(
            f"The audio is longer than {self.limits.seconds:g} s, the limit of this server (--max-audio-seconds)."
        )


def _check_header(rate: int, channels: int, kind: AudioFormat) -> None:
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise AudioError(
            f"The {kind.name} file has {rate} samples per second; accepted are {_MIN_RATE} to {_MAX_RATE}."
        )
    if not 1 <= channels <= _MAX_CHANNELS:
        raise AudioError(f"The {kind.name} file has {channels} channels; accepted are 1 to {_MAX_CHANNELS}.")


def _through_soundfile(content: bytes, target: _Target) -> Source:
    decoded = 0
    kind = target.kind
    try:
        with _Sequential(_Bytes(complete(content, kind.name))) as file:
            rate, announced = file.samplerate, file.frames
            _check_header(rate, file.channels, kind)
            if announced < _MOST_FRAMES:
                target.expect(announced / rate)
            while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
                decoded += len(block)
                yield block, rate
    except soundfile.LibsndfileError as error:
        raise _Unreadable(f"The {kind.name} file is broken: {_reason(error.error_string)}") from error
    if kind.name == "wav":
        announced = wav_frames(content) or decoded
    if kind.name not in _ESTIMATED and announced < _MOST_FRAMES:
        _check_length(decoded / rate, announced / rate, kind)


class _Sequential(soundfile.SoundFile):  # type: ignore[misc]  # soundfile has no types
    """A file that is read from its start to its end: soundfile would seek behind each block to where it is anyway."""

    def seekable(self) -> bool:
        return False


class _Bytes(io.BytesIO):
    """A file in which libsndfile may seek before the start: an exception in its callback would only be printed."""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        try:
            return super().seek(offset, whence)
        except ValueError:
            return super().seek(0)


def _through_av(content: bytes, target: _Target) -> Source:
    kind = target.kind
    if find_spec("av") is None:
        raise AudioError(
            f"This server does not decode {kind.name}: it lacks the package av (pip install 'quire[audio]')."
        )
    import av  # noqa: PLC0415 not everybody has it

    end = 0.0
    try:
        file = io.BytesIO(content)
        with av.open(file, "r", format=kind.demuxer, metadata_errors="ignore", io_open=_refuse_to_open) as container:
            if not container.streams.audio:
                raise _Silent(f"The {kind.name} file contains no audio.")
            stream = container.streams.audio[0]
            if stream.codec_context is None:
                raise AudioError(f"The {kind.name} file has a codec that this server does not know.")
            stream.codec_context.thread_count = 1
            announced = length = (container.duration or 0) / av.time_base
            if kind.name == _VIDEO:  # whose sound may end before its frames
                announced = float((stream.duration or 0) * (stream.time_base or 0))
            target.expect(announced or length)
            for frame in container.decode(stream):
                _check_header(frame.sample_rate, len(frame.layout.channels), kind)
                yield _samples_of(frame), frame.sample_rate
                end = max(end, (frame.time or 0.0) + frame.samples / frame.sample_rate)
    except (av.FFmpegError, PermissionError) as error:
        raise _Unreadable(f"The {kind.name} file is broken: {_reason(error.strerror or str(error))}") from error
    if kind.name not in _ESTIMATED:
        _check_length(end, announced, kind)


def _refuse_to_open(url: str, flags: int, options: Any) -> Any:
    """A file that refers to others is not followed."""
    raise PermissionError(f"a reference to another file: {url[:100]}")


def _samples_of(frame: Any) -> Block:
    """The samples of one of FFmpeg's frames, as float32 in [-1, 1]."""
    samples = frame.to_ndarray()
    channels = len(frame.layout.channels)
    by_frame = samples.T if frame.format.is_planar else samples.reshape(-1, channels)
    block: Block = by_frame.astype(np.float32)
    if by_frame.dtype == np.uint8:
        block = (block - np.float32(128)) / np.float32(128)
    elif np.issubdtype(by_frame.dtype, np.integer):
        block = block / np.float32(1 << (8 * by_frame.dtype.itemsize - 1))
    return block


def _check_length(decoded: float, announced: float, kind: AudioFormat) -> None:
    """Refuse a file that has less than its header says: the rest of a speech would silently be missing."""
    if decoded < announced - _MISSING:
        raise AudioError(f"The {kind.name} file is truncated: it has {decoded:.2f} s of {announced:.2f} s of audio.")


def _reason(text: str) -> str:
    return text.strip().rstrip(".")[:200] + "."
