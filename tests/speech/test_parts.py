"""A model that stops before the end of a window: what it has not transcribed becomes a further part, once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import AddRequest
from quire.speech.segments import LEAST_ADVANCE, SegmentSpan, next_start
from quire.speech.speech_stretches import SpeechStretches
from quire.speech.transcriber import Transcriber
from quire.speech.types import TranscriptDelta, TranscriptionDone, TranscriptionOptions
from tests.support.audio import Samples, voice
from tests.support.server import Server
from tests.support.speech import END, SpeechCore, at, prompts, speech_server, spoken, text

PAUSE = np.zeros(6 * 16_000, np.float32)
# Two seconds of speech at 0, 8 and 16 s.
THREE = np.concatenate([voice(2.0), PAUSE, voice(2.0, hertz=150.0), PAUSE, voice(2.0)])


async def transcribe(server: Server, audio: Samples, **options: Any) -> tuple[TranscriptionDone, str]:
    """The end of a transcription with timestamps, and the text of its pieces."""
    model = server.state.models[0]
    with model.client.slots(1):
        stream = Transcriber(model).transcribe(
            audio, TranscriptionOptions(**{"language": "en", "timestamps": True, **options})
        )
        async with aclosing(stream) as events:
            collected = [event async for event in events]
    last = collected[-1]
    assert isinstance(last, TranscriptionDone)
    assert last.text == "".join(event.text for event in collected if isinstance(event, TranscriptDelta))
    assert model.client.slots_in_use == 0
    return last, last.text


def stretches(message: AddRequest) -> list[tuple[float, float]]:
    """Start and end of what is loud in the features of a request, with pauses of a second in between."""
    features = message.audio_items[0].features
    loud = np.flatnonzero(features.max(axis=0) > features.min() + 0.3)
    parts = np.split(loud, np.flatnonzero(np.diff(loud) > 100) + 1)
    return [(part[0] / 100, (part[-1] + 1) / 100) for part in parts if len(part)] or [(0.0, 1.0)]


def spread(message: AddRequest) -> np.ndarray:
    """An alignment in which the tokens share what is loud, and the end takes what is left."""
    task = message.params
    assert isinstance(task, PoolingParams)
    assert task.num_positions is not None
    rows = len(message.prompt) - task.skip_tokens
    result = np.zeros((rows, task.num_positions), np.float32)
    start, end = stretches(message)[0][0] * 50, stretches(message)[0][1] * 50
    edges = np.linspace(start, end, rows - 1).astype(int)
    for row, (first, last) in enumerate(pairwise(edges)):
        result[row, first:last] = 1.0
    result[rows - 2, edges[-1] :] = 1.0
    return result


def first_stretch_alone(words: Sequence[str], ending: str) -> SpeechCore:
    """A model that transcribes the speech before the first pause of what it gets, and stops there."""
    left = iter(words)

    def answer(message: AddRequest) -> list[int]:
        start, end = stretches(message)[0]
        behind = {"pair": [at(end), at(end)], "single": [at(end)], "none": []}[ending]
        return [at(min(start, 1.0)), *text(f" {next(left)}"), *behind, END]

    return SpeechCore(answer=answer, alignment=spread)


@pytest.mark.parametrize("ending", ["pair", "single", "none"])
@pytest.mark.parametrize("live", [False, True])
async def test_speech_behind_a_pause_is_not_lost_and_has_its_times(tmp_path: Path, ending: str, live: bool) -> None:
    async with speech_server(tmp_path, first_stretch_alone(("one", "two", "three"), ending)) as server:
        last, _ = await transcribe(server, THREE, live=live, words=True)
        assert last.text == "one two three"
        assert [segment.text.strip() for segment in last.segments] == ["one", "two", "three"]
        assert [segment.start for segment in last.segments] == pytest.approx([0.0, 8.0, 16.0], abs=0.1)
        assert [segment.end for segment in last.segments] == pytest.approx([2.0, 10.0, 18.0], abs=0.15)
        assert [(word.start, word.end) for word in last.words] == [
            (segment.start, segment.end) for segment in last.segments
        ]
        assert [segment.seek for segment in last.segments] == sorted({segment.seek for segment in last.segments})
        assert last.usage.audio_tokens == 900  # each position is counted once


async def test_leading_silence_is_not_part_of_a_segment(tmp_path: Path) -> None:
    async with speech_server(tmp_path, first_stretch_alone(("one",), "single")) as server:
        last, _ = await transcribe(server, np.concatenate([PAUSE, voice(2.0)]), words=True)
        (segment,) = last.segments
        assert (segment.start, segment.end) == pytest.approx((6.0, 8.0), abs=0.15)
        assert (last.words[0].start, last.words[0].end) == (segment.start, segment.end)


async def test_a_segment_is_divided_at_a_long_pause(tmp_path: Path) -> None:
    def both(message: AddRequest) -> np.ndarray:
        result = spread(message)
        result[:] = 0.0
        for row in range(len(result)):
            result[row, (8 * 50 if row >= len(text(" one")) else 0) + 10 * row :][:10] = 1.0
        result[len(text(" one")) - 1, 30:100] = result[len(text(" one")), 400:450] = 1.0
        return result

    answered = [at(0.0), *text(" one two"), at(10.0), END]
    async with speech_server(tmp_path, SpeechCore(answer=lambda message: answered, alignment=both)) as server:
        last, _ = await transcribe(server, THREE[: 10 * 16_000], words=True)
        assert [segment.text for segment in last.segments] == [" one", " two"]
        assert [segment.start for segment in last.segments] == pytest.approx([0.0, 8.0], abs=0.1)
        assert [token for segment in last.segments for token in segment.tokens] == answered[:-1]


@pytest.mark.parametrize("live", [False, True])
async def test_a_segment_that_ends_while_somebody_speaks_is_transcribed_again(tmp_path: Path, live: bool) -> None:
    answers = [
        [at(0.0), *text(" one"), at(4.0), at(4.0), *text(" two"), at(6.0), at(6.0), END],
        [at(0.0), *text(" three" if live else " two three"), at(4.0), END],
    ]

    def first_six_seconds(message: AddRequest) -> np.ndarray:
        result = np.zeros_like(spread(message))
        for row in range(len(result)):
            result[row, 300 * row // (len(result) - 1) :][: 300 // (len(result) - 1)] = 1.0
        return result

    left = iter(answers)
    core = SpeechCore(answer=lambda message: next(left, [END]), alignment=first_six_seconds)
    async with speech_server(tmp_path, core) as server:
        last, _ = await transcribe(server, voice(10.0), live=live)
        assert last.text == "one two three"  # nothing that was sent is said again, nothing is dropped twice
        starts = [segment.start for segment in last.segments]
        assert starts == sorted(starts)


@pytest.mark.parametrize("output", [[at(0.0), *text(" a"), at(0.0), at(0.0), END], [END], [at(0.0), at(0.0), END]])
async def test_a_model_that_does_not_advance_ends(tmp_path: Path, output: list[int]) -> None:
    def nothing(message: AddRequest) -> np.ndarray:
        result = spread(message)
        result[:], result[-2:] = 0.0, 1.0
        return result

    core = SpeechCore(answer=lambda message: output, alignment=nothing)
    async with speech_server(tmp_path, core) as server:
        for audio in (voice(10.0), spoken((300.0, 9.0))):
            before = len(prompts(core))
            await transcribe(server, audio)
            assert len(prompts(core)) - before <= 10 / LEAST_ADVANCE


async def test_without_speech_the_model_says_whether_more_follows(tmp_path: Path) -> None:
    """Voice activity finds no speech in music; a timestamp that begins a segment means that there is one."""
    answers = iter([[at(0.4), *text(" la"), at(4.4), at(4.4), END], [at(0.4), *text(" li"), at(4.4), END]])
    core = SpeechCore(answer=lambda message: next(answers), alignment=spread)
    async with speech_server(tmp_path, core) as server:
        last, _ = await transcribe(server, spoken((300.0, 4.0), (600.0, 4.0)))
        assert last.text == "la li"
        assert [segment.start for segment in last.segments] == pytest.approx([0.4, 4.8])


async def test_silence_behind_speech_is_not_asked_for(tmp_path: Path) -> None:
    core = first_stretch_alone(("one",), "pair")
    async with speech_server(tmp_path, core) as server:
        assert (await transcribe(server, np.concatenate([voice(2.0), PAUSE, PAUSE])))[1] == "one"
        assert len(prompts(core)) == 1


async def test_text_that_repeats_itself_up_to_the_token_limit_is_decoded_again(tmp_path: Path) -> None:
    def answer(message: AddRequest) -> list[int]:
        params = message.sampling_params
        return text(" again" * 99)[: params.max_tokens] if params.temperature == 0 else [*text(" a good text"), END]

    async with speech_server(tmp_path, SpeechCore(answer=answer)) as server:
        last, _ = await transcribe(server, spoken((300.0, 1.0)), live=False, timestamps=False)
        assert last.text == "a good text"


@pytest.mark.parametrize(
    ("spans", "timestamp", "speech", "expects_more", "expected"),
    [
        ([(0.0, 2.0)], 2.0, [(0.0, 2.0)], True, None),  # nobody speaks any more
        ([(0.0, 2.0)], 9.0, [(0.0, 2.0), (8.0, 9.5)], False, 7.7),  # the timestamp is behind the pause
        ([(0.0, 2.0)], 2.0, [(0.0, 2.0), (2.1, 4.0)], False, 2.0),
        ([(0.0, 2.0)], 3.0, [(0.0, 6.0)], True, 3.0),  # in the middle of speech
        ([(0.0, 0.0)], 0.0, [(0.0, 6.0)], True, 0.5),
        ([(0.0, 2.0)], 2.0, [(0.0, 2.0), (8.0, 8.1)], False, None),  # a click
        ([], None, [(5.0, 6.0)], False, 4.7),  # silence was heard
        ([], None, [(0.1, 6.0)], False, None),  # speech was not
        ([(0.0, 2.0)], 2.5, [], True, 2.5),
        ([(0.0, 2.0)], 2.5, [], False, None),
        ([], 0.0, [], True, None),
    ],
)
def test_where_a_part_begins(
    spans: list[tuple[float, float]],
    timestamp: float | None,
    speech: list[tuple[float, float]],
    expects_more: bool,
    expected: float | None,
) -> None:
    segments = [SegmentSpan(start, end, 0, 1, ()) for start, end in spans]
    start = next_start(segments, timestamp, SpeechStretches(speech), expects_more=expects_more)
    assert start == (None if expected is None else pytest.approx(expected))
