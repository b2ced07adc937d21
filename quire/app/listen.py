"""`quire listen`: a terminal client of /v1/realtime, which prints live transcripts."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO
from urllib.parse import quote

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from quire.app.openai_client import ServerError
from quire.config.commands import Listen
from quire.multimodal.audio.decode import AudioError, decode
from quire.multimodal.audio.limits import AudioLimits

_CLEAR_LINE = "\r\033[K"
_TRANSCRIPTION = "conversation.item.input_audio_transcription."
_FILE_RATE = 16000
_CHUNK_SECONDS = 0.1
_LIMITS = AudioLimits(4 << 30, 24 * 3600.0, 1 << 40)  # the file is the user's own
_HEADER = 44  # bytes of the usual header of a wav file
_WAITING = 100  # chunks of a microphone that may wait to be sent
_Chunks = AsyncGenerator[bytes, None]


class Screen:
    """Print utterances, a line for each. A terminal shows them while they grow."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._live = output.isatty()
        self._shown = ""  # of the utterance that is not complete

    def add(self, text: str) -> None:
        """Show more text of the current utterance."""
        self._shown += text
        if self._live:
            print(text, end="", file=self._output, flush=True)

    def complete(self, text: str) -> None:
        """The whole text of the current utterance, which may differ from what was shown."""
        shown = self._shown
        self._shown = ""
        if not self._live:
            if text:
                print(text, file=self._output, flush=True)
            return
        if text != shown and len(shown) < shutil.get_terminal_size().columns:  # a longer one has several lines
            print(_CLEAR_LINE + text, end="", file=self._output)
        if text or shown:
            print(file=self._output, flush=True)


def run(settings: Listen) -> int:
    """Print the transcription of a file, of standard input or of a microphone's audio; returns the exit status."""
    try:
        asyncio.run(_listen(settings))
    except ServerError as error:
        print(f"quire listen: {error}", file=sys.stderr)
        return 1
    return 0


async def _listen(settings: Listen) -> None:
    file = None if settings.file is None else str(settings.file)
    rate = int(settings.rate) if file in (None, "-") else _FILE_RATE
    chunks: _Chunks
    if settings.file is None:
        chunks = from_microphone(settings.input_device, rate)
    elif file == "-":
        chunks = _from_stream(_standard_input(), rate)
    else:
        chunks = _from_file(settings.file, real_time=settings.real_time)
    async with aclosing(chunks):
        first = await anext(chunks, b"")  # before the server is asked for anything
        try:
            async with connect(
                _address(settings),
                additional_headers={"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else None,
                compression=None,
                max_size=None,
            ) as connection:
                await _Listener(connection, settings, rate).run(first, chunks)
        except InvalidStatus as error:
            raise ServerError(_refusal(error)) from error
        except (OSError, TimeoutError, InvalidURI, InvalidHandshake) as error:
            raise ServerError(f"{settings.url}: {error or 'no answer'}") from error
        except ConnectionClosed as error:
            raise ServerError(f"the server has closed the connection: {error}") from error


class _Listener:
    """One session: sends audio and prints text until both are at their end."""

    def __init__(self, connection: ClientConnection, settings: Listen, rate: int) -> None:
        self._connection = connection
        self._settings = settings
        self._rate = rate
        self._screen = Screen(sys.stdout)
        self._open: set[str] = set()  # utterances whose text is not complete
        self._all_sent = False

    async def run(self, first: bytes, chunks: _Chunks) -> None:
        """Run the session.

        Raises:
            ServerError: the server has reported an error.
        """
        await self._configure()
        sending = asyncio.create_task(self._send_audio(first, chunks))
        receiving = asyncio.create_task(self._print_text())
        try:
            await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in (sending, receiving):
                task.cancel()
            outcomes = await asyncio.gather(sending, receiving, return_exceptions=True)
        for outcome in reversed(outcomes):  # what the server says comes first
            if isinstance(outcome, Exception):
                raise outcome

    async def _configure(self) -> None:
        settings = self._settings
        transcription = {"model": settings.model_name, "language": settings.language, "prompt": settings.prompt}
        audio_input = {
            "format": {"type": "audio/pcm", "rate": self._rate},
            "transcription": {name: value for name, value in transcription.items() if value is not None},
        }
        await self._say("session.update", session={"type": "transcription", "audio": {"input": audio_input}})

    async def _send_audio(self, first: bytes, chunks: _Chunks) -> None:
        """Send the audio until it ends, or the user interrupts; then ask for the text of what was said last."""
        sending = asyncio.create_task(self._send_chunks(first, chunks))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, sending.cancel)
        try:
            with suppress(asyncio.CancelledError):
                await sending
        finally:
            sending.cancel()
            loop.remove_signal_handler(signal.SIGINT)
        await self._say("input_audio_buffer.commit", event_id="last")
        await self._say("input_audio_buffer.clear")  # the answer comes after that of all before it

    async def _send_chunks(self, first: bytes, chunks: _Chunks) -> None:
        if first:
            await self._say("input_audio_buffer.append", audio=base64.b64encode(first).decode())
        async for chunk in chunks:
            await self._say("input_audio_buffer.append", audio=base64.b64encode(chunk).decode())

    async def _print_text(self) -> None:
        while not (self._all_sent and not self._open):
            self._handle(json.loads(await self._connection.recv()))

    def _handle(self, event: dict[str, Any]) -> None:
        item = str(event.get("item_id"))
        match event.get("type"):
            case "input_audio_buffer.speech_started" | "input_audio_buffer.committed":
                self._open.add(item)
            case "input_audio_buffer.cleared":
                self._all_sent = True
            case "error" if event["error"].get("event_id") != "last":
                raise ServerError(event["error"]["message"])
            case str(kind) if kind.startswith(_TRANSCRIPTION):
                self._print(kind.removeprefix(_TRANSCRIPTION), item, event)

    def _print(self, kind: str, item: str, event: dict[str, Any]) -> None:
        match kind:
            case "delta":
                self._screen.add(event["delta"])
            case "completed":
                self._screen.complete(event["transcript"])
                self._open.discard(item)
            case "failed":
                raise ServerError(event["error"]["message"])

    async def _say(self, kind: str, **fields: Any) -> None:
        await self._connection.send(json.dumps({"type": kind, **fields}))


def _address(settings: Listen) -> str:
    """The WebSocket's URL."""
    base = settings.url.rstrip("/")
    for scheme, socket in (("https://", "wss://"), ("http://", "ws://")):
        if base.startswith(scheme):
            base = socket + base.removeprefix(scheme)
    model = settings.model_name
    return f"{base}/realtime?" + ("intent=transcription" if model is None else f"model={quote(model, safe='')}")


def _refusal(error: InvalidStatus) -> str:
    try:
        message = json.loads(error.response.body or b"")["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = "the server has refused the session"
    return f"{error.response.status_code}: {message}"


async def _from_file(path: Path, *, real_time: bool) -> _Chunks:
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
    step = int(_CHUNK_SECONDS * _FILE_RATE)
    for at in range(0, len(samples), step):
        if real_time:
            await asyncio.sleep(started + at / _FILE_RATE - clock())
        yield samples[at : at + step].tobytes()


async def _from_stream(stream: BinaryIO, rate: int) -> _Chunks:
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


async def from_microphone(device: str | None, rate: int) -> _Chunks:
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


def _standard_input() -> BinaryIO:
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
