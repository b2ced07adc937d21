"""Realtime sessions with the bundled recognizer, of plain `quire serve`: what is spoken comes back as text.

Audio is counted instead of time: a test sends no more audio than an event may need, and then waits for the event.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from openai import AsyncOpenAI
from websockets.asyncio.client import connect

from tests.support.audio import wav
from tests.support.process import ServerProcess, eventually, quire, serving
from tests.support.realtime import RATE, Client, as_floats, at_24k, base64_of, silence

NAME = "quire-nano-hear"
RECORDINGS = Path(__file__).parent / "recordings"
MARGIN = 0.3  # seconds of silence around the speech of a recording
TEXTS = {
    "english.flac": "We are going to the mountain in the morning.",
    "german.flac": "Öffne das Dachfenster in dem Esszimmer.",
    "noisy.flac": "The town hall opens at 10:45.",
}
ORDER = ("english.flac", "german.flac", "noisy.flac", "english.flac")
PREFIX = "conversation.item.input_audio_transcription"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving() as running:
        yield running


def recording(name: str) -> NDArray[np.int16]:
    """Its samples at 16 kHz."""
    samples: NDArray[np.int16] = soundfile.read(RECORDINGS / name, dtype="int16")[0]
    return samples


def dialogue() -> NDArray[np.int16]:
    """Recordings with pauses between them."""
    return np.concatenate([silence(1.0), *(part for name in ORDER for part in (recording(name), silence(1.0)))])


@asynccontextmanager
async def client_of(server: ServerProcess, query: str = f"?model={NAME}") -> AsyncIterator[Client]:
    url = f"{server.url.replace('http', 'ws')}/v1/realtime{query}"
    async with connect(url, compression=None, max_size=None) as connection:
        client = Client(connection)
        await client.expect("session.created")
        yield client


class Dialogue:
    """A session of OpenAI's client that gets audio at the pace at which people speak."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.events: list[Any] = []

    async def speak(self, samples: NDArray[np.int16]) -> None:
        """Send audio at 16 kHz as 24 kHz, a tenth of a second in each tenth of a second."""
        audio = at_24k(samples)
        for start in range(0, len(audio), 2400):
            await self._connection.input_audio_buffer.append(audio=base64_of(audio[start : start + 2400]))
            await asyncio.sleep(0.1)

    async def expect(self, kind: str) -> Any:
        """The next event of a type, whose predecessors are kept as well."""
        async with asyncio.timeout(60):
            while True:
                event = await self._connection.recv()
                self.events.append(event)
                if event.type == kind:
                    return event


async def test_a_dialogue_comes_back_while_it_is_spoken(server: ServerProcess) -> None:
    """Speech is noticed within 0.3 s of audio; its text comes in parts, all of it within 0.7 s after its end."""
    async with (
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as openai,
        openai.realtime.connect(model=NAME) as connection,
    ):
        session: Any = {
            "type": "transcription",
            "audio": {"input": {"format": {"type": "audio/pcm", "rate": 24000}}},
        }
        await connection.session.update(session=session)
        spoken = Dialogue(connection)
        await spoken.speak(silence(1.0))
        items = []
        for name in ORDER:
            samples = recording(name)
            onset, end = int(MARGIN * RATE), len(samples) - int(MARGIN * RATE)
            await spoken.speak(samples[: onset + int(0.3 * RATE)])
            items.append((await spoken.expect("input_audio_buffer.speech_started")).item_id)
            await spoken.speak(samples[onset + int(0.3 * RATE) : end])
            # To wait for text here could be in vain: a busy server may read all of it at once, with the silence.
            await spoken.speak(np.concatenate([samples[end:], silence(0.4)]))
            assert (await spoken.expect(f"{PREFIX}.delta")).item_id == items[-1]
            completed = await spoken.expect(f"{PREFIX}.completed")
            assert (completed.item_id, completed.transcript) == (items[-1], TEXTS[name])
            assert completed.usage.output_tokens > 0
            await spoken.speak(silence(0.3))
        for kind in ("input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped", f"{PREFIX}.completed"):
            assert [event.item_id for event in spoken.events if event.type == kind] == items
        assert not [event for event in spoken.events if event.type in ("error", f"{PREFIX}.failed")]


