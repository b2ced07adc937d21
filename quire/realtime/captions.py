"""Transcribes the utterances of a session: interim passes while they are spoken, then a final one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.engine.client.errors import EngineError, EngineOverloaded
from quire.engine.client.origin import current_origin
from quire.multimodal.errors import PromptError
from quire.protocol.errors import ApiError, as_api_error
from quire.realtime.audio import RATE, Samples, to_float
from quire.realtime.dialects.dialect import Body, Dialect
from quire.realtime.settings import SessionSettings
from quire.realtime.stable_prefix import StablePrefix
from quire.realtime.transcript import Transcript
from quire.realtime.utterance_transcriber import StreamingTranscriber, UtteranceTranscriber
from quire.speech.types import TranscriptDelta
from quire.workers.errors import WorkerError

logger = logging.getLogger(__name__)
Send = Callable[[list[Body]], Awaitable[None]]
UtteranceTrace = Callable[[], AbstractContextManager[None]]  # makes the context in which an utterance is transcribed
_UNFINISHED = 4  # utterances of a session; further audio is not read
_ATTEMPTS = 5  # at an utterance that a full queue refuses
_SERVER_ERROR = 500
_SECONDS_OF_DELAY = {"minimal": 0.2, "low": 0.5, "medium": 1.0, "high": 2.0, "xhigh": 4.0}


@dataclass(slots=True)
class Utterance:
    """Speech that is being transcribed.

    Attributes:
        audio: gives its samples so far, from an index on.
    """

    item: str
    settings: SessionSettings
    transcriber: UtteranceTranscriber
    audio: Callable[[int], Samples]
    _length: int = 0
    _ended: bool = False
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def grow(self, length: int) -> None:
        """Set the number of samples so far."""
        async with self._changed:
            self._length = length
            self._changed.notify_all()

    def complete(self, audio: Samples) -> None:
        """Set all of its audio. To be called as soon as it is known, because `audio` changes then; `end` follows."""
        self.audio = lambda start: audio[start:]

    async def end(self) -> None:
        """Mark the utterance as ended: its transcript may be sent."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def ended(self) -> None:
        """Wait for the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended)

    async def pieces(self) -> AsyncGenerator[NDArray[np.float32], None]:
        """Pieces of its audio as it arrives, until its end."""
        taken = 0
        ended = False
        while not ended:
            async with self._changed:
                while not self._ended and self._length <= taken:
                    await self._changed.wait()
                ended = self._ended
            samples = self.audio(taken)
            taken += len(samples)
            if len(samples):
                yield to_float(samples)

    async def reaches(self, length: int) -> int:
        """Wait until there are `length` samples; returns how many there are."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._length >= length)
            return self._length


