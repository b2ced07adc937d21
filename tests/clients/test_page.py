"""The built-in page in Chromium, whose microphone plays a file."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image, ImageDraw

from quire.engine.client.protocol import Abort
from tests.support.audio import wav
from tests.support.fake_core import FakeCore, says
from tests.support.process import serving
from tests.support.realtime import as_floats, dialogue, silence, speech_server
from tests.support.server import running_server

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which(CHROMIUM) is None, reason="needs Chromium"),
]
HERE = Path(__file__).parent
RECORDING = HERE.parent / "app" / "recordings" / "english.flac"


async def drive(script: str, folder: Path, url: str, *arguments: str) -> None:
    """Run one of the scripts in `page`. Its files go into the folder, screenshots into that of SCREENSHOTS if set."""
    await run("node", f"page/{script}", url, str(folder), *arguments, cwd=HERE, CHROMIUM=CHROMIUM)


async def run(*command: str, cwd: Path, **variables: str) -> str:
    """What a command prints. It has to succeed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.parametrize("key", ["", "s€cret"])
async def test_the_page_shows_what_the_microphone_hears(tmp_path: Path, key: str) -> None:
    audio = tmp_path / "speech.wav"
    audio.write_bytes(wav(as_floats(dialogue(2.2, 3.1))))
    async with speech_server(tmp_path, api_key=(key,) if key else ()) as server:
        await drive("captions.mjs", tmp_path, server.url, str(audio), key)


async def test_the_page_with_the_bundled_recognizer(tmp_path: Path) -> None:
    samples, _ = soundfile.read(RECORDING, dtype="int16")
    audio = tmp_path / "speech.wav"
    audio.write_bytes(wav(as_floats(np.concatenate([silence(0.7), samples, silence(0.7)]))))
    with serving("--api-key", "secret") as server:
        text = "We are going to the mountain in the morning."
        await drive("captions.mjs", tmp_path, server.url, str(audio), "secret", "quire-nano-hear", text)


@pytest.mark.parametrize("key", ["", "secret"])
async def test_a_chat_and_its_code(tmp_path: Path, key: str) -> None:
    with serving(*(("--api-key", key) if key else ())) as server:
        await drive("chat.mjs", tmp_path, server.url, key)
        if key:
            assert "QUIRE_API_KEY" in (tmp_path / "sample.sh").read_text()
        environment = {"QUIRE_API_KEY": key}
        assert '"choices"' in await run("bash", "sample.sh", cwd=tmp_path, **environment)
        assert await run(sys.executable, "sample.py", cwd=tmp_path, **environment)


async def test_files_and_errors(tmp_path: Path) -> None:
    picture = Image.new("RGB", (200, 200), "white")
    ImageDraw.Draw(picture).ellipse((20, 20, 75, 75), fill=(220, 20, 30))
    picture.save(tmp_path / "drawn.png")
    picture.save(tmp_path / "drawn.pdf", resolution=150)
    with serving() as server:
        await drive("files.mjs", tmp_path, server.url, str(tmp_path / "drawn.png"))
        assert "image_url" in await run("bash", "files.sh", cwd=tmp_path)  # the error of a model without eyes
        ran = await asyncio.create_subprocess_exec(
            sys.executable, "files.py", cwd=tmp_path, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await ran.communicate()
        assert b"image_url" in errors


async def test_a_stopped_answer_leaves_the_engine(tmp_path: Path) -> None:
    core = FakeCore(answer=says("one two three " * 30))
    core.hold.set()
    core.allow(40)
    async with running_server(tmp_path, core) as server:
        await drive("stop.mjs", tmp_path, server.url)
        assert any(isinstance(message, Abort) for message in core.received)


async def test_wide_and_narrow_light_and_dark(tmp_path: Path) -> None:
    with serving() as server:
        await drive("looks.mjs", tmp_path, server.url)