async def test_the_same_audio_gives_the_same_text_in_vllms_dialect(server: ServerProcess) -> None:
    async with client_of(server, "") as client:
        await client.send("session.update", model=NAME)
        await client.send("input_audio_buffer.commit", final=False)
        await client.append(dialogue())
        await client.send("input_audio_buffer.commit", final=True)
        events = await client.until("transcription.done")
    assert {event["type"] for event in events[:-1]} == {"transcription.delta"}
    async with client_of(server) as client:
        await client.update(format={"type": "audio/pcm", "rate": RATE})
        await client.append(dialogue())
        texts = [(await client.until(f"{PREFIX}.completed"))[-1]["transcript"] for _ in ORDER]
    assert events[-1]["text"] == " ".join(texts)
    assert texts == [TEXTS[name] for name in ORDER]


async def test_sessions_that_are_cut_off_leave_nothing_in_the_engine(server: ServerProcess) -> None:
    """Half of eight, while somebody speaks and passes over what is spoken run."""
    samples = recording("english.flac")
    half = len(samples) // 2
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(server)) for _ in range(8)]
        for client in clients:
            await client.update(format={"type": "audio/pcm", "rate": RATE})
            await client.append(samples[:half])
        for client in clients:
            await client.expect("input_audio_buffer.speech_started")
        for client in clients[::2]:
            client.connection.transport.abort()
        for client in clients[1::2]:
            await client.append(np.concatenate([samples[half:], silence(1.0)]))
            assert (await client.until(f"{PREFIX}.completed"))[-1]["transcript"] == TEXTS["english.flac"]
        await asyncio.to_thread(eventually, lambda: server.metric("websocket_connections_active") == 4)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_blocks_used"):
            await asyncio.to_thread(eventually, lambda name=name: server.metric(name) == 0)
    await asyncio.to_thread(eventually, lambda: server.metric("websocket_connections_active") == 0)


def test_listen_prints_a_file_and_standard_input(server: ServerProcess, tmp_path: Path) -> None:
    url = ("--url", f"{server.url}/v1")
    file = tmp_path / "dialogue.wav"
    file.write_bytes(wav(as_floats(dialogue())))
    expected = [TEXTS[name] for name in ORDER]
    assert quire("listen", str(file), "--model-name", NAME, *url).splitlines() == expected
    assert quire("listen", str(RECORDINGS / "german.flac"), *url).splitlines() == [TEXTS["german.flac"]]


MICROPHONE = '''
import threading
from pathlib import Path

PortAudioError = OSError


class RawInputStream:
    """Plays a recording once."""

    def __init__(self, *, samplerate, channels, dtype, blocksize, device, callback):
        assert (channels, dtype, device) == (1, "int16", 3)
        audio = Path(__file__).with_suffix(".pcm").read_bytes()
        blocks = [audio[at : at + 2 * blocksize] for at in range(0, len(audio), 2 * blocksize)]
        self._thread = threading.Thread(target=lambda: [callback(block, 0, None, None) for block in blocks])

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *error):
        self._thread.join()
'''


def test_listen_prints_what_a_microphone_hears_until_it_is_interrupted(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "sounddevice.py").write_text(MICROPHONE)
    heard = np.concatenate([recording("english.flac"), silence(1.0), recording("german.flac"), silence(1.0)])
    (tmp_path / "sounddevice.pcm").write_bytes(heard.tobytes())
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "listen", "--input-device", "3", "--url", f"{server.url}/v1"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    printed = [process.stdout.readline().strip() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert printed == [TEXTS["english.flac"], TEXTS["german.flac"]]
    assert (output, process.returncode) == ("", 0)
