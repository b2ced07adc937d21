"""Uploads that are broken, absurd or malicious get a 400 that says why, and the server goes on."""

from __future__ import annotations

import asyncio
import gc
import struct
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from quire.multimodal.audio import reader as reading
from tests.support.audio import encode, tone, wav
from tests.support.server import until
from tests.support.speech import SpeechCore, added, speech_server, spoken

PATH = "/v1/audio/transcriptions"
GOOD = wav(spoken((300.0, 1.0))[:, None])
FLAC = encode(tone(4.0), "flac")


def absurd_wav() -> bytes:
    """A header that announces 4 GB of 255 channels at 4 GHz."""
    fields = (
        b"RIFF",
        0xFFFFFFF0,
        b"WAVE",
        b"fmt ",
        16,
        1,
        255,
        4_000_000_000,
        0xFFFFFFFF,
        510,
        16,
        b"data",
        0xFFFFFF00,
    )
    return struct.pack("<4sI4s4sIHHIIHH4sI", *fields) + bytes(1000)


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "text": (b"hello " * 100, "Invalid or unsupported"),
    "zip": (b"PK\x03\x04" + bytes(200), "Invalid or unsupported"),
    "playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "Invalid or unsupported"),
    "truncated wav": (GOOD[: len(GOOD) // 2], "truncated"),
    "truncated flac": (FLAC[: len(FLAC) // 2], "flac"),
    "only a header": (FLAC[:60], "flac"),
    "absurd header": (absurd_wav(), "wav"),
    "mp4 without content": (b"\x00\x00\x00\x18ftypisom" + bytes(100), "mp4"),
    "not numbers": (
        struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 436, b"WAVE", b"fmt ", 16, 3, 1, 16_000, 64_000, 4, 32, b"data", 400)
        + np.full(100, np.nan, "<f4").tobytes(),
        "finite",
    ),
    "an hour in kilobytes": (encode(np.zeros((3700 * 8000, 1), np.float32), "flac", rate=8000), "longer than 3600 s"),
}


async def post(client: httpx.AsyncClient, content: bytes, **fields: Any) -> httpx.Response:
    return await client.post(PATH, files={"file": ("a.wav", content, "audio/wav")}, data=fields)


async def test_hostile_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    core = SpeechCore()
    async with speech_server(tmp_path, core) as server:
        for name, (content, reason) in FILES.items():
            response = await post(server.http, content)
            assert response.status_code == 400, (name, response.text)
            error = response.json()["error"]
            assert reason in error["message"], name
            assert error["param"] == "file"
        assert added(core) == []
        assert server.state.models[0].client.slots_in_use == 0
        assert (await post(server.http, GOOD)).json()["text"] == "alpha"


async def test_a_large_file_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    async with speech_server(tmp_path, max_audio_size="100KiB", max_body_size="1MiB") as server:
        response = await post(server.http, bytes(110_000))
        assert response.status_code == 400
        assert "Maximum file size exceeded" in response.json()["error"]["message"]
        assert (await post(server.http, bytes(2 << 20))).status_code == 413


@pytest.mark.parametrize(
    ("content_type", "body", "reason"),
    [
        ("application/json", b'{"file": "x"}', "multipart/form-data"),
        ("multipart/form-data", b"x", "boundary"),
        ("multipart/form-data; boundary=x", b"", "file"),
        ("multipart/form-data; boundary=x", b"--x\r\nnonsense", ""),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\nv\r\n--x--\r\n", "name"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nplain text\r\n--x--\r\n',
            "must be a file",
        ),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="model"; filename="m"\r\n\r\nx\r\n--x--\r\n',
            "file",
        ),
        (
            "multipart/form-data; boundary=x",
            b"".join(b'--x\r\nContent-Disposition: form-data; name="f%d"\r\n\r\nv\r\n' % i for i in range(600))
            + b"--x--\r\n",
            "fields",
        ),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n' + b"v" * (2 << 20) + b"\r\n--x--\r\n",
            "size",
        ),
    ],
)
async def test_bodies_that_are_no_form_are_refused(tmp_path: Path, content_type: str, body: bytes, reason: str) -> None:
    async with speech_server(tmp_path) as server:
        response = await server.http.post(PATH, content=body, headers={"content-type": content_type})
        assert response.status_code == 400, response.text
        assert reason in response.json()["error"]["message"]


