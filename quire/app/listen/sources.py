"""Where `quire listen` gets audio from: a file, standard input or a microphone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quire.app.openai_client import ServerError
from quire.multimodal.audio.decode import AudioError, decode
from quire.multimodal.audio.limits import AudioLimits

FILE_RATE = 16000
_CHUNK_SECONDS = 0.1
_LIMITS = AudioLimits(4 << 30, 24 * 3600.0, 1 << 40)  # the file is the user's own
_HEADER = 44  # bytes of the usual header of a wav file
_WAITING = 100  # chunks of a microphone that may wait to be sent
Chunks = AsyncGenerator[bytes, None]


async def from_file(path: Path, *, real_time: bool) -> Chunks:
    """The audio of a file as 16-bit PCM at 16 kHz; `real_time`: not faster than it was spoken.

    Raises:
        ServerError: it cannot be read or decoded.
    """
    try:
        content = await asyncio.to_thread(path.read_bytes)
        audio = await asyncio.to_thread(decode, content, _LIMITS)
    except OSError as error:
        raise ServerError(f"{path}: {error.strerror}") from error
    except AudioError as error:
        raise ServerError(f"{path}: {error}") from error
    samples = np.clip(np.rint(audio.samples * 32768), -32768, 32767).astype("<i2")
    clock = asyncio.get_running_loop().time
    started = clock()
    step = int(_CHUNK_SECONDS * FILE_RATE)
    for at in range(0, len(samples), step):
        if real_time:
            await asyncio.sleep(started + at / FILE_RATE - clock())
        yield samples[at : at + step].tobytes()


async def from_stream(stream: BinaryIO, rate: int) -> Chunks:
    """16-bit PCM that another program writes, raw or as a wav file of this rate.

    Raises:
        ServerError: the wav file has another form.
    """
    size = int(_CHUNK_SECONDS * rate) * 2
    first = await asyncio.to_thread(stream.read, _HEADER)
    if first[:4] == b"RIFF":
        _check_wav(first, rate)
        first = b""
    yield first
    while chunk := await asyncio.to_thread(_read_some, stream, size):
        yield chunk


async def from_microphone(device: str | None, rate: int) -> Chunks:
    """The audio of a microphone, without end.

    Raises:
        ServerError: there is none, or the package that reads it is not installed.
    """
    sound: Any = _sounddevice()
    loop = asyncio.get_running_loop()
    recorded: asyncio.Queue[bytes] = asyncio.Queue(_WAITING)

    def keep(chunk: bytes) -> None:
        if not recorded.full():  # else the server does not keep up, and this part is lost
            recorded.put_nowait(chunk)

    def callback(data: Any, *_: Any) -> None:  # in a thread of the sound system
        loop.call_soon_threadsafe(keep, bytes(data))

    known = int(device) if device is not None and device.isdecimal() else device
    try:
        with sound.RawInputStream(
            samplerate=rate,
            channels=1,
            dtype="int16",
            blocksize=int(_CHUNK_SECONDS * rate),
            device=known,
            callback=callback,
        ):
            while True:
                yield await recorded.get()
    except (sound.PortAudioError, ValueError) as error:  # ValueError: no device has this name
        raise ServerError(f"the microphone cannot be opened: {error}") from error


def _sounddevice() -> Any:
    try:
        import sounddevice  # noqa: PLC0415 not everybody has it
    except ImportError as error:
        raise ServerError(
            "a microphone needs the package sounddevice: pip install 'quire[microphone]'. "
            "Or give a file, or - for 16-bit PCM at standard input."
        ) from error
    except OSError as error:
        raise ServerError(f"a microphone needs the library PortAudio: {error}") from error
    return sounddevice


def standard_input() -> BinaryIO:
    """The bytes of standard input."""
    return sys.stdin.buffer


def _read_some(stream: BinaryIO, size: int) -> bytes:
    """Return what there is, at most `size`; waits only if there is nothing."""
    read1 = getattr(stream, "read1", None)
    chunk: bytes = stream.read(size) if read1 is None else read1(size)
    return chunk


def _check_wav(header: bytes, rate: int) -> None:
    kind, channels = int.from_bytes(header[20:22], "little"), int.from_bytes(header[22:24], "little")
    hertz, bits = int.from_bytes(header[24:28], "little"), int.from_bytes(header[34:36], "little")
    if (kind, channels, hertz, bits) != (1, 1, rate, 16) or header[36:40] != b"data":
        raise ServerError(
            f"standard input is a wav file of {channels} channels, {hertz} Hz and {bits} bits; accepted are 1 channel, "
            f"{rate} Hz (--rate) and 16 bits"
        )