class Captions:
    """The utterances of a session, each with a task of its own. Their texts are sent in order."""

    def __init__(
        self,
        group: asyncio.TaskGroup,
        send: Send,
        dialect: Callable[[], Dialect],
        slots: asyncio.Semaphore,
        interval: float,
        trace: UtteranceTrace = nullcontext,
    ) -> None:
        """Prepare for a session; nothing runs yet.

        Args:
            group: of the tasks.
            send: sends events to the client.
            dialect: makes the events.
            slots: limits the interim passes that run at once, over all sessions.
            interval: minimum seconds of new audio between two interim passes; 0: no interim passes.
            trace: makes the context of an utterance.
        """
        self._group = group
        self._send = send
        self._dialect = dialect
        self._slots = slots
        self._interval = interval
        self._trace = trace
        self._room = asyncio.Semaphore(_UNFINISHED)
        self._last = asyncio.Event()  # set when the latest utterance is complete
        self._last.set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(
        self,
        item: str,
        settings: SessionSettings,
        transcriber: UtteranceTranscriber,
        audio: Callable[[int], Samples],
    ) -> Utterance:
        """Start an utterance; waits while too many are not complete."""
        await self._room.acquire()
        utterance = Utterance(item, settings, transcriber, audio)
        previous = self._last
        self._last = asyncio.Event()
        task = self._group.create_task(self._traced(utterance, previous, self._last), name=f"utterance {item}")
        self._tasks[item] = task
        return utterance

    def discard(self, utterance: Utterance) -> None:
        """Forget an utterance."""
        self._tasks[utterance.item].cancel()

    def when_complete(self) -> None:
        """Tell the client that a generation is complete, after all utterances so far."""
        previous = self._last
        self._last = asyncio.Event()
        self._group.create_task(self._complete(previous, self._last))

    async def complete(self) -> None:
        """Wait until all utterances are complete."""
        await self._last.wait()

    async def _complete(self, previous: asyncio.Event, done: asyncio.Event) -> None:
        await previous.wait()
        await self._send(self._dialect().generated())
        done.set()

    async def _traced(self, utterance: Utterance, previous: asyncio.Event, done: asyncio.Event) -> None:
        with self._trace():
            await self._caption(utterance, previous, done)

    async def _caption(self, utterance: Utterance, previous: asyncio.Event, done: asyncio.Event) -> None:
        try:
            if (streaming := utterance.transcriber.streaming) is not None:
                await self._finish(utterance, previous, partial(self._stream, streaming, utterance, previous))
                return
            stable = StablePrefix()
            async with asyncio.TaskGroup() as group:
                passes = group.create_task(self._caption_growing(utterance, stable, previous))
                await utterance.ended()
                passes.cancel()
            await self._finish(utterance, previous, partial(self._last_pass, utterance, stable, previous), stable)
        finally:
            del self._tasks[utterance.item]
            self._room.release()
            with suppress(asyncio.CancelledError):
                await previous.wait()
            done.set()

    async def _caption_growing(self, utterance: Utterance, stable: StablePrefix, previous: asyncio.Event) -> None:
        """Interim passes over the growing audio; words that two passes in a row agree on are sent."""
        delay = utterance.settings.delay
        interval = self._interval if delay is None else _SECONDS_OF_DELAY[delay]
        if not self._interval:
            return
        clock = asyncio.get_running_loop().time
        due = int(interval * RATE)
        while True:
            await utterance.reaches(due)
            async with self._slots:
                started = clock()
                audio = utterance.audio(0)
                try:
                    transcript = await self._transcript(utterance, audio, draft=True)
                except EngineOverloaded:
                    due = len(audio) + int(2 * interval * RATE)
                    continue
                except (ApiError, EngineError, PromptError, WorkerError) as error:  # the last pass reports it
                    logger.debug("a pass over an utterance failed: %s", error)
                    return
            start = stable.sent_until(transcript.text)
            words = stable.stable_words(transcript.text)
            if words:
                text = "".join(words)
                await previous.wait()
                logprobs = transcript.logprobs_between(start, start + len(text))
                await self._send(self._dialect().delta(utterance.item, text, logprobs))
                stable.record_sent(words)
            # At most a third of the time is spent on passes, so that sessions slow down together when there are many.
            due = len(audio) + int(max(interval, 2 * (clock() - started)) * RATE)

    async def _finish(
        self,
        utterance: Utterance,
        previous: asyncio.Event,
        transcribe: Callable[[], Awaitable[Transcript]],
        stable: StablePrefix | None = None,
    ) -> None:
        """Send the final transcript, or why there is none, once the utterance has ended.

        `stable`: text that was sent of interim transcripts.
        """
        item = utterance.item
        try:
            transcript = await self._with_retries(transcribe)
        except (EngineError, PromptError, WorkerError) as error:
            failure = as_api_error(error)
        except ApiError as error:
            failure = error
        except Exception:
            logger.exception("the transcription of an utterance failed")
            failure = ApiError("Internal server error")
        else:
            await utterance.ended()
            await previous.wait()
            length = len(transcript.text)
            if stable is not None and stable.sent and (remaining := stable.remaining(transcript.text)):
                logprobs = transcript.logprobs_between(length - len(remaining), length)
                await self._send(self._dialect().delta(item, remaining, logprobs))
            await self._send(self._dialect().completed(item, transcript))
            return
        await utterance.ended()
        await previous.wait()
        current_origin().notes.error = type(failure).__name__
        fault = failure.status >= _SERVER_ERROR
        await self._send(self._dialect().failed(item, "transcription_failed", failure.message, is_server_error=fault))

    async def _last_pass(self, utterance: Utterance, stable: StablePrefix, previous: asyncio.Event) -> Transcript:
        """The final transcript. Its text is sent while it is generated, unless interim text was sent before."""
        send_text = None if stable.sent else partial(self._send_text, utterance, previous)
        return await self._transcript(utterance, utterance.audio(0), send_text, draft=False)

    async def _stream(
        self, streaming: StreamingTranscriber, utterance: Utterance, previous: asyncio.Event
    ) -> Transcript:
        """The transcript of an utterance that is being spoken. Its text is sent while it is generated."""
        send_text = partial(self._send_text, utterance, previous)
        return _stripped(await streaming.transcribe(utterance.pieces(), utterance.settings, send_text))

    async def _send_text(self, utterance: Utterance, previous: asyncio.Event, piece: TranscriptDelta) -> None:
        logprobs = piece.logprobs if utterance.settings.logprobs else None
        if not piece.text and not logprobs:
            return
        await previous.wait()
        await self._send(self._dialect().delta(utterance.item, piece.text, logprobs))

    @staticmethod
    async def _with_retries(transcribe: Callable[[], Awaitable[Transcript]]) -> Transcript:
        """The transcript; repeated while the engine's queue is full."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await transcribe()
            except EngineOverloaded as error:
                if attempt == _ATTEMPTS:
                    raise
                await asyncio.sleep(error.retry_after)
        raise AssertionError

    @staticmethod
    async def _transcript(
        utterance: Utterance,
        audio: Samples,
        send_text: Callable[[TranscriptDelta], Awaitable[None]] | None = None,
        *,
        draft: bool,
    ) -> Transcript:
        """One pass. `send_text` gets the text while it is generated."""
        sent = False
        running = utterance.transcriber.transcribe(to_float(audio), utterance.settings, draft=draft)
        async with aclosing(running) as pieces:
            async for piece in pieces:
                if isinstance(piece, Transcript):
                    return _stripped(piece)
                if send_text is not None:
                    stripped = piece if sent else replace(piece, text=piece.text.lstrip())
                    await send_text(stripped)
                    sent = sent or bool(stripped.text)
        raise ApiError("The transcription has ended without a text.")


def _stripped(transcript: Transcript) -> Transcript:
    return replace(transcript, text=transcript.text.strip())
