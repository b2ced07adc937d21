"""Audio becomes windows, windows requests to the engine, and their tokens text, segments and words."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.engine.client.deadline import Deadline
from quire.engine.client.errors import DeadlineExceeded
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import AddRequest
from quire.engine.client.sampling_params import SamplingNumbers
from quire.protocol.errors import InvalidRequest
from quire.speech.transcriber import Transcriber
from quire.speech.types import (
    SegmentDone,
    TranscriptDelta,
    TranscriptionDone,
    TranscriptionEvent,
    TranscriptionOptions,
    VoiceOptions,
)
from tests.support.audio import Samples, voice
from tests.support.fake_core import FakeCore
from tests.support.server import Server, running_server, until
from tests.support.speech import (
    END,
    SPEECH,
    TOKEN,
    SpeechCore,
    added,
    at,
    english_only,
    generating,
    heard,
    hears,
    prompts,
    speaks,
    speech_server,
    speech_tokenizer,
    spoken,
    text,
)

A, B, C, D = 300.0, 600.0, 1200.0, 2400.0


async def events_of(server: Server, audio: Samples, **options: Any) -> list[TranscriptionEvent]:
    model = server.state.models[0]
    with model.client.slots(1):
        stream = Transcriber(model).transcribe(audio, TranscriptionOptions(**options))
        async with aclosing(stream) as events:
            return [event async for event in events]


async def transcribe(server: Server, audio: Samples, **options: Any) -> TranscriptionDone:
    last = (await events_of(server, audio, **options))[-1]
    assert isinstance(last, TranscriptionDone)
    return last


def deltas(events: list[TranscriptionEvent]) -> list[str]:
    return [event.text for event in events if isinstance(event, TranscriptDelta)]


async def test_the_pieces_are_the_text_and_the_language_is_detected(tmp_path: Path) -> None:
    core = SpeechCore(probs=speaks("de"))
    async with speech_server(tmp_path, core) as server:
        events = await events_of(server, spoken((A, 1.0), (B, 1.0)))
        last = events[-1]
        assert isinstance(last, TranscriptionDone)
        assert (last.text, last.language) == ("alpha bravo", "de")
        assert "".join(deltas(events)) == last.text
        assert last.duration == pytest.approx(3.2)
        start = [TOKEN["<|startoftranscript|>"], TOKEN["<|de|>"], TOKEN["<|transcribe|>"], TOKEN["<|notimestamps|>"]]
        assert prompts(core) == [start]
        assert server.state.models[0].client.slots_in_use == 0


async def test_text_is_given_while_more_is_generated(tmp_path: Path) -> None:
    core = SpeechCore()
    core.hold.set()
    async with speech_server(tmp_path, core) as server:
        model = server.state.models[0]
        with model.client.slots(1):
            stream = Transcriber(model).transcribe(spoken((A, 1.0)), TranscriptionOptions(language="en"))
            core.allow(3)
            async with aclosing(stream) as events:
                first = await anext(events)
                assert isinstance(first, TranscriptDelta)
                assert "alpha".startswith(first.text)
                assert core.active
                core.hold.clear()
                others = [event async for event in events]
        assert isinstance(others[-1], TranscriptionDone)
        assert first.text + "".join(deltas(others)) == others[-1].text == "alpha"


async def test_given_language_task_and_earlier_text_are_in_the_prompt(tmp_path: Path) -> None:
    core = SpeechCore()
    async with speech_server(tmp_path, core) as server:
        options = {"language": "ja", "task": "translate", "prompt": "Earlier.", "hotwords": "Quire", "timestamps": True}
        await transcribe(server, spoken((A, 1.0)), **options)
        control = [TOKEN["<|startoftranscript|>"], TOKEN["<|ja|>"], TOKEN["<|translate|>"]]
        assert prompts(core) == [[TOKEN["<|startofprev|>"], *text(" Quire Earlier."), *control]]
        (request,) = generating(core)
        assert request.sampling_params.token_probs is not None
        assert request.prompt[request.sampling_params.token_probs.position] == TOKEN["<|startoftranscript|>"]


async def test_of_a_long_prompt_the_end_is_used_and_special_tokens_are_not(tmp_path: Path) -> None:
    core = SpeechCore()
    async with speech_server(tmp_path, core) as server:
        await transcribe(server, spoken((A, 1.0)), language="en", prompt=("x" * 5000) + "<|en|>end")
        (prompt,) = prompts(core)
        assert len(prompt) == 1 + 223 + 4
        assert prompt[-7:-4] == text("end")
        assert list(prompt).count(TOKEN["<|en|>"]) == 1
        (request,) = added(core)
        assert request.sampling_params.max_tokens == 448 - len(prompt)


async def test_a_model_of_one_language(tmp_path: Path) -> None:
    core = english_only(SpeechCore())
    async with speech_server(tmp_path, core) as server:
        assert (await transcribe(server, spoken((A, 1.0)))).language == "en"
        assert prompts(core) == [[TOKEN["<|startoftranscript|>"], TOKEN["<|notimestamps|>"]]]
        with pytest.raises(InvalidRequest, match="does not support translation"):
            await transcribe(server, spoken((A, 1.0)), task="translate")
        with pytest.raises(InvalidRequest, match=r"'de'.*: en"):
            await transcribe(server, spoken((A, 1.0)), language="de")


@pytest.mark.parametrize("live", [True, False])
async def test_long_audio_keeps_its_times_and_loses_nothing(tmp_path: Path, live: bool) -> None:
    """Words of 4 s with pauses: each is in one window, at its own time, in order."""
    frequencies = [A, B, C, D] * 6
    audio = spoken(*((hertz, 4.0) for hertz in frequencies))
    words = ["alpha", "bravo", "charlie", "delta"] * 6
    core = SpeechCore()
    async with speech_server(tmp_path, core) as server:
        events = await events_of(server, audio, timestamps=True, words=True, live=live, language="en")
        last = events[-1]
        assert isinstance(last, TranscriptionDone)
        assert last.text.split() == words
        assert "".join(deltas(events)) == last.text
        assert [segment.text.strip() for segment in last.segments] == words
        for number, segment in enumerate(last.segments):
            begin = 0.4 + number * 4.4
            assert segment.start == pytest.approx(begin, abs=0.06)
            assert segment.end == pytest.approx(begin + 4.0, abs=0.06)
            assert segment.id == number
        assert [word.word for word in last.words] == words
        for word, segment in zip(last.words, last.segments, strict=True):
            assert word.start == pytest.approx(segment.start, abs=0.06)
            assert word.end == pytest.approx(segment.end, abs=0.06)
        assert len(prompts(core)) >= 4  # windows of at most 30 s
        assert server.state.models[0].client.slots_in_use == 0
        assert last.usage.audio_tokens == pytest.approx(last.duration * 50, abs=len(prompts(core)))


async def test_windows_run_side_by_side_and_leave_half_of_the_places_free(tmp_path: Path) -> None:
    core = SpeechCore()
    core.hold.set()
    audio = spoken(*((A, 4.0) for _ in range(40)))
    async with speech_server(tmp_path, core, capacity=8) as server:
        client = server.state.models[0].client
        task = asyncio.create_task(transcribe(server, audio, language="en"))
        await until(lambda: len(core.active) == 4)
        assert client.slots_in_use == 4
        core.hold.clear()
        assert (await task).text.split() == ["alpha"] * 40
        assert client.slots_in_use == 0


@pytest.mark.parametrize("after", ["at once", "in the middle"])
async def test_closing_aborts_all_windows(tmp_path: Path, after: str) -> None:
    core = SpeechCore()
    core.hold.set()
    async with speech_server(tmp_path, core) as server:
        model = server.state.models[0]
        with model.client.slots(1):
            options = TranscriptionOptions(language="en")
            events = Transcriber(model).transcribe(spoken(*((A, 4.0) for _ in range(20))), options)
            first = asyncio.create_task(anext(events))
            await until(lambda: len(core.active) == 4)
            if after == "in the middle":
                core.allow(4)
                await first
            else:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            await events.aclose()
        core.hold.clear()
        await until(lambda: not core.active)
        assert model.client.slots_in_use == 0
        assert model.client.open_streams == 0


def at_temperature(*answers: str) -> tuple[list[float], Any]:
    """Answers to attempts in turn, and the temperatures that they had."""
    temperatures: list[float] = []

    def answer(message: AddRequest) -> list[int]:
        if len(message.prompt) == 1:
            return [END]
        temperatures.append(message.sampling_params.temperature)
        return [*text(answers[min(len(temperatures), len(answers)) - 1]), END]

    return temperatures, answer


async def test_text_that_repeats_itself_is_decoded_again_at_a_higher_temperature(tmp_path: Path) -> None:
    temperatures, answer = at_temperature(" again and" * 30, " again and" * 40, " a good text")
    async with speech_server(tmp_path, SpeechCore(answer=answer)) as server:
        last = await transcribe(server, spoken((A, 1.0)), live=False)
        assert last.text == "a good text"
        assert temperatures == [0.0, 0.2, 0.4]
        assert last.segments[0].temperature == 0.4
        assert last.segments[0].compression_ratio < 2.4


async def test_an_unlikely_text_is_decoded_again_up_to_the_last_temperature(tmp_path: Path) -> None:
    temperatures, answer = at_temperature(" mumbling")
    core = SpeechCore(answer=answer, logprob=lambda message, index: -3.0)
    async with speech_server(tmp_path, core) as server:
        last = await transcribe(server, spoken((A, 1.0)), live=False)
        assert temperatures == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        assert last.text == "mumbling"
        assert last.segments[0].avg_logprob == pytest.approx(-3.0)


async def test_a_given_temperature_is_the_only_one(tmp_path: Path) -> None:
    temperatures, answer = at_temperature(" again and" * 30)
    async with speech_server(tmp_path, SpeechCore(answer=answer)) as server:
        await transcribe(server, spoken((A, 1.0)), live=False, numbers=SamplingNumbers(temperature=0.7))
        assert temperatures == [0.7]


async def test_what_was_given_is_not_decoded_again(tmp_path: Path) -> None:
    temperatures, answer = at_temperature(" again and" * 30, " a good text")
    async with speech_server(tmp_path, SpeechCore(answer=answer)) as server:
        events = await events_of(server, spoken((A, 1.0)), live=True)
        assert temperatures == [0.0]
        assert "".join(deltas(events)) == (" again and" * 30).strip()


@dataclass
class Hearings:
    """Texts that a core hears in audio at different places of the encoder's positions, in the order of the requests.

    Attributes:
        doubts: log-probability of each token, by the text that is heard.
        judged: log-probability of each token of a text (the key's second part) in the audio where another was heard.
        items: hashes of the audio of the attempts.
    """

    texts: tuple[str, ...]
    doubts: dict[str, float] = field(default_factory=dict)
    judged: dict[tuple[str, str], float] = field(default_factory=dict)
    items: list[bytes] = field(default_factory=list)
    scorings: int = 0

    def answer(self, message: AddRequest) -> list[int]:
        if message.sampling_params.prompt_logprobs is not None:
            self.scorings += 1
            return [END]
        self.items.append(message.items[0].hash)
        return [*text(self.texts[len(self.items) - 1]), END]

    def core(self) -> SpeechCore:
        return SpeechCore(answer=self.answer, logprob=self._logprob, prompt_logprob=self._prompt_logprob)

    def _heard(self, message: AddRequest) -> str:
        return self.texts[self.items.index(message.items[0].hash)]

    def _logprob(self, message: AddRequest, _: int) -> float:
        return self.doubts.get(self._heard(message), -0.01)

    def _prompt_logprob(self, message: AddRequest, _: int) -> float:
        judged = speech_tokenizer().decode(message.prompt[4:-1].tolist())
        return self.judged[self._heard(message), judged]


WRONG, RIGHT, LOOP = "ill-sposed", "ill-disposed", "ill " * 40


async def rehear(folder: Path, hearings: Hearings, **options: Any) -> str:
    async with speech_server(folder, hearings.core()) as server:
        audio = spoken((A, 1.0))
        return (await transcribe(server, audio, language="en", live=False, rehears=True, **options)).text


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_doubtful_text_is_judged_by_all_places_at_which_audio_is_heard(tmp_path: Path, place: int) -> None:
    """One place at which a word is misheard is outvoted, whichever it is."""
    texts = [RIGHT] * 3
    texts[place] = WRONG
    if place == 2:  # the first two agree
        texts[2] = LOOP
    doubts = {WRONG: -0.5, RIGHT: -0.45}
    hearings = Hearings(tuple(texts), doubts, {(WRONG, RIGHT): -0.6, (RIGHT, WRONG): -0.9})
    assert await rehear(tmp_path, hearings) == RIGHT
    assert len(set(hearings.items)) == (2 if place == 2 else 3)
    assert hearings.scorings == (0 if place == 2 else 3)


async def test_a_text_that_is_heard_once_is_kept_if_the_other_places_do_not_contradict(tmp_path: Path) -> None:
    hearings = Hearings(
        (RIGHT, WRONG, WRONG), {WRONG: -0.5, RIGHT: -0.45}, {(WRONG, RIGHT): -0.46, (RIGHT, WRONG): -2.0}
    )
    assert await rehear(tmp_path, hearings) == RIGHT


async def test_a_text_that_repeats_itself_is_not_chosen_however_likely_it_is(tmp_path: Path) -> None:
    hearings = Hearings((WRONG, LOOP, LOOP), {WRONG: -0.9}, {(LOOP, WRONG): -5.0})
    assert await rehear(tmp_path, hearings) == WRONG


@pytest.mark.parametrize(
    ("doubts", "options"),
    [
        ({}, {}),
        ({WRONG: -0.9}, {"numbers": SamplingNumbers(temperature=0.3)}),
        ({WRONG: -0.9}, {"max_tokens": 4}),
    ],
)
async def test_a_text_is_heard_once_if_it_is_certain_or_not_greedy(
    tmp_path: Path, doubts: dict[str, float], options: dict[str, Any]
) -> None:
    hearings = Hearings((WRONG,) * 8, doubts)
    heard_text = await rehear(tmp_path, hearings, **options)
    assert WRONG.startswith(heard_text)
    assert len(set(hearings.items)) == 1


async def test_punctuation_may_be_doubtful(tmp_path: Path) -> None:
    hearings = Hearings(("no, no",))
    core = hearings.core()
    core.logprob = lambda message, index: -0.9 if index == 2 else -0.01
    async with speech_server(tmp_path, core) as server:
        last = await transcribe(server, spoken((A, 1.0)), language="en", live=False, rehears=True)
    assert (last.text, len(hearings.items)) == ("no, no", 1)


async def test_silence_has_no_text_whatever_the_model_makes_up(tmp_path: Path) -> None:
    temperatures, answer = at_temperature(" Thank you for watching")
    core = SpeechCore(answer=answer, probs=speaks("en", no_speech=0.9), logprob=lambda message, index: -2.0)
    async with speech_server(tmp_path, core) as server:
        for live in (True, False):
            events = await events_of(server, np.zeros(32_000, np.float32), live=live, timestamps=True)
            last = events[-1]
            assert isinstance(last, TranscriptionDone)
            assert last.text == ""
            assert last.segments == ()
            assert deltas(events) == []
        assert temperatures == [0.0, 0.0]


async def test_likely_speech_is_kept_although_it_may_be_none(tmp_path: Path) -> None:
    _, answer = at_temperature(" yes")
    async with speech_server(tmp_path, SpeechCore(answer=answer, probs=speaks("en", no_speech=0.9))) as server:
        assert (await transcribe(server, spoken((A, 1.0)))).text == "yes"


async def test_a_window_whose_text_has_no_room_is_divided(tmp_path: Path) -> None:
    def answer(message: AddRequest) -> list[int]:
        hertz_heard = heard(message)
        if len(hertz_heard) > 2:
            return text("".join(f" {number:x}{number * 7919 % 4099:x}" for number in range(100)))[
                : message.sampling_params.max_tokens
            ]
        return hears(message)

    core = SpeechCore(answer=answer)
    async with speech_server(tmp_path, core) as server:
        audio = spoken(*((hertz, 4.0) for hertz in (A, B, C, D)))
        last = await transcribe(server, audio, language="en", live=False)
        assert last.text == "alpha bravo charlie delta"


async def test_voice_options_leave_silence_out(tmp_path: Path) -> None:
    silence = np.zeros(40 * 16_000, np.float32)
    audio = np.concatenate([silence, voice(2.0), silence])
    core = SpeechCore()
    async with speech_server(tmp_path, core) as server:
        last = await transcribe(server, audio, language="en", voice=VoiceOptions())
        assert len(prompts(core)) == 1
        assert last.usage.audio_tokens < 200
        assert all(39 < segment.start < 43 for segment in last.segments)
        assert last.duration == pytest.approx(82.0)
        nothing = await transcribe(server, silence, voice=VoiceOptions())
        assert nothing.text == ""


async def test_log_probabilities_belong_to_the_tokens_of_the_text(tmp_path: Path) -> None:
    core = SpeechCore(logprob=lambda message, index: -index / 100)
    async with speech_server(tmp_path, core) as server:
        events = await events_of(server, spoken((A, 1.0)), logprobs=True, timestamps=True)
        entries = [entry for event in events if isinstance(event, TranscriptDelta) for entry in event.logprobs]
        assert b"".join(entry.bytes for entry in entries) == b" alpha"
        assert [entry.logprob for entry in entries] == pytest.approx([-(1 + i) / 100 for i in range(6)])


async def test_characters_of_several_tokens_are_given_whole(tmp_path: Path) -> None:
    core = SpeechCore(answer=lambda message: [*text("今日は良い天気"), END])
    async with speech_server(tmp_path, core) as server:
        events = await events_of(server, spoken((A, 1.0)), language="ja", words=True)
        assert "".join(deltas(events)) == "今日は良い天気"
        assert not any("\ufffd" in piece for piece in deltas(events))


async def test_windows_are_joined_with_spaces_where_the_language_has_them(tmp_path: Path) -> None:
    core = SpeechCore(answer=lambda message: [*text("xyz"), END])
    async with speech_server(tmp_path, core) as server:
        audio = spoken((A, 25.0), (A, 25.0))
        assert (await transcribe(server, audio, language="en")).text == "xyz xyz"
        assert (await transcribe(server, audio, language="ja")).text == "xyzxyz"


async def test_a_failing_window_fails_the_transcription(tmp_path: Path) -> None:
    core = SpeechCore(alignment=lambda message: np.zeros((3,), np.float32))
    core.refuses = lambda message: isinstance(message.params, PoolingParams)
    async with speech_server(tmp_path, core) as server:
        with pytest.raises(Exception, match="refused"):
            await transcribe(server, spoken((A, 1.0)), words=True)
        assert server.state.models[0].client.slots_in_use == 0


async def test_a_timeout_holds_for_all_windows_together(tmp_path: Path) -> None:
    core = SpeechCore()
    core.hold.set()
    async with speech_server(tmp_path, core) as server:
        with pytest.raises(DeadlineExceeded):
            await transcribe(server, spoken((A, 1.0)), language="en", deadline=Deadline(0.3))


async def test_no_audio_is_no_text(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        last = await transcribe(server, np.zeros(0, np.float32))
        assert (last.text, last.duration) == ("", 0.0)


async def test_a_model_that_generates_does_not_transcribe(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeCore()) as server:
        with pytest.raises(InvalidRequest, match="does not transcribe; it supports: generate"):
            Transcriber(server.state.models[0])


async def test_segments_come_behind_the_text_of_their_window(tmp_path: Path) -> None:
    core = SpeechCore(answer=lambda message: [at(0.4), *text(" one"), at(1.0), at(1.2), *text(" two"), END])
    async with speech_server(tmp_path, core) as server:
        events = await events_of(server, spoken((A, 2.0)), timestamps=True, language="en")
        segments = [event.segment for event in events if isinstance(event, SegmentDone)]
        assert [segment.text for segment in segments] == [" one", " two"]
        times = [time for segment in segments for time in (segment.start, segment.end)]
        assert times == pytest.approx([0.4, 1.0, 1.2, 2.8])  # the last one is the end of the audio
        assert segments[0].tokens == (at(0.4), *text(" one"), at(1.0))


async def test_what_a_model_must_not_sample_is_masked(tmp_path: Path) -> None:
    core = SpeechCore()
    async with speech_server(tmp_path, core) as server:
        await transcribe(server, spoken((A, 1.0)), language="en", timestamps=True)
        await transcribe(server, spoken((A, 1.0)), language="en")
        for request, timed in zip(generating(core), (True, False), strict=True):
            mask = request.sampling_params.allowed_tokens
            assert mask is not None
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
            assert not allowed[[1, 2, *SPEECH.languages.values(), TOKEN["<|nospeech|>"]]].any()
            assert allowed[END]
            assert bool(allowed[at(1.0)]) is timed
            assert (request.sampling_params.timestamp_rule is not None) is timed
            assert request.sampling_params.begin_suppress_tokens == (220, END)


async def test_an_engine_without_a_model_for_words_says_so(tmp_path: Path) -> None:
    core = SpeechCore()
    core.info = msgspec.structs.replace(core.info, kind=msgspec.structs.replace(SPEECH, aligns_words=False))
    async with speech_server(tmp_path, core) as server:
        with pytest.raises(InvalidRequest, match="word timestamps"):
            await transcribe(server, spoken((A, 1.0)), words=True)


async def test_an_engine_that_dies_ends_the_transcription(tmp_path: Path) -> None:
    core = SpeechCore(die_at_step=3)
    async with speech_server(tmp_path, core) as server:
        with pytest.raises(Exception, match="told to die"):
            await transcribe(server, spoken((A, 1.0)), language="en")
