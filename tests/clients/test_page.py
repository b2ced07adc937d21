"""The built-in page in Chromium, whose microphone plays a file."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.support.audio import wav
from tests.support.process import serving
from tests.support.realtime import as_floats, dialogue, silence, speech_server

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which(CHROMIUM) is None, reason="needs Chromium"),
]
HERE = Path(__file__).parent
RECORDING = HERE.parent / "app" / "recordings" / "english.flac"


async def drive(folder: Path, *arguments: str) -> None:
    """Run page.mjs. Arguments: URL of the server, wav file of the microphone, key; model, text that it hears."""
    url, audio, *others = arguments
    process = await asyncio.create_subprocess_exec(
        *("node", "page.mjs", url, str(os.environ.get("SCREENSHOTS", folder)), audio, *others),
        cwd=HERE,
        env={**os.environ, "CHROMIUM": CHROMIUM},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


@pytest.mark.parametrize("key", ["", "secret"])
async def test_the_page_shows_what_the_microphone_hears(tmp_path: Path, key: str) -> None:
    audio = tmp_path / "speech.wav"
    audio.write_bytes(wav(as_floats(dialogue(2.2, 3.1))))
    async with speech_server(tmp_path, api_key=(key,) if key else ()) as server:
        await drive(tmp_path, server.url, str(audio), key)


async def test_the_page_with_the_bundled_recognizer(tmp_path: Path) -> None:
    samples, _ = soundfile.read(RECORDING, dtype="int16")
    audio = tmp_path / "speech.wav"
    audio.write_bytes(wav(as_floats(np.concatenate([silence(0.7), samples, silence(0.7)]))))
    with serving("--api-key", "secret") as server:
        text = "We are going to the mountain in the morning."
        await drive(tmp_path, server.url, str(audio), "secret", "quire-nano-hear", text)
