"""Sessions over the transcriber and the real transport, to a core that hears tones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from quire.realtime.settings import SessionSettings
from quire.realtime.transcribers import WholeUtteranceTranscriber
from tests.support.audio_chat import TOKEN as AUDIO_TOKEN
from tests.support.audio_chat import AudioCore, audio_server, audio_tokenizer
from tests.support.realtime import Client, client_of, pcm, session_of, silence, speech
from tests.support.server import until
from tests.support.speech import TOKEN, SpeechCore, added, prompts, speaks, spoken
from tests.support.speech import speech_server as tone_server

COMPLETED = "conversation.item.input_audio_transcription.completed"
METRIC = "quire:audio_seconds_total{"
DELTA = "conversation.item.input_audio_transcription.delta"


async def committed(client: Client, *tones: float) -> list[dict[str, object]]:
    """Events of an utterance of tones."""
    await client.append(pcm(spoken(*((hertz, 0.6) for hertz in tones))))
    await client.send("input_audio_buffer.commit")
    return await client.until("conversation.item.done")


async def test_utterances_are_transcribed_by_the_model(tmp_path: Path) -> None:
    core = SpeechCore(probs=speaks("de"))
    async with tone_server(tmp_path, core) as server, session_of(server, turn_detection=None) as client:
        events = await committed(client, 300, 600, 2400)
        completed = events[-2]
        assert completed["transcript"] == "alpha bravo delta"
        assert "".join(str(e["delta"]) for e in events if e["type"] == DELTA) == "alpha bravo delta"
        assert completed["languages"] == [{"code": "de"}]
        usage = completed["usage"]
        assert isinstance(usage, dict)
        assert usage["input_tokens"] > usage["output_tokens"] > 0
        await client.update(transcription={"language": "ja", "prompt": "zulu"}, turn_detection=None)
        assert (await committed(client, 1200))[-2]["transcript"] == "charlie"
        assert TOKEN["<|ja|>"] in prompts(core)[-1]
        assert TOKEN["<|startofprev|>"] in prompts(core)[-1]
        await client.send("session.update", session={"audio": {"input": {"transcription": {"language": "xx"}}}})
        assert "Unsupported language: 'xx'" in (await client.expect("error"))["error"]["message"]
        assert server.state.models[0].client.slots_in_use == 0


async def test_language_models_transcribe_utterances(tmp_path: Path) -> None:
    """Their answers may begin with the language, which is no text."""
    answer = [*audio_tokenizer().encode("language German<asr_text>guten Tag").ids, AUDIO_TOKEN["<|im_end|>"]]
    core = AudioCore(kind="qwen3_asr", answer=lambda _: answer)
    async with audio_server(tmp_path, core) as server, session_of(server, turn_detection=None) as client:
        events = await committed(client, 300, 600)
        assert events[-2]["transcript"] == "guten Tag"
        assert "".join(str(e["delta"]) for e in events if e["type"] == DELTA) == "guten Tag"
        assert events[-2]["languages"] == [{"code": "de"}]
        assert server.state.models[0].client.slots_in_use == 0


async def test_the_same_audio_gives_the_same_text_in_every_dialect(tmp_path: Path) -> None:
    audio = np.concatenate([silence(0.5), speech(2.0), silence(1.0), speech(1.5), silence(1.0)])
    async with tone_server(tmp_path) as server:
        async with client_of(server, "") as client:
            await client.expect("session.created")
            await client.send("session.update", model="fake")
            await client.append(audio)
            await client.send("input_audio_buffer.commit", final=True)
            text = (await client.until("transcription.done"))[-1]["text"]
        async with session_of(server) as client:
            await client.append(audio)
            texts = [(await client.until(COMPLETED))[-1]["transcript"] for _ in range(2)]
        assert " ".join(texts) == text


async def test_interim_transcriptions_do_not_count_as_transcribed_audio(tmp_path: Path) -> None:
    async with tone_server(tmp_path) as server:
        transcriber = WholeUtteranceTranscriber(server.state.models[0])
        counts = []
        for seconds, draft in ((1.0, True), (2.0, True), (3.0, False)):
            audio = np.zeros(int(seconds * 16000), np.float32)
            assert [piece async for piece in transcriber.transcribe(audio, SessionSettings(), draft=draft)]
            lines = (await server.http.get("/metrics")).text.splitlines()
            counts.append(next(float(line.split()[-1]) for line in lines if line.startswith(METRIC)))
        assert counts == [0, 0, 3]


async def test_only_the_final_transcript_is_worth_hearing_doubtful_audio_again(tmp_path: Path) -> None:
    core = SpeechCore(logprob=lambda message, index: -0.9)
    async with tone_server(tmp_path, core) as server:
        transcriber = WholeUtteranceTranscriber(server.state.models[0])
        counts = []
        for draft in (True, False):
            audio = spoken((300.0, 1.0))
            settings = SessionSettings(language="en")
            assert [piece async for piece in transcriber.transcribe(audio, settings, draft=draft)]
            counts.append(len({message.items[0].hash for message in added(core)}))
        assert counts == [1, 2]
        assert server.state.models[0].client.slots_in_use == 0


async def test_a_client_that_goes_leaves_nothing_in_the_engine(tmp_path: Path) -> None:
    core = SpeechCore()
    async with tone_server(tmp_path, core) as server:
        model = server.state.models[0].client
        core.hold.set()
        async with session_of(server) as client:
            await client.append(np.concatenate([silence(0.5), speech(1.5)]))
            await until(lambda: added(core))  # a pass over what is being said
            await client.append(silence(1.0))
            await client.until("input_audio_buffer.committed")
            await until(lambda: core.active)
            client.connection.transport.abort()
        await until(lambda: not core.active)
        await until(lambda: server.sessions.running == 0)
        assert model.slots_in_use == 0


async def test_an_engine_that_dies_fails_utterances_only(tmp_path: Path) -> None:
    core = SpeechCore(die_at_step=1)
    async with tone_server(tmp_path, core) as server, session_of(server, turn_detection=None) as client:
        async with asyncio.timeout(60):
            await client.append(silence(0.5))
            await client.send("input_audio_buffer.commit")
            failed = await client.until("conversation.item.input_audio_transcription.failed")
            assert failed[-1]["error"]["type"] == "server_error"
            await client.expect("conversation.item.done")
            await client.send("input_audio_buffer.clear")
            await client.expect("input_audio_buffer.cleared")
