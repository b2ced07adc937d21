"""`quire listen`, as users run it."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

import numpy as np
import pytest

from quire.app.listen import Screen, from_microphone
from quire.app.openai_client import ServerError
from tests.support.audio import wav
from tests.support.process import ended
from tests.support.realtime import FakeSpeech, as_floats, dialogue, silence, speech, speech_server
from tests.support.server import Server


async def listen(server: Server, *arguments: str, audio: bytes = b"") -> tuple[int, str, str]:
    """Exit status, output and errors."""
    return await asyncio.to_thread(ended, "listen", *arguments, "--url", f"{server.url}/v1", stdin=audio)


async def test_a_file_is_printed_utterance_by_utterance(tmp_path: Path) -> None:
    file = tmp_path / "speech.wav"
    file.write_bytes(wav(as_floats(np.concatenate([dialogue(2.0, 1.2), speech(1.5)]))))
    model = FakeSpeech()
    async with speech_server(tmp_path, model, api_key=("k",)) as server:
        status, output, errors = await listen(server, str(file), "--api-key", "k", "--prompt", "Hello")
        assert (status, errors) == (0, "")
        assert output.splitlines() == ["w1 w2 w3 w4", "w1 w2 w3", "w1 w2 w3"]
        assert model.heard[0][1].prompt == "Hello"


@pytest.mark.parametrize("with_header", [False, True])
async def test_standard_input_is_printed(tmp_path: Path, with_header: bool) -> None:
    samples = dialogue(1.0)
    audio = wav(as_floats(samples)) if with_header else samples.tobytes()
    async with speech_server(tmp_path) as server:
        status, output, _ = await listen(server, "-", "--language", "de", audio=audio)
        assert (status, output) == (0, "de1 de2\n")


async def test_nothing_said_prints_nothing(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        assert await listen(server, "-", audio=silence(1.0).tobytes()) == (0, "", "")


async def test_errors_are_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF and nothing else")
    async with speech_server(tmp_path, api_key=("k",)) as server:
        for arguments, message in (
            ((str(broken),), "broken.wav: "),
            ((str(tmp_path / "none.wav"),), "No such file"),
            (("-",), "401: A valid API key is required."),
            (("-", "--api-key", "k", "--model-name", "nobody"), "404: The model `nobody` does not exist."),
            (("-", "--api-key", "k", "--language", "xx"), "Unsupported language"),
            (("-", "--rate", "24000"), "standard input is a wav file of 1 channels, 16000 Hz"),
        ):
            audio = wav(np.zeros((1600, 1), np.float32)) if "--rate" in arguments else b""
            status, output, errors = await listen(server, *arguments, audio=audio)
            assert (status, output) == (1, ""), errors
            assert message in errors
            assert errors.count("\n") == 1
    status, _, errors = await listen(server, "-")
    assert status == 1
    assert errors.startswith(f"quire listen: {server.url}")


async def test_a_microphone_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(ServerError, match=r"quire\[microphone\]"):
        await anext(from_microphone(None, 16000))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_text_while_it_grows() -> None:
    terminal = Terminal()
    screen = Screen(terminal)
    for delta in ("Hello", " word"):
        screen.add(delta)
    assert terminal.getvalue() == "Hello word"
    screen.complete("Hello world")
    assert terminal.getvalue() == "Hello word\r\033[KHello world\n"
    screen.add("Yes")
    screen.complete("Yes")
    assert terminal.getvalue().endswith("Hello world\nYes\n")
