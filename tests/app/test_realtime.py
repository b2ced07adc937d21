"""Realtime sessions of a server as users run it: whisper in the engine, OpenAI's client, the end of the server."""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from websockets.exceptions import ConnectionClosed

from tests.support.process import ServerProcess, serving
from tests.support.realtime import at_24k, dialogue
from tests.support.speech_model import tiny_speech_model


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with serving(str(tiny_speech_model(tmp_path)), "--served-model-name", "hear", "--dtype", "float32") as running:
        yield running


async def test_whisper_transcribes_a_dialogue_and_the_server_says_good_bye(server: ServerProcess) -> None:
    async with (
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        client.realtime.connect(model="hear") as connection,
    ):
        await connection.session.update(
            session={
                "type": "transcription",
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": 24000},
                        "transcription": {"language": "en"},
                    }
                },
            }
        )
        audio = at_24k(dialogue(2.0, 1.5)).tobytes()
        for start in range(0, len(audio), 32000):
            await connection.input_audio_buffer.append(audio=base64.b64encode(audio[start : start + 32000]).decode())
        items: list[str] = []
        completed: list[str] = []
        async with asyncio.timeout(60):
            while len(completed) < 2:
                event = await connection.recv()
                if event.type == "input_audio_buffer.speech_started":
                    items.append(event.item_id)
                elif event.type == "conversation.item.input_audio_transcription.completed":
                    completed.append(event.item_id)
                    assert event.usage.type == "tokens"
                    assert event.usage.output_tokens > 0
                    assert event.usage.input_token_details is not None
                    assert event.usage.input_token_details.audio_tokens
        assert completed == items
        assert server.metric("websocket_connections_active") == 1
        server.process.send_signal(signal.SIGTERM)
        assert await close_code(connection) == 1012
    assert await asyncio.to_thread(server.process.wait, 20) == 0


async def close_code(connection: AsyncRealtimeConnection) -> int | None:
    """The code with which the server closes the connection."""
    try:
        async with asyncio.timeout(60):
            while True:
                await connection.recv()
    except ConnectionClosed as closed:
        return None if closed.rcvd is None else closed.rcvd.code
