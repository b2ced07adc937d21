"""One realtime session: handles the events of a client until either side ends it."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, replace

import msgspec
import orjson
from msgspec import UNSET
from starlette.websockets import WebSocket, WebSocketDisconnect

from quire.config.options import RealtimeOptions
from quire.multimodal.memory import Reservation
from quire.protocol.errors import ApiError
from quire.realtime.audio import RATE, AudioDecoder, Samples
from quire.realtime.captions import Captions, Utterance, UtteranceTrace
from quire.realtime.client_events import (
    Append,
    Clear,
    ClientEvent,
    Commit,
    SessionUpdate,
    TranscriptionSessionUpdate,
    parse_event,
)
from quire.realtime.dialects.choice import DialectChoice
from quire.realtime.dialects.dialect import Body, Dialect, SessionInfo
from quire.realtime.errors import EventError, SessionEnded
from quire.realtime.settings import SessionSettings
from quire.realtime.turn_detection import SpeechDetectorOf, TurnDetector, UtteranceEnded, UtteranceStarted
from quire.realtime.utterance_transcriber import TranscriberOf, UtteranceTranscriber
from quire.serving.models import ServerState
from quire.workers.errors import QueueFull
from quire.workers.tenant import current_tenant, take_turn

_BYTES_PER_SAMPLE = 8  # of audio that is appended: the buffer may have room for twice as much, and its end is copied
_BYTES_PER_UTTERED_SAMPLE = 6  # until the transcript has been sent: integers, and floats while it is made
_MAX_UNSENT = 256 << 10  # bytes of events that a client has not read
_TRY_AGAIN = 1012  # close code: the server restarts
_NORMAL = 1000


class Outbound:
    """A queue of encoded events, bounded by bytes: senders wait while a client reads slowly."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frames: deque[bytes] = deque()
        self._size = 0  # bytes of the frames, and of the one that is being written
        self._changed = asyncio.Condition()

    @property
    def size(self) -> int:
        """Bytes that wait."""
        return self._size

    async def put(self, frame: bytes) -> None:
        """Add an event once there is room; one that is larger than the bound waits for an empty queue."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._size or self._size + len(frame) <= self._max_bytes)
            self._frames.append(frame)
            self._size += len(frame)
            self._changed.notify_all()

    async def get(self) -> bytes:
        """The next event. It counts until `written`."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._frames))
            return self._frames.popleft()

    async def written(self, frame: bytes) -> None:
        """Note that the connection has taken an event."""
        async with self._changed:
            self._size -= len(frame)
            self._changed.notify_all()

    async def flushed(self) -> None:
        """Wait until all events have been written."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._size)


@dataclass(frozen=True, slots=True)
class SharedContext:
    """State that all sessions of a server share.

    Attributes:
        slots: limits the interim transcriptions that run at once.
        draining: set once the server shuts down.
        utterance_trace: a context in which an utterance is transcribed.
    """

    state: ServerState
    options: RealtimeOptions
    transcriber_of: TranscriberOf
    detector_of: SpeechDetectorOf
    slots: asyncio.Semaphore
    draining: asyncio.Event
    utterance_trace: UtteranceTrace = nullcontext


class Session:
    """A session over an accepted WebSocket."""

    def __init__(self, websocket: WebSocket, shared: SharedContext, choice: DialectChoice, facts: SessionInfo) -> None:
        self._websocket = websocket
        self._shared = shared
        self._choice = choice
        self._facts = facts
        self._outbound = Outbound(_MAX_UNSENT)
        self._decoder = AudioDecoder(facts.settings.audio_format)
        detection = facts.settings.effective_detection
        self._turns = TurnDetector(detection, shared.detector_of, shared.options.max_realtime_audio)
        self._held: Reservation | None = None  # memory for audio that is not part of an utterance which has ended
        self._utterance: Utterance | None = None
        self._item = ""  # of the current utterance
        self._previous_item: str | None = None

    async def run(self) -> SessionEnded:
        """Serve the client; returns why the session has ended, after all of its tasks have ended."""
        seconds = self._shared.options.realtime_session_timeout
        try:
            async with asyncio.timeout(seconds or None):
                over = await self._run_tasks()
        except TimeoutError:
            over = SessionEnded(
                _NORMAL, f"The session has reached its maximum duration of {seconds:g} s.", "session_expired"
            )
        finally:
            if self._held is not None:
                self._held.close()
        return over

    def closing_events(self, over: SessionEnded) -> list[Body]:
        """The events that give the client the reason of the end."""
        return [] if over.name is None else self._dialect.session_error(over.name, over.reason)

    @property
    def _dialect(self) -> Dialect:
        return self._choice.dialect

    async def _run_tasks(self) -> SessionEnded:
        over = SessionEnded(None)
        try:
            async with asyncio.TaskGroup() as group:
                self._captions = Captions(
                    group,
                    self._send,
                    lambda: self._dialect,
                    self._shared.slots,
                    self._shared.options.realtime_interim_interval,
                    self._shared.utterance_trace,
                )
                group.create_task(self._write())
                reading = group.create_task(self._read())
                group.create_task(self._drain(reading))
        except* SessionEnded as group_of_one:
            ended = group_of_one.exceptions[0]
            assert isinstance(ended, SessionEnded)
            over = ended
        return over

    async def _write(self) -> None:
        while True:
            frame = await self._outbound.get()
            try:
                await self._websocket.send_text(frame.decode())
            except (WebSocketDisconnect, RuntimeError) as error:  # RuntimeError: it has been closed
                raise SessionEnded(None) from error
            await self._outbound.written(frame)

    async def _send(self, bodies: list[Body]) -> None:
        for body in bodies:
            await self._outbound.put(orjson.dumps(body))

    async def _drain(self, reading: asyncio.Task[None]) -> None:
        """End the session when the server shuts down: what has been said is still transcribed."""
        await self._shared.draining.wait()
        reading.cancel()
        await asyncio.wait((reading,))
        if self._turns.speaking_since is not None:
            await self._end(self._turns.finish())
        await self._captions.complete()
        await self._send(self._dialect.drained())
        await self._outbound.flushed()
        raise SessionEnded(_TRY_AGAIN, "the server is shutting down")

    async def _read(self) -> None:
        await self._send(self._dialect.created(self._facts))
        idle = self._shared.options.realtime_idle_timeout
        while True:
            try:
                async with asyncio.timeout(idle or None):
                    message = await self._websocket.receive()
            except TimeoutError as error:
                reason = f"The session has ended because the client sent nothing for {idle:g} s."
                raise SessionEnded(_NORMAL, reason, "session_idle") from error
            if message["type"] == "websocket.disconnect":
                raise SessionEnded(None)
            try:
                await self._handle_frame(message.get("text"))
            except EventError as error:
                await self._send(self._dialect.error(error))

    async def _handle_frame(self, text: str | None) -> None:
        if text is None:
            raise EventError("Binary frames are not accepted: events must be JSON in text frames.", "invalid_event")
        event = parse_event(text, int(self._shared.options.max_realtime_event_size))
        try:
            self._decide_dialect(event)
            await self._handle(event)
        except EventError as error:
            error.event_id = event.event_id
            raise

    def _decide_dialect(self, event: ClientEvent) -> None:
        if (
            self._choice.decide(event)
            and self._facts.settings.audio_format != self._choice.dialect.defaults.audio_format
        ):
            self._configure(replace(self._facts.settings, audio_format=self._choice.dialect.defaults.audio_format))

    async def _handle(self, event: ClientEvent) -> None:
        match event:
            case SessionUpdate() | TranscriptionSessionUpdate():
                await self._update(event)
            case Append(audio=audio):
                await self._append(audio)
            case Commit(final=final):
                await self._commit(final)
            case Clear():
                await self._clear()

    async def _update(self, event: SessionUpdate | TranscriptionSessionUpdate) -> None:
        settings = self._dialect.updated_settings(event, self._facts.settings)
        check_settings(self._shared, self._dialect, settings)
        self._configure(settings)
        await self._send(self._dialect.updated(self._facts))

    def _configure(self, settings: SessionSettings) -> None:
        before = self._facts.settings
        self._facts.settings = settings
        if settings.audio_format != before.audio_format:
            self._decoder = AudioDecoder(settings.audio_format)
        if settings.effective_detection != before.effective_detection:
            self._turns.detect(settings.effective_detection)

    def _speech(self) -> UtteranceTranscriber:
        return transcriber_of(self._shared, self._dialect, self._facts.settings)

    async def _append(self, audio: str) -> None:
        speech = self._speech()
        seconds = self._decoder.seconds(audio)
        self._turns.check_room(seconds)
        self._reserve(seconds)
        try:
            async for samples in self._decoder.decode(audio):
                await take_turn()  # large events leave room for other sessions
                await self._hear(samples, speech)
        finally:
            if self._held is not None:
                self._held.resize(min(self._held.size, self._turns.nbytes))

    def _reserve(self, seconds: float) -> None:
        """Reserve memory for further audio; what is known of live audio is only that it does not wait.

        Raises:
            EventError: there is none.
        """
        size = int(seconds * RATE) * _BYTES_PER_SAMPLE
        try:
            if self._held is None:
                self._held = self._shared.state.media_memory.take(size, current_tenant())
            else:
                self._held.grow(size)
        except QueueFull as error:
            raise EventError(f"The audio was not appended: {error}.", "audio_memory_full", "audio") from error

    async def _hear(self, samples: Samples, speech: UtteranceTranscriber) -> None:
        for event in self._turns.push(samples, None if speech.streaming is None else speech.streaming.max_seconds):
            match event:
                case UtteranceStarted(start=start):
                    await self._begin(start, speech)
                case UtteranceEnded():
                    await self._end(event)
        if self._utterance is not None and self._turns.speaking_since is not None:
            await self._utterance.grow(self._turns.position - self._turns.speaking_since)

    async def _begin(self, start: int, speech: UtteranceTranscriber) -> None:
        self._item = _new_item()
        await self._send(self._dialect.speech_started(self._item, _milliseconds(start)))
        self._utterance = await self._captions.begin(self._item, self._facts.settings, speech, self._turns.current)

    async def _end(self, ended: UtteranceEnded) -> None:
        """Complete the current utterance; without voice activity, all audio so far is one."""
        if self._utterance is None:
            if not ended.by_voice_activity:
                self._item = _new_item()
            settings = self._facts.settings
            speech = self._speech()
            audio = ended.audio
            self._utterance = await self._captions.begin(self._item, settings, speech, lambda start: audio[start:])
        else:
            self._utterance.complete(ended.audio)
        if ended.by_voice_activity:
            await self._send(self._dialect.speech_stopped(self._item, _milliseconds(ended.end)))
        await self._send(self._dialect.committed(self._item, self._previous_item))
        self._previous_item = self._item
        if self._held is not None:
            self._held.pass_on(ended.audio, _BYTES_PER_UTTERED_SAMPLE * len(ended.audio))
        utterance = self._utterance
        self._utterance = None
        await utterance.end()

    async def _commit(self, final: bool | msgspec.UnsetType) -> None:
        speech = self._speech()
        if not self._dialect.commits_end_utterances:
            if final is UNSET or not final:
                return  # a generation begins, or goes on: audio is transcribed as it comes
            await self._hear(self._decoder.flush(), speech)
            if self._turns.speaking_since is not None:
                await self._end(self._turns.finish())
            self._captions.when_complete()
            return
        await self._hear(self._decoder.flush(), speech)
        await self._end(self._turns.commit())

    async def _clear(self) -> None:
        self._decoder.flush()
        self._turns.clear()
        if self._utterance is not None:
            self._captions.discard(self._utterance)
            self._utterance = None
        await self._send(self._dialect.cleared())


def transcriber_of(shared: SharedContext, dialect: Dialect, settings: SessionSettings) -> UtteranceTranscriber:
    """The transcriber of a session's model.

    Raises:
        EventError: it does not exist, does not transcribe, or has not been named.
    """
    if settings.model is None and not dialect.commits_end_utterances:
        raise EventError("Send session.update with a `model` first.", "model_not_validated")
    try:
        return shared.transcriber_of(shared.state.transcribing_model(settings.model))
    except ApiError as error:
        raise EventError(error.message, "model_not_found", "model") from error


def check_settings(shared: SharedContext, dialect: Dialect, settings: SessionSettings) -> None:
    """Refuse settings that the model does not support.

    Raises:
        EventError: the model does not exist, or does not support a setting.
    """
    speech = transcriber_of(shared, dialect, settings)
    try:
        speech.check(settings)
    except ApiError as error:
        raise EventError(error.message, "invalid_value", error.param) from error


def _new_item() -> str:
    return f"item_{uuid.uuid4().hex[:24]}"


def _milliseconds(samples: int) -> int:
    return samples * 1000 // RATE
