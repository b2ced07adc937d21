"""Audio in chats: content parts become items, and what cannot become one is refused with its reason."""

from __future__ import annotations

import base64
import gc
import ipaddress
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from quire.multimodal.audio.items import audio_items
from quire.multimodal.memory import MediaMemory
from tests.support.audio import Samples, encode, tone, voice, wav
from tests.support.audio_chat import (
    KINDS,
    PLACEHOLDERS,
    SPANS,
    TOKEN,
    AudioCore,
    asked,
    audio_info,
    audio_server,
    audio_tokenizer,
    audio_url,
    described,
    encoded,
    input_audio,
    requests_of,
)
from tests.support.fake_core import FakeCore
from tests.support.server import Server, chunks_of, running_server, until

CHAT = "/v1/chat/completions"
PARTS = ("qwen2_audio", "voxtral", "qwen3_asr")  # kinds whose chat templates place the audio themselves
ONE, TWO = voice(1.0), voice(2.5)


def sound(seconds: float) -> Samples:
    return tone(seconds)[:, 0]


async def said(server: Server, body: dict[str, Any]) -> Any:
    response = await server.post(CHAT, body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    response = await server.post(CHAT, body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("kind", KINDS)
async def test_parts_become_items(tmp_path: Path, kind: str) -> None:
    """Where the chat template has them; each placeholder is there once for each embedding."""
    core, info = AudioCore(kind=kind), audio_info(kind)
    async with audio_server(tmp_path, core) as server:
        parts = ("First: ", input_audio(encoded(ONE)), "second: ", audio_url(f"data:audio/wav;base64,{encoded(TWO)}"))
        body = await said(server, asked(*parts, "which?"))
        (message,) = requests_of(core)
        lengths = [sum(item.length for item in audio_items(decoded(samples), info)) for samples in (ONE, TWO)]
        tokens = message.prompt.tolist()
        text = audio_tokenizer().decode(tokens, skip_special_tokens=False)
        spans = [SPANS[kind].replace(PLACEHOLDERS[kind], "X") for _ in lengths]
        for length in lengths:
            text = text.replace(PLACEHOLDERS[kind] * length, "X", 1)
        lines = "" if kind in PARTS else "\n"
        assert lines.join(("First: ", spans[0], "second: ", spans[1], "which?")) in text
        assert tokens.count(info.placeholder) == sum(lengths)
        covered = [index for item in message.items for index in range(item.start, item.start + item.length)]
        assert [index for index, token in enumerate(tokens) if token == info.placeholder] == covered
        usage = body["usage"]
        assert usage["prompt_tokens"] == len(tokens)
        assert usage["prompt_tokens_details"]["audio_tokens"] == sum(lengths)
        assert usage["prompt_tokens_details"]["multimodal_tokens"] == {"audio": sum(lengths)}


def decoded(samples: Samples) -> Samples:
    """As a wav file of 16 bits has them."""
    return (np.round(samples * 32767) / 32768).astype(np.float32)


async def test_the_template_may_want_texts(tmp_path: Path) -> None:
    core = AudioCore()
    async with audio_server(tmp_path, core, parts=False) as server:
        await said(server, asked("a", input_audio(encoded(ONE)), "b"))
    (message,) = requests_of(core)
    tokens = message.prompt.tolist()
    assert tokens.count(TOKEN["<|AUDIO|>"]) == message.items[0].length == 25
    assert tokens[message.items[0].start - 1] == TOKEN["<|audio_bos|>"]


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_empty_text_beside_audio_renders_as_nothing(tmp_path: Path, kind: str, parts: bool) -> None:
    """Before it, behind it or on both sides, in chats and in Responses; a text of white space stays."""
    core = AudioCore(kind=kind)
    heard, empty = input_audio(encoded(ONE)), {"type": "text", "text": ""}
    contents = [[heard], [empty, heard], [heard, empty], [empty, heard, empty, empty]]
    async with audio_server(tmp_path, core, parts=parts) as server:
        for content in contents:
            await said(server, {"messages": [{"role": "user", "content": content}]})
        for content in contents:
            items = [{**part, "type": "input_text"} if part is empty else part for part in content]
            response = await server.post("/v1/responses", {"input": [{"role": "user", "content": items}]})
            assert response.status_code == 200, response.text
        await said(server, asked(heard, " "))
    alone, *others, spaced = [message.prompt.tolist() for message in requests_of(core)]
    assert others == [alone] * 7
    assert spaced != alone


@pytest.mark.parametrize(
    "item",
    [
        {"role": "system", "content": [input_audio(encoded(ONE))]},
        {"type": "function_call_output", "call_id": "c", "output": [input_audio(encoded(ONE))]},
    ],
)
async def test_responses_hear_audio_in_system_messages_and_results(tmp_path: Path, item: dict[str, Any]) -> None:
    core = AudioCore()
    async with audio_server(tmp_path, core) as server:
        response = await server.post("/v1/responses", {"input": [item, {"role": "user", "content": "?"}]})
        assert response.status_code == 200, response.text
    assert [len(message.items) for message in requests_of(core)] == [1]


async def test_responses_hear_no_audio_of_the_assistant(tmp_path: Path) -> None:
    item = {"role": "assistant", "content": [input_audio(encoded(ONE))]}
    async with audio_server(tmp_path) as server:
        response = await server.post("/v1/responses", {"input": [{"role": "user", "content": "?"}, item]})
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["message"] == "Content of type `input_audio` is not supported in messages of the assistant."
        assert error["param"] == "input[1].content[0]"


async def test_equal_audio_has_equal_items(tmp_path: Path) -> None:
    core = AudioCore()
    url = audio_url(f"data:audio/x-wav;base64,{encoded(ONE)}")
    async with audio_server(tmp_path, core) as server:
        for data in (input_audio(encoded(ONE)), url, input_audio(encoded(sound(1.0)), None)):
            await said(server, asked(data, "?"))
    hashes = [message.items[0].hash for message in requests_of(core)]
    assert hashes[0] == hashes[1] != hashes[2]


async def test_all_choices_and_streams_hear_it(tmp_path: Path) -> None:
    core = AudioCore()
    async with audio_server(tmp_path, core) as server:
        body = await said(server, asked(input_audio(encoded(ONE)), n=2, temperature=1))
        texts = [choice["message"]["content"] for choice in body["choices"]]
        assert len(texts) == 2
        assert all(text.endswith("+25") for text in texts)
        response = await server.post(CHAT, asked(input_audio(encoded(ONE)), stream=True))
        chunks = chunks_of(response.text)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks).endswith("+25")


async def test_other_endpoints_that_chat(tmp_path: Path) -> None:
    """A final message with audio can be continued."""
    core = AudioCore()
    async with audio_server(tmp_path, core) as server:
        body = asked(input_audio(encoded(ONE)), continue_final_message=True, add_generation_prompt=False)
        await said(server, body)
    assert requests_of(core)[0].prompt.tolist()[-1] == TOKEN["<|audio_eos|>"]


async def test_chats_with_audio_are_rendered_to_tokens(tmp_path: Path) -> None:
    async with audio_server(tmp_path) as server:
        response = await server.post(f"{CHAT}/render", asked("a", input_audio(encoded(ONE))))
        assert response.status_code == 200
        (place,) = response.json()["features"]["mm_placeholders"]["audio"]
        assert place["length"] == 25
        tokens = await server.post("/tokenize", asked("a", input_audio(encoded(ONE))))
        assert tokens.json()["tokens"].count(TOKEN["<|AUDIO|>"]) == 25


async def test_models_tell_what_they_read(tmp_path: Path) -> None:
    async with audio_server(tmp_path, AudioCore(), FakeCore()) as server:
        cards = (await server.http.get("/v1/models")).json()["data"]
    assert [(card["tasks"], card["input_modalities"]) for card in cards] == [
        (["generate", "transcribe"], ["text", "audio"]),
        (["generate", "transcribe"], ["text", "audio"]),
        (["generate"], ["text"]),
    ]


async def test_a_model_of_text_names_what_it_accepts(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for part in (input_audio("AAAA"), audio_url("http://127.0.0.1:1/secret")):
            error = await refused(server, asked("a", part))
            assert error["message"].endswith("the model `fake` accepts text only.")
            assert error["param"] == "messages[0].content[1]"


NOT_AUDIO = base64.b64encode(b"<html>not audio</html>" * 9).decode()
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no base64": (input_audio("!!!"), "not valid base64"),
    "letters beyond": (input_audio("\u00e4\u00f6AA"), "not valid base64"),
    "padding": (input_audio("AAA"), "not valid base64"),
    "empty": (input_audio(""), "The content is empty"),
    "no file": (input_audio(NOT_AUDIO), "Invalid or unsupported audio file"),
    "cut off": (input_audio(base64.b64encode(wav(tone(1.0))[:9000]).decode()), "The wav file is truncated"),
    "unknown format": (input_audio(encoded(ONE), "midi"), "format 'midi' is not supported"),
    "odd format": ({"type": "input_audio", "input_audio": {"data": "AA", "format": 7}}, "format '7' is not supported"),
    "wrong format": (input_audio(encoded(ONE), "mp3"), "is wav, but its `format` is mp3"),
    "no data": ({"type": "input_audio", "input_audio": {"format": "wav"}}, '{"data": BASE64'),
    "no object": ({"type": "input_audio", "input_audio": "AAAA"}, '{"data": BASE64'),
    "no field": ({"type": "input_audio"}, '{"data": BASE64'),
    "no url": ({"type": "audio_url", "audio_url": {}}, '{"url": URL}'),
    "number": ({"type": "audio_url", "audio_url": {"url": 5}}, '{"url": URL}'),
    "data url of text": (audio_url("data:text/plain,hello"), "data:TYPE;base64,CONTENT"),
    "data url without comma": (audio_url("data:audio/wav;base64"), "data:TYPE;base64,CONTENT"),
    "data url of nothing": (audio_url("data:audio/wav;base64,"), "The content is empty"),
    "ftp": (audio_url("ftp://example.com/a.wav"), "must be a data, http, https or file URL"),
    "no scheme": (audio_url("/etc/passwd"), "must be a data, http, https or file URL"),
    "http": (audio_url("http://169.254.169.254/latest"), "This server fetches no URLs"),
    "https": (audio_url("HTTPS://example.com/a.wav"), "This server fetches no URLs"),
    "file": (audio_url("file:///etc/passwd"), "This server reads no files"),
    "too long": (input_audio(encoded(sound(31.0))), "31.0 s long; this model takes at most 30 s"),
    "too short": (input_audio(encoded(sound(0.005))), "too short"),
    "picture": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "'image_url' are not"),
    "no marker of ours": ({"type": "audio"}, "'audio' are not supported"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_what_cannot_be_heard_is_refused(tmp_path: Path, name: str) -> None:
    part, reason = BROKEN[name]
    core = AudioCore()
    first = "a" if name == "no marker of ours" else input_audio(encoded(ONE))
    async with audio_server(tmp_path, core) as server:
        error = await refused(server, asked(first, part))
        assert reason in error["message"]
        assert error["param"] in ("messages[0].content[1]", "messages")
        assert server.state.models[0].client.slots_in_use == 0
    assert requests_of(core) == []


async def test_a_text_like_a_marker_is_a_text(tmp_path: Path) -> None:
    core = AudioCore()
    async with audio_server(tmp_path, core) as server:
        await said(server, asked(input_audio(encoded(ONE)), {"type": "text", "text": "<|AUDIO|>"}))
    (request,) = requests_of(core)
    (item,) = request.items
    assert (request.prompt == audio_info(core.kind).placeholder).sum() == item.length


async def test_limits(tmp_path: Path) -> None:
    core = AudioCore(context=300)
    options: dict[str, Any] = {"max_audio_size": 200_000, "max_audio_seconds": 6.0, "max_audio_parts": 2}
    async with audio_server(tmp_path, core, **options) as server:
        part = input_audio(encoded(sound(5.0)))
        assert "more than" not in (await said(server, asked(part, part)))["choices"][0]["message"]["content"]
        many = await refused(server, asked(*[part] * 3))
        assert many["message"].startswith("A chat may have at most 2 audio parts (--max-audio-parts), not 3")
        large = await refused(server, asked(input_audio(encoded(sound(6.5)))))
        assert "200000 bytes" in large["message"]
        flac = base64.b64encode(encode(tone(6.5), "flac")).decode()
        long = await refused(server, asked(input_audio(flac, "flac")))
        assert "6 s" in long["message"]
        short = await refused(server, asked(part, truncate_prompt_tokens=5))
        assert short["param"] == "truncate_prompt_tokens"
        assert server.state.models[0].client.slots_in_use == 0
    async with audio_server(tmp_path / "b", AudioCore(context=200)) as server:
        full = await refused(server, asked(part, part))
        assert "maximum context length is 200 tokens" in full["message"]
        assert full["param"] == "messages[0].content[1]"
    async with audio_server(tmp_path / "c", AudioCore(), max_audio_parts=0) as server:
        assert "at most 0 audio parts" in (await refused(server, asked(part)))["message"]


async def test_the_memory_of_a_chat_is_held_until_it_is_answered(tmp_path: Path) -> None:
    """For each answer, as each is a request to the engine; also of a chat that is refused in the end."""
    core = AudioCore()
    async with audio_server(tmp_path, core) as server:
        memory = memory_of(server)
        sizes: list[int] = []

        def answer(message: Any) -> list[int]:
            sizes.append(memory.held)
            return described(message)

        core.answer = answer
        for n in (1, 3):
            await said(server, asked(input_audio(encoded(ONE)), input_audio(encoded(TWO)), n=n, temperature=1))
            await until(lambda: gc.collect() >= 0 and memory.held == 0)
        await refused(server, asked(input_audio(encoded(ONE)), input_audio(NOT_AUDIO)))
        await refused(server, asked(input_audio(encoded(ONE)), stop_token_ids=[-5]))
        await until(lambda: gc.collect() >= 0 and memory.held == 0)
    (first, *_), features = sizes, sum(item.features.nbytes for item in requests_of(core)[0].audio_items)
    assert first == 2 * features
    assert sizes[1] == 4 * features


def memory_of(server: Server) -> MediaMemory:
    return server.state.media_memory


@pytest.mark.parametrize("way", ["input_audio", "data url", "address", "file", "responses"])
async def test_every_way_in_reserves_memory(tmp_path: Path, web: dict[str, Answer], way: str) -> None:
    """A chat whose audio can never fit is refused, and what does not fit now is told to come back."""
    hour = encode(np.zeros((3600 * 1000, 1), np.float32), "flac", rate=1000)
    data = base64.b64encode(hour).decode()
    (tmp_path / "a.flac").write_bytes(hour)
    web["/a.flac"] = lambda _: httpx.Response(200, stream=httpx.ByteStream(hour))
    part = {
        "data url": audio_url(f"data:audio/flac;base64,{data}"),
        "address": audio_url("http://media.example/a.flac"),
        "file": audio_url(f"file://{tmp_path}/a.flac"),
    }.get(way, input_audio(data, "flac"))
    options: dict[str, Any] = {"allowed_media_domains": ["media.example"], "allowed_local_media_path": tmp_path}
    path, body = CHAT, asked(part, "?")
    if way == "responses":
        path, body = "/v1/responses", {"input": [{"role": "user", "content": [part]}]}
    async with audio_server(tmp_path / "m", max_media_memory="100MiB", max_audio_size="1MiB", **options) as server:
        response = await server.post(path, body)
        assert response.status_code == 400, response.text
        assert "--max-media-memory" in response.json()["error"]["message"]
        message = "input[0]" if way == "responses" else "messages[0]"
        assert response.json()["error"]["param"] == f"{message}.content[0]"
        memory = memory_of(server)
        memory._patience = 0.3
        with await memory.reserve(100 << 20, "somebody else"):
            response = await server.post(path, body)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "10"
        await until(lambda: gc.collect() >= 0 and memory.held == 0)


async def test_files_below_the_allowed_directory(tmp_path: Path) -> None:
    allowed, core = tmp_path / "allowed", AudioCore()
    allowed.mkdir()
    (allowed / "a b.wav").write_bytes(wav(ONE[:, None]))
    (tmp_path / "secret.wav").write_bytes(wav(ONE[:, None]))
    (allowed / "link.wav").symlink_to(tmp_path / "secret.wav")
    (allowed / "loop").symlink_to(allowed / "loop")
    (allowed / "folder").mkdir()
    outside = "not in the directory of --allowed-local-media-path"
    cases = {
        f"file://{tmp_path}/secret.wav": outside,
        f"file://{allowed}/../secret.wav": outside,
        f"file://{allowed}/%2e%2e/secret.wav": outside,
        f"file://{allowed}/link.wav": outside,
        f"file://{tmp_path}/nothing-there": outside,
        f"file://elsewhere{allowed}/a%20b.wav": outside,
        f"file://{allowed}/nothing.wav": "The file cannot be read.",
        f"file://{allowed}/folder": "The file cannot be read.",
        f"file://{allowed}/a%00b": "is not valid",
    }
    async with audio_server(tmp_path / "model", core, allowed_local_media_path=allowed) as server:
        for host in ("", "localhost"):
            await said(server, asked(audio_url(f"file://{host}{allowed}/a%20b.wav")))
        for url, reason in cases.items():
            assert reason in (await refused(server, asked(audio_url(url))))["message"], url
    assert len(requests_of(core)) == 2


Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """Answers by path, to whatever the server fetches."""
    answers: dict[str, Answer] = {}
    real = httpx.AsyncClient

    def client(**options: Any) -> httpx.AsyncClient:
        if "trust_env" not in options:  # the test's own
            return real(**options)
        assert options["trust_env"] is False
        return real(transport=httpx.MockTransport(lambda request: answers[request.url.path](request)), **options)

    monkeypatch.setattr("quire.multimodal.fetch.httpx.AsyncClient", client)
    monkeypatch.setattr("quire.multimodal.fetch._look_up", lambda _: [ipaddress.ip_address("93.184.216.34")])
    return answers


def fails(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("10.1.2.3 refused the connection")


async def test_addresses_of_allowed_domains(tmp_path: Path, web: dict[str, Answer]) -> None:
    content = wav(ONE[:, None])
    web["/a.wav"] = lambda _: httpx.Response(200, stream=httpx.ByteStream(content))
    web["/moved"] = lambda _: httpx.Response(302, headers={"location": "http://169.254.169.254/"})
    web["/gone"] = lambda _: httpx.Response(404, text="the secret of an inner page")
    web["/page"] = lambda _: httpx.Response(200, stream=httpx.ByteStream(b"<html>secret</html>"))
    web["/large"] = lambda _: httpx.Response(200, stream=httpx.ByteStream(bytes(300_000)))
    web["/packed"] = lambda _: httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b""))
    web["/down"] = fails
    refusals = {
        "http://media.example/moved": "redirects to a URL that is not allowed",
        "http://media.example/gone": "status 404.",
        "http://media.example/page": "Invalid or unsupported audio file",
        "http://media.example/large": "limit: 200000 bytes",
        "http://media.example/packed": "compressed content",
        "http://media.example/down": "The URL could not be fetched.",
        "http://other.example/a.wav": "from one of the allowed domains: media.example.",
        "http://media.example.other.example/a.wav": "allowed domains",
        "http://other.example\\@media.example/a.wav": "user name",
        "http://media.example@other.example/a.wav": "user name",
        "http://media.example:80:80/a.wav": "is not valid",
        "http://[::1/a.wav": "is not valid",
        "http:///a.wav": "allowed domains",
    }
    core = AudioCore()
    options: dict[str, Any] = {"allowed_media_domains": ["Media.Example"], "max_audio_size": 200_000}
    async with audio_server(tmp_path, core, **options) as server:
        for url in ("http://media.example/a.wav", "https://MEDIA.example:8443/a.wav"):
            await said(server, asked(audio_url(url)))
        for url, reason in refusals.items():
            message = (await refused(server, asked(audio_url(url))))["message"]
            assert reason in message, url
            assert "secret" not in message
            assert "10.1.2.3" not in message
    assert len(requests_of(core)) == 2


async def test_a_slow_address(tmp_path: Path) -> None:
    """A real connection to a server that never answers."""
    import asyncio

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(never, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    options: dict[str, Any] = {"allowed_media_domains": ["127.0.0.1"], "media_fetch_timeout": 0.2}
    async with silent, audio_server(tmp_path, **options) as server:
        error = await refused(server, asked(audio_url(f"http://127.0.0.1:{port}/a.wav")))
    assert error["message"] in ("The URL could not be fetched within 0.2 s.", "The URL could not be fetched.")


@pytest.mark.parametrize("kind", KINDS)
def test_long_audio_becomes_several_items(kind: str) -> None:
    """One behind the other; each can be encoded by itself."""
    info = audio_info(kind)
    seconds = 30.0 if info.max_items else 61.3
    items = audio_items(sound(seconds), info)
    assert [item.start for item in items] == [sum(item.length for item in items[:i]) for i in range(len(items))]
    expected = {
        "granite_speech": [100 * 3],
        "phi4_multimodal": [500, math.ceil((6128 - 4000) / 8)],
        "qwen2_audio": [750],
        "qwen3_asr": [104] * 7 + [math.ceil(530 / 8)],
        "voxtral": [375] * 3,
    }[kind]
    assert [item.length for item in items] == pytest.approx(expected, abs=2 if kind == "qwen3_asr" else 0)


@pytest.mark.parametrize("kind", ["phi4_multimodal", "voxtral"])
@pytest.mark.parametrize("part", ["image_url", "input_image", "video_url"])
async def test_pictures_are_refused_by_name(tmp_path: Path, kind: str, part: str) -> None:
    """Also beside audio, which is not read then."""
    core = AudioCore(kind=kind)
    picture = {"type": part, part: {"url": "data:image/png;base64,AAAA"}}
    async with audio_server(tmp_path, core) as server:
        for parts in ((picture,), ("a", input_audio(encoded(ONE)), picture)):
            error = await refused(server, asked(*parts))
            assert error["message"].startswith(f"Content parts of type '{part}' are not supported")
            assert error["message"].endswith("accepts text and audio only.")
            assert error["param"] == f"messages[0].content[{len(parts) - 1}]"
        assert server.state.models[0].client.slots_in_use == 0
    assert requests_of(core) == []


async def test_audio_that_is_one_item_is_limited(tmp_path: Path) -> None:
    """Granite Speech encodes a piece of audio at once; what is too short for a column is refused, too."""
    async with audio_server(tmp_path, AudioCore(kind="granite_speech", context=32_000)) as server:
        error = await refused(server, asked(input_audio(encoded(sound(301.0))), "?"))
        assert error["message"] == "The audio is 301.0 s long; this model takes at most 300 s in one audio part."
        error = await refused(server, asked(input_audio(encoded(sound(0.015))), "?"))
        assert error["message"] == "The audio is too short: its 0.015 s give no audio token of this model."
