"""The built-in page in Chromium, whose microphone plays a file."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tests.support.audio import wav
from tests.support.realtime import as_floats, dialogue, speech_server

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which(CHROMIUM) is None, reason="needs Chromium"),
]
HERE = Path(__file__).parent


@pytest.mark.parametrize("key", ["", "secret"])
async def test_the_page_shows_what_the_microphone_hears(tmp_path: Path, key: str) -> None:
    audio = tmp_path / "speech.wav"
    audio.write_bytes(wav(as_floats(dialogue(2.2, 3.1))))
    async with speech_server(tmp_path, api_key=(key,) if key else ()) as server:
        process = await asyncio.create_subprocess_exec(
            *("node", "page.mjs", server.url, str(os.environ.get("SCREENSHOTS", tmp_path)), str(audio), key),
            cwd=HERE,
            env={**os.environ, "CHROMIUM": CHROMIUM},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
