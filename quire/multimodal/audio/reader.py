"""Decodes files in worker processes and computes features in threads, off the event loop, within reserved memory."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.config.options import AudioOptions
from quire.multimodal.audio.decode import PARAM, AudioError, DecodedAudio, DecodeJob, LongerAudio
from quire.multimodal.audio.features import SAMPLE_RATE, log_mel
from quire.multimodal.audio.limits import AudioLimits
from quire.multimodal.memory import MediaMemory, Reservation
from quire.multimodal.preparation import MemoryNeed, NeedsMore, prepare_together
from quire.workers.errors import JobKilled, JobTimedOut, QueueFull
from quire.workers.limits import WorkerLimits
from quire.workers.pool import WorkerPool
from quire.workers.threads import FairThreads

Result = TypeVar("Result")
MakeOfAudio: TypeAlias = Callable[[int, DecodedAudio, Reservation], Awaitable[Result]]  # gets the index of a file
_SECONDS = 90.0  # of processor time to decode a file; an hour of Opus takes 25
_WORKER_MEMORY = 256 << 20  # bytes, beside the file and the result
_SAMPLE = 4  # bytes
_COPIES = 7  # of a file while it is sent: three in this process, four in the worker
# samples for which memory is reserved: for each byte of a file, and in any case
_LIKELY = 8
_LEAST = 1 << 18


@dataclass(frozen=True, slots=True)
class AudioFile:
    """A file of a request.

    Attributes:
        content: the file.
        param: the field or the content part of the request that it came in, for errors.
        is_video: it is a video, whose sound is read. It may be silent.
    """

    content: IO[bytes]
    param: str = PARAM
    is_video: bool = False


@dataclass(frozen=True, slots=True)
class AudioUse:
    """How much memory the user of a file's audio takes, in bytes for a number of samples.

    Attributes:
        while_made: beside the samples, until the result is made of them.
        result: of what is made of them, with the samples if they stay.
    """

    while_made: Callable[[int], int]
    result: Callable[[int], int]


class AudioReader:
    """Prepare the audio of one model's requests.

    Attributes:
        limits: limits of files.
        memory: the memory for media, which the readers of all models share.
    """

    def __init__(
        self,
        options: AudioOptions,
        memory: MediaMemory,
        *,
        max_video_size: int = 0,
        max_queued: int = 1024,
        share: float = 1.0,
    ) -> None:
        """Prepare; the first file starts what it needs.

        Args:
            options: limits of files.
            memory: the memory for media.
            max_video_size: bytes of the largest video whose sound is read.
            max_queued: files that may wait for a process.
            share: the largest part of these for one tenant; see `Shares`.
        """
        self.limits = AudioLimits(
            int(options.max_audio_size),
            options.max_audio_seconds,
            int(options.max_audio_decoded_size),
            max_video_size,
        )
        largest = max(self.limits.size, max_video_size)
        self.memory = memory
        self._most = round(SAMPLE_RATE * self.limits.seconds)
        self._processes = WorkerPool(
            "audio",
            "quire.multimodal.audio.decode:worker",
            (self.limits,),
            WorkerLimits(memory=_WORKER_MEMORY + 4 * largest + 5 * self._most, seconds=_SECONDS, stack=1 << 24),
            size=2,
            max_queued=max_queued,
            share=share,
        )
        self._threads = FairThreads("audio", size=2, max_queued=4 * max_queued, share=share)

    async def decode(
        self, files: Sequence[AudioFile], use: AudioUse, make: MakeOfAudio[Result], *, tenant: str = ""
    ) -> list[Result]:
        """Decode the files of a request, and make something of the audio of each; see `AudioPreparation`.

        Raises:
            AudioError: a file is empty, not audio, broken, or beyond a limit.
            PromptError: all need more memory than there is.
            QueueFull: too many files wait, or have waited for too long.
            WorkerError: processes cannot be started.
        """
        preparation = self.preparation(files, use, make, tenant=tenant)
        (results,) = await prepare_together(self.memory, [preparation], tenant)
        return list(results)

    def preparation(
        self,
        files: Sequence[AudioFile],
        use: AudioUse,
        make: MakeOfAudio[Result],
        *,
        tenant: str = "",
        beside: int = 0,
    ) -> AudioPreparation[Result]:
        """The audio of a request.

        Args:
            files, use, make: see `AudioPreparation`.
            tenant: the tenant that sent the files; tenants take turns.
            beside: bytes that other media of the request need.
        """
        decode, guess = partial(self._decoded, tenant), (self.memory.most - beside) // 2
        return AudioPreparation(decode, files, use, make, self._most, guess)

    async def _decoded(self, tenant: str, file: AudioFile, reserved: int) -> DecodedAudio:
        try:
            audio: DecodedAudio = await self._processes.run(_FileToDecode(file, reserved), tenant=tenant)
        except AudioError as error:
            raise AudioError(str(error), file.param) from error
        except JobTimedOut as error:
            if error.stalled:
                raise QueueFull("the file waited too long for processor time") from error
            raise AudioError(f"Decoding the file took more than {_SECONDS:g} s.", file.param) from error
        except JobKilled as error:
            raise AudioError(f"The file cannot be decoded: {error}.", file.param) from error
        return audio

    async def log_mel(
        self, samples: NDArray[np.float32], num_mel_bins: int, seconds: float, *, tenant: str = ""
    ) -> NDArray[np.float32]:
        """Log-mel features of samples, computed by `features.log_mel` in a thread.

        Raises:
            QueueFull: too many jobs wait.
        """
        return await self.run(partial(log_mel, samples, num_mel_bins, seconds), tenant=tenant)

    async def run(self, work: Callable[[], Result], *, tenant: str = "") -> Result:
        """Run a function in a thread; see `FairThreads.run`."""
        return await self._threads.run(work, tenant=tenant)

    async def close(self) -> None:
        """End the threads and processes."""
        self._threads.close()
        await self._processes.close()


class AudioPreparation(Generic[Result]):
    """The audio of a request, decoded one file after the other; see `Preparation`.

    How long audio is, its file tells when it is opened. So memory is first reserved for audio that is as long as most
    of its size, and if that is too little, once more.
    """

    def __init__(
        self,
        decode: Callable[[AudioFile, int], Awaitable[DecodedAudio]],
        files: Sequence[AudioFile],
        use: AudioUse,
        make: MakeOfAudio[Result],
        longest: int,
        most_guessed: int,
    ) -> None:
        """Begin.

        Args:
            decode: decodes a file that has at most so many samples.
            files: the files, which are read once a process is free to decode them.
            use: memory that `make` takes.
            make: gets the index of a file and its audio. What it keeps is passed on by the reservation.
            longest: most samples of a file.
            most_guessed: bytes that are reserved at most for audio whose length is not known.
        """
        self._decode = decode
        self._files = files
        self._use = use
        self._make = make
        self._sizes = [file.content.seek(0, os.SEEK_END) for file in files]
        self._samples = [min(longest, max(_LEAST, _LIKELY * size)) for size in self._sizes]
        while self.need.peak > most_guessed and max(self._samples) > 1:
            self._samples = [count // 2 for count in self._samples]

    @property
    def need(self) -> MemoryNeed:
        """The memory that is needed if files have at most as many samples as is thought now."""
        peak = held = 0
        for size, count in zip(self._sizes, self._samples, strict=True):
            decoding = _COPIES * size + 2 * _SAMPLE * count  # the samples are in the worker, then here as well
            result = self._use.result(count)
            peak = max(peak, held + decoding, held + result + self._use.while_made(count))
            held += result
        longest = self._files[max(range(len(self._files)), key=self._samples.__getitem__)]
        return MemoryNeed(peak, held, longest.param)

    async def run(self, reservation: Reservation) -> list[Result]:
        """What is made of each file.

        Raises:
            NeedsMore: a file has more audio than was thought.
            AudioError, QueueFull, WorkerError: as of `AudioReader.decode`.
        """
        results: list[Result] = []
        fits = True
        for index, file in enumerate(self._files):
            try:
                audio = await self._decode(file, self._samples[index])
            except LongerAudio as longer:
                self._samples[index] = longer.samples
                fits = False
            else:
                if fits:
                    results.append(await self._make(index, audio, reservation))
                del audio
        if not fits:
            results.clear()  # the error refers to them
            raise NeedsMore
        return results

    async def renew(self) -> None:
        """Do nothing: `run` has found out how long the audio is."""


class _FileToDecode:
    """A job of `decode.worker`. The file is read when it is sent to a process: until then a large one is on disk."""

    def __init__(self, file: AudioFile, reserved: int) -> None:
        self._file = file
        self._reserved = reserved

    def __reduce__(self) -> tuple[Any, ...]:
        content = self._file.content
        content.seek(0)
        return DecodeJob, (content.read(), self._reserved, self._file.is_video)