async def test_huge_heads_of_parts_are_refused_or_have_no_effect(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        kind = {"content-type": "multipart/form-data; boundary=x"}
        for head in (b'; name="' + b"n" * (1 << 20) + b'"', b'; name="file"; filename="' + b"n" * (1 << 20) + b'"'):
            body = b"--x\r\nContent-Disposition: form-data" + head + b"\r\n\r\nv\r\n--x--\r\n"
            response = await server.http.post(PATH, content=body, headers=kind)
            assert response.status_code == 400
            assert len(response.content) < 8192
        many = b"--x\r\n" + b"X-Header: value\r\n" * 50_000 + b"\r\nv\r\n--x--\r\n"
        assert (await server.http.post(PATH, content=many, headers=kind)).status_code == 400
        assert (await post(server.http, GOOD, **{"n" * 5000: "v"})).status_code == 400
        assert (await post(server.http, GOOD, **{"n" * 500: "v"})).json()["text"] == "alpha"


async def test_two_files_are_refused(tmp_path: Path) -> None:
    async with speech_server(tmp_path) as server:
        files = [("file", ("a.wav", GOOD)), ("file", ("b.wav", GOOD))]
        response = await server.http.post(PATH, files=files)
        assert response.status_code == 400


async def test_a_decoder_that_takes_too_long_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SECONDS", 0.2)
    async with speech_server(tmp_path) as server:
        content = encode(tone(900.0, rate=48_000), "flac", rate=48_000)
        response = await post(server.http, content)
        assert response.status_code == 400
        assert "took more than 0.2 s" in response.json()["error"]["message"]


HOUR = encode(np.zeros((3600 * 1000, 1), np.float32), "flac", rate=1000)  # 11 kB


async def test_what_needs_more_memory_than_there_is_waits_and_is_told_when_to_come_back(tmp_path: Path) -> None:
    async with speech_server(tmp_path, max_media_memory="600MiB") as server:
        memory = server.state.media_memory
        memory._patience = 0.3
        with await memory.reserve(600 << 20, "somebody else"):
            response = await post(server.http, HOUR)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "10"
            assert "--max-media-memory" in response.json()["error"]["message"]
            task = asyncio.create_task(post(server.http, GOOD))
            await until(lambda: memory.waiting == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: memory.waiting == 0)
        assert (await post(server.http, GOOD)).json()["text"] == "alpha"
        await until(lambda: gc.collect() >= 0 and memory.held == 0)


async def test_what_can_never_fit_into_memory_is_refused(tmp_path: Path) -> None:
    async with speech_server(tmp_path, max_media_memory="100MiB") as server:
        response = await post(server.http, HOUR)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "file"
        assert "this server has 104857600 for all media (--max-media-memory)" in error["message"]


async def test_memory_is_held_while_a_file_is_transcribed(tmp_path: Path) -> None:
    core = SpeechCore()
    async with speech_server(tmp_path, core) as server:
        memory = server.state.media_memory
        sizes: list[int] = []
        heard = core.answer

        def answer(message: Any) -> Any:
            sizes.append(memory.held)
            return heard(message)

        core.answer = answer
        for stream in ("false", "true"):
            assert (await post(server.http, GOOD, stream=stream)).status_code == 200
            await until(lambda: gc.collect() >= 0 and memory.held == 0)
        window = 4 * 30 * 16_000
        assert min(sizes) >= window
        assert max(sizes) < 3 * window


async def test_a_client_that_leaves_while_its_file_is_decoded_or_sent(tmp_path: Path) -> None:
    content = encode(tone(600.0, rate=48_000), "flac", rate=48_000)
    core = SpeechCore()
    async with speech_server(tmp_path, core) as server:
        client = server.state.models[0].client
        task = asyncio.create_task(post(server.http, content))
        await until(lambda: client.slots_in_use == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: client.slots_in_use == 0)
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = (f"POST {PATH} HTTP/1.1", "Host: localhost", "Content-Length: 9999")
        kind = "Content-Type: multipart/form-data; boundary=x"
        writer.write("\r\n".join([*head, kind, "", ""]).encode())
        writer.write(b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc')
        await writer.drain()
        await until(lambda: server.state.in_flight == 1)
        writer.close()
        await until(lambda: server.state.in_flight == 0)
        assert (await post(server.http, GOOD)).json()["text"] == "alpha"
