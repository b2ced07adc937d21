"""Turns a session's utterances into text, while they are spoken and when they have ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.api.http.errors import ApiError, as_api_error
from quire.engine.wire.errors import EngineError, EngineOverloaded
from quire.multimodal.errors import PromptError
from quire.realtime.audio import RATE, Samples, to_float
from quire.realtime.dialects.dialect import Body, Dialect
from quire.realtime.settings import SessionSettings
from quire.realtime.speech import LiveSpeech, Speech, Transcript
from quire.realtime.stable_prefix import StablePrefix
from quire.workers.errors import WorkerError

logger = logging.getLogger(__name__)
Send = Callable[[list[Body]], Awaitable[None]]
_UNFINISHED = 4  # utterances of a session; further audio is not read
_ATTEMPTS = 5  # at an utterance that a full queue refuses
_SERVER_ERROR = 500
_SECONDS_OF_DELAY = {"minimal": 0.3, "low": 0.5, "medium": 1.0, "high": 2.0, "xhigh": 4.0}


@dataclass(slots=True)
class Utterance:
    """Speech that is being transcribed.

    Attributes:
        audio: its samples so far, from an index on.
    """

    item: str
    settings: SessionSettings
    speech: Speech
    audio: Callable[[int], Samples]
    _length: int = 0
    _ended: bool = False
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def grow(self, length: int) -> None:
        """There are so many samples now."""
        async with self._changed:
            self._length = length
            self._changed.notify_all()

    def complete(self, audio: Samples) -> None:
        """This is all of its audio. To be called as soon as that is known; `end` follows."""
        self.audio = lambda start: audio[start:]

    async def end(self) -> None:
        """Nothing that has to be told before its transcript is left."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def ended(self) -> None:
        """Wait for the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended)

    async def pieces(self) -> AsyncGenerator[NDArray[np.float32], None]:
        """Its audio as it comes, until its end."""
        taken, ended = 0, False
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
        """Wait for so many samples; returns how many there are."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._length >= length)
            return self._length


class Captions:
    """The utterances of a session, each with a task of its own. Their texts are told in order."""

    def __init__(
        self,
        group: asyncio.TaskGroup,
        send: Send,
        dialect: Callable[[], Dialect],
        slots: asyncio.Semaphore,
        interval: float,
    ) -> None:
        """Nothing runs yet.

        Args:
            group: of the tasks.
            send: tells the client.
            dialect: how it is told.
            slots: of passes over utterances that have not ended; all sessions share them.
            interval: seconds of new audio after which there is another pass, at the earliest; 0: there are none.
        """
        self._group = group
        self._send = send
        self._dialect = dialect
        self._slots = slots
        self._interval = interval
        self._room = asyncio.Semaphore(_UNFINISHED)
        self._last = asyncio.Event()  # set when the latest utterance is complete
        self._last.set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(
        self, item: str, settings: SessionSettings, speech: Speech, audio: Callable[[int], Samples]
    ) -> Utterance:
        """Start with an utterance, once there are not too many."""
        await self._room.acquire()
        utterance = Utterance(item, settings, speech, audio)
        previous, self._last = self._last, asyncio.Event()
        task = self._group.create_task(self._caption(utterance, previous, self._last), name=f"utterance {item}")
        self._tasks[item] = task
        return utterance

    def discard(self, utterance: Utterance) -> None:
        """Forget an utterance."""
        self._tasks[utterance.item].cancel()

    def when_complete(self) -> None:
        """Tell the client that a generation is complete, after all utterances so far."""
        previous, self._last = self._last, asyncio.Event()
        self._group.create_task(self._complete(previous, self._last))

    async def complete(self) -> None:
        """Wait until all utterances are complete."""
        await self._last.wait()

    async def _complete(self, previous: asyncio.Event, done: asyncio.Event) -> None:
        await previous.wait()
        await self._send(self._dialect().generated())
        done.set()

    async def _caption(self, utterance: Utterance, previous: asyncio.Event, done: asyncio.Event) -> None:
        try:
            if (live := utterance.speech.live) is not None:
                await self._conclude(utterance, previous, partial(self._follow, live, utterance, previous))
                return
            stable = StablePrefix()
            async with asyncio.TaskGroup() as group:
                passes = group.create_task(self._caption_growing(utterance, stable, previous))
                await utterance.ended()
                passes.cancel()
            await self._conclude(utterance, previous, partial(self._last_pass, utterance, stable, previous), stable)
        finally:
            del self._tasks[utterance.item]
            self._room.release()
            with suppress(asyncio.CancelledError):
                await previous.wait()
            done.set()

    async def _caption_growing(self, utterance: Utterance, stable: StablePrefix, previous: asyncio.Event) -> None:
        """Pass after pass over the growing audio; what two of them agree on is told."""
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
            words = stable.agreed(transcript.text.strip())
            if words:
                await previous.wait()
                await self._send(self._dialect().delta(utterance.item, "".join(words)))
                stable.tell(words)
            # At most a third of the time is spent on passes, so that sessions slow down together when there are many.
            due = len(audio) + int(max(interval, 2 * (clock() - started)) * RATE)

    async def _conclude(
        self,
        utterance: Utterance,
        previous: asyncio.Event,
        transcribe: Callable[[], Awaitable[Transcript]],
        stable: StablePrefix | None = None,
    ) -> None:
        """Tell the transcript of the whole utterance, or why there is none, once it has ended.

        `stable`: what has been told of other transcripts than this one.
        """
        item = utterance.item
        try:
            transcript = await self._patiently(transcribe)
        except (EngineError, PromptError, WorkerError) as error:
            failure = as_api_error(error)
        except ApiError as error:
            failure = error
        except Exception:
            logger.exception("the transcription of an utterance failed")
            failure = ApiError("Internal server error")
        else:
            text = transcript.text.strip()
            await utterance.ended()
            await previous.wait()
            if stable is not None and stable.told and (rest := stable.rest(text)):
                await self._send(self._dialect().delta(item, rest))
            await self._send(self._dialect().completed(item, text, transcript.usage, transcript.language))
            return
        await utterance.ended()
        await previous.wait()
        fault = failure.status >= _SERVER_ERROR
        await self._send(self._dialect().failed(item, "transcription_failed", failure.message, servers_fault=fault))

    async def _last_pass(self, utterance: Utterance, stable: StablePrefix, previous: asyncio.Event) -> Transcript:
        """The transcript; its text is told as it comes, unless some was told before."""
        tell = None if stable.told else partial(self._tell, utterance, previous)
        return await self._transcript(utterance, utterance.audio(0), tell, draft=False)

    async def _follow(self, live: LiveSpeech, utterance: Utterance, previous: asyncio.Event) -> Transcript:
        """The transcript, whose text is told while the utterance is spoken."""
        return await live.follow(utterance.pieces(), utterance.settings, partial(self._tell, utterance, previous))

    async def _tell(self, utterance: Utterance, previous: asyncio.Event, text: str) -> None:
        await previous.wait()
        await self._send(self._dialect().delta(utterance.item, text))

    @staticmethod
    async def _patiently(transcribe: Callable[[], Awaitable[Transcript]]) -> Transcript:
        """The transcript, even if the queue has been full for a while."""
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
        utterance: Utterance, audio: Samples, tell: Callable[[str], Awaitable[None]] | None = None, *, draft: bool
    ) -> Transcript:
        """One pass. `tell` gets the text as it comes."""
        told = False
        running = utterance.speech.transcribe(to_float(audio), utterance.settings, draft=draft)
        async with aclosing(running) as pieces:
            async for piece in pieces:
                if isinstance(piece, Transcript):
                    return piece
                text = piece if told else piece.lstrip()
                if tell is not None and text:
                    await tell(text)
                    told = True
        raise ApiError("The transcription has ended without a text.")
