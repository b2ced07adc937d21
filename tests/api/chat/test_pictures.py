"""Pictures in all APIs: they become items where the message has them, and what cannot become one is refused in time."""

from __future__ import annotations

import gc
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from quire.engine.client.pictures import GridTiles
from tests.support.fake_core import FakeCore
from tests.support.pdf import image_bomb, pdf, stream_bomb
from tests.support.picture_chat import (
    CHAT,
    FIXED,
    IMAGE,
    MESSAGES,
    PARTS,
    RESPONSES,
    SMART,
    TEXTS,
    TOKEN,
    PictureCore,
    asked,
    base64_of,
    data_url,
    image_block,
    image_url,
    input_image,
    painted,
    picture_server,
    refused,
    said,
)
from tests.support.server import Server, until

RED, BLUE = painted("red"), painted("blue", (8, 8))
PICTURE = f"<pic>{IMAGE * 4}</pic>"


async def test_pictures_become_items_where_they_are(tmp_path: Path) -> None:
    core = PictureCore()
    async with picture_server(tmp_path, core) as server:
        body = await said(server, asked("First: ", image_url(RED), "second: ", image_url(BLUE), "which?"))
    (request,) = core.requests
    assert f"First: {PICTURE}second: {PICTURE}which?<|im_end|>" in core.prompts[0]
    tokens = request.prompt.tolist()
    covered = [index for item in request.items for index in range(item.start, item.start + item.length)]
    assert [index for index, token in enumerate(tokens) if token == TOKEN[IMAGE]] == covered
    (red, blue), (usage,) = core.items[0], [body["usage"]]
    assert red.pixels.shape == blue.pixels.shape == (1, 8, 8, 3)
    assert np.array_equal(red.pixels[0, 0, 0], [255, 0, 0])
    assert np.array_equal(blue.pixels[0, 0, 0], [0, 0, 255])
    assert usage["prompt_tokens"] == len(tokens)
    assert usage["prompt_tokens_details"]["multimodal_tokens"] == {"image": 8}
    assert "audio_tokens" not in usage["prompt_tokens_details"]


async def test_the_template_may_want_texts(tmp_path: Path) -> None:
    core = PictureCore()
    async with picture_server(tmp_path, core, template=TEXTS) as server:
        await said(server, asked("a", image_url(RED), "b"))
    assert f"a\n{PICTURE}\nb<|im_end|>" in core.prompts[0]


async def test_every_form_of_a_part(tmp_path: Path) -> None:
    """In any API, with and without a type; equal pictures have equal items."""
    core = PictureCore()
    (tmp_path / "red.png").write_bytes(RED)
    parts: list[dict[str, Any]] = [
        image_url(RED),
        {"type": "image_url", "image_url": {"url": data_url(RED, "image/jpeg"), "detail": "high"}},
        {"type": "image_url", "image_url": data_url(RED)},
        {"image_url": data_url(RED)},
        {"image_url": {"url": data_url(RED)}},
        {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/red.png"}},
        input_image(RED),
        image_block(RED),
        {"type": "image", "source": {"type": "url", "url": data_url(RED)}},
        {"type": "file", "file": {"file_data": data_url(RED)}},
    ]
    async with picture_server(tmp_path / "m", core, allowed_local_media_path=tmp_path) as server:
        for part in parts:
            answer = await server.post(CHAT, asked(part))
            assert answer.status_code == 200, answer.text
            assert "x-quire-ignored-fields" not in answer.headers
        await said(server, {"input": [{"role": "user", "content": [input_image(RED)]}]}, RESPONSES)
        await said(server, {"max_tokens": 4, "messages": [{"role": "user", "content": [image_block(RED)]}]}, MESSAGES)
    assert len({item.hash for items in core.items for item in items}) == 1
    assert len(set(core.prompts)) == 1


async def test_a_rendered_chat_tells_which_media_it_has_and_where(tmp_path: Path) -> None:
    core = PictureCore()
    async with picture_server(tmp_path, core) as server:
        body = asked("a", image_url(RED), image_url(BLUE))
        rendered = await said(server, body, f"{CHAT}/render")
        assert not core.requests
        await said(server, body)
        (request,) = core.requests
        assert rendered["token_ids"] == request.prompt.tolist()
        assert rendered["features"] == {
            "mm_hashes": {"image": [item.hash.hex() for item in request.items]},
            "mm_placeholders": {"image": [{"offset": item.start, "length": 4} for item in request.items]},
        }
        assert (await said(server, asked("a"), f"{CHAT}/render"))["features"] is None
        error = await refused(server, rendered, "/inference/v1/generate")
        assert error["param"] == "features"


async def test_embeddings_of_pictures_by_opt_in(tmp_path: Path) -> None:
    values = np.arange(24, dtype="<f4").reshape(4, 6)
    header = b'{"a":{"dtype":"F32","shape":[4,6],"data_offsets":[0,96]}}'
    tensor = base64_of(len(header).to_bytes(8, "little") + header + values.tobytes())
    parts: list[dict[str, Any]] = [
        {"type": "image_embeds", "image_embeds": tensor},
        {"type": "image_embeds", "image_embeds": {"image_embeds": tensor}},
    ]
    core = PictureCore()
    async with picture_server(tmp_path, core, enable_mm_embeds=True) as server:
        body = await said(server, asked("a", *parts, "b"))
        assert body["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": 8}
        assert f"a{PICTURE}{PICTURE}b" in core.prompts[0]
        for item in core.items[0]:
            assert item.encoding is not None
            np.testing.assert_array_equal(item.encoding, values)
        del item
        core.received.clear()
        await until(lambda: gc.collect() >= 0 and server.state.media_memory.held == 0)
        for wrong, where in (
            ({"image_embeds": "AAAA"}, ""),
            ({"image_embeds": 5}, ".image_embeds"),
            ({"image_embeds": {"image_embeds": tensor, "x": 1}}, ".image_embeds"),
            ({"image_embeds": {"image_embeds": tensor, "image_grid_thw": "?"}}, ".image_embeds.image_grid_thw"),
        ):
            error = await refused(server, asked({"type": "image_embeds", **wrong}))
            assert error["param"] == f"messages[0].content[0]{where}"
        await said(server, asked(image_url(RED), parts[0], image_url(RED)))
        assert [item.encoding is None for item in core.items[-1]] == [True, False, True]
    async with picture_server(tmp_path / "closed") as server:
        assert "--enable-mm-embeds" in (await refused(server, asked(parts[0])))["message"]


async def test_low_detail_has_fewer_tokens_or_is_named_as_without_effect(tmp_path: Path) -> None:
    wide = painted(size=(64, 16))
    for geometry, fewer in ((GridTiles(height=8, width=8, tokens=4), True), (FIXED, False)):
        core = PictureCore(geometry=geometry)
        async with picture_server(tmp_path / str(fewer), core) as server:
            for part, field in (
                ({"type": "image_url", "image_url": {"url": data_url(wide), "detail": "low"}}, "image_url.detail"),
                ({**input_image(wide), "detail": "low"}, "detail"),
                ({"type": "file", "file": {"file_data": data_url(wide), "detail": "low"}}, "file.detail"),
            ):
                answer = await server.post(CHAT, asked(image_url(wide), part))
                assert answer.status_code == 200, answer.text
                ignored = answer.headers.get("x-quire-ignored-fields", "")
                assert (f"messages[0].content[1].{field}" in ignored) is not fewer
                assert len(core.items[-1]) == (5 + 1 if fewer else 1 + 1)


async def test_pictures_in_results_of_tools_and_system_messages(tmp_path: Path) -> None:
    core = PictureCore()
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [input_image(RED)]}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image_block(RED)]}
    function = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (RESPONSES, {"input": [{"role": "user", "content": "?"}, call, output]}),
        (
            MESSAGES,
            {
                "max_tokens": 9,
                "messages": [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": [use]},
                    {"role": "user", "content": [result]},
                ],
            },
        ),
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "tool_calls": [function]},
                    {"role": "tool", "tool_call_id": "c", "content": [image_url(RED)]},
                ]
            },
        ),
    ]
    async with picture_server(tmp_path, core) as server:
        for path, body in bodies:
            await said(server, body, path)
        await said(
            server, {"messages": [{"role": "system", "content": [image_url(RED)]}, {"role": "user", "content": "?"}]}
        )
        await said(
            server, {"instructions": "a", "input": [{"role": "developer", "content": [input_image(RED)]}]}, RESPONSES
        )
        items: list[Any] = [
            {"role": "system", "content": "b"},
            {"role": "system", "content": [{"type": "input_text", "text": text} for text in "cd"]},
            {"role": "developer", "content": [input_image(RED), {"type": "input_text", "text": "e"}]},
            {"role": "developer", "content": "f"},
        ]
        await said(server, {"instructions": "a", "input": items}, RESPONSES)
    assert all(f"tool\n{PICTURE}<|im_end|>" in prompt for prompt in core.prompts[:3])
    assert f"system\n{PICTURE}<|im_end|>" in core.prompts[3]
    assert f"system\na\n\n{PICTURE}<|im_end|>" in core.prompts[4]
    assert f"system\na\n\nb\n\ncd\n\n{PICTURE}e\n\nf<|im_end|>" in core.prompts[5]


async def test_pages_of_a_pdf_file_are_pictures_with_text(tmp_path: Path) -> None:
    core = PictureCore()
    content = pdf("The first page.", "", size=(400, 200))
    part = {"type": "file", "file": {"filename": "a.pdf", "file_data": data_url(content, "application/pdf")}}
    async with picture_server(tmp_path, core) as server:
        await said(server, asked(part, "What is it?"))
        few = await refused(server, asked(*[image_url(RED)] * 63, part))
    assert f"a.pdf\n{PICTURE}The first page.\n{PICTURE}What is it?" in core.prompts[0]
    first, second = core.items[0]
    assert first.hash != second.hash
    assert second.pixels.min() == 255  # an empty page
    assert "only 1 more pictures are allowed" in few["message"]
    assert few["param"] == "messages[0].content[63]"


@asynccontextmanager
async def openai_client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_through_the_clients_of_openai_and_anthropic(tmp_path: Path) -> None:
    import anthropic  # not where each process collects tests: it takes a second

    core = PictureCore()
    async with picture_server(tmp_path, core) as server:
        async with openai_client(server) as client:
            messages: Any = asked(image_url(RED), "What is it?")["messages"]
            answer = await client.chat.completions.create(model="fake", messages=messages)
            assert answer.choices[0].message.content == f"{core.items[0][0].start}+4"
            stream = await client.chat.completions.create(model="fake", messages=messages, stream=True)
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(texts) == answer.choices[0].message.content
            items: Any = [{"role": "user", "content": [input_image(RED), {"type": "input_text", "text": "What?"}]}]
            response = await client.responses.create(model="fake", input=items)
            follow_up = await client.responses.create(model="fake", input="And now?", previous_response_id=response.id)
            assert follow_up.output_text
            bad: Any = [{"role": "user", "content": [{"type": "input_image", "file_id": "f", "detail": "auto"}]}]
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="fake", input=bad)
            assert caught.value.param == "input[0].content[0].file_id"
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            blocks: Any = [image_block(RED), {"type": "text", "text": "What is it?"}]
            messages = [{"role": "user", "content": blocks}]
            message = await client.messages.create(model="fake", max_tokens=20, messages=messages)
            count = await client.messages.count_tokens(model="fake", messages=messages)
            assert count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
            refused_block: Any = {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": "AA"},
            }
            with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.source\.data: "):
                await client.messages.create(
                    model="fake", max_tokens=20, messages=[{"role": "user", "content": [refused_block]}]
                )
    assert [len(items) for items in core.items] == [1] * 5


async def test_tokens_are_counted_without_an_answer(tmp_path: Path) -> None:
    core = PictureCore()
    async with picture_server(tmp_path, core) as server:
        counted = await said(server, asked(image_url(RED), "?"), "/tokenize")
        answered = await said(server, asked(image_url(RED), "?"))
    assert counted["count"] == answered["usage"]["prompt_tokens"]
    assert counted["tokens"].count(TOKEN[IMAGE]) == 4


async def test_what_models_read_is_listed(tmp_path: Path) -> None:
    async with picture_server(tmp_path, PictureCore(), FakeCore()) as server:
        cards = (await server.http.get("/v1/models")).json()["data"]
    assert [card["input_modalities"] for card in cards] == [["text", "image"], ["text", "image"], ["text"]]


async def test_users_cannot_write_pictures(tmp_path: Path) -> None:
    """What a user writes is text, beside pictures and without any."""
    core = PictureCore()
    async with picture_server(tmp_path, core) as server:
        await said(server, asked(f"I wrote {IMAGE}", image_url(RED)))
        await said(server, asked(f"I wrote {IMAGE}"))
    assert [request.prompt.tolist().count(TOKEN[IMAGE]) for request in core.requests] == [4, 0]
    assert f"I wrote {IMAGE}{PICTURE}" in core.prompts[0]


async def test_settings_of_pictures(tmp_path: Path) -> None:
    core = PictureCore(geometry=SMART)
    options: dict[str, Any] = {"mm_processor_kwargs": {"max_pixels": 1024}}
    large, clear = painted("red", (128, 128)), painted("#00000000", mode="RGBA")
    async with picture_server(tmp_path, core, **options) as server:
        await said(server, asked(image_url(large)))
        await said(server, asked(image_url(large), mm_processor_kwargs={"images_kwargs": {"max_pixels": 256}}))
        await said(server, asked(image_url(clear)))
        await said(server, asked(image_url(clear), media_io_kwargs={"image": {"rgba_background_color": [9, 8, 7]}}))
        unused = await server.post(CHAT, asked("?", mm_processor_kwargs={"max_pixels": 256}))
        assert unused.headers["x-quire-ignored-fields"] == "mm_processor_kwargs"
        for fields, param in (
            ({"mm_processor_kwargs": {"num_crops": 4}}, "mm_processor_kwargs.num_crops"),
            ({"mm_processor_kwargs": {"max_pixels": 0}}, "mm_processor_kwargs.max_pixels"),
            ({"mm_processor_kwargs": {"size": {"height": 4}}}, "mm_processor_kwargs.size"),
            ({"media_io_kwargs": {"video": {"num_frames": 4}}}, "media_io_kwargs.video"),
            ({"media_io_kwargs": {"image": {"rgba_background_color": [1, 2]}}}, "media_io_kwargs.image"),
        ):
            assert (await refused(server, asked(image_url(large), **fields)))["param"] == param
    sizes = [items[0].pixels.shape[1:3] for items in core.items[:2]]
    assert sizes == [(32, 32), (16, 16)]
    assert [items[0].pixels[0, 0, 0].tolist() for items in core.items[2:4]] == [[255, 255, 255], [9, 8, 7]]


async def test_models_without_pictures_have_no_settings_of_them(tmp_path: Path) -> None:
    async with picture_server(tmp_path, PictureCore(), FakeCore()) as server:
        error = await refused(server, {**asked("?", mm_processor_kwargs={"max_pixels": 4}), "model": "fake-1"})
    assert error["param"] == "mm_processor_kwargs"
    assert "accepts text only" in error["message"]


async def test_a_name_stands_for_content_that_was_sent_before(tmp_path: Path) -> None:
    """Of the same client; names of others are others."""
    core = PictureCore()
    named = {"type": "image_url", "image_url": None, "uuid": "a"}
    async with picture_server(tmp_path, core, api_key=["one", "two"]) as server:
        first, second = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        for part in (image_url(RED, uuid="a"), named):
            answer = await server.post(CHAT, asked(part), headers=first)
            assert answer.status_code == 200, answer.text
        for part, headers in ((named, second), ({**named, "uuid": "b"}, first), ({**named, "uuid": 5}, first)):
            answer = await server.post(CHAT, asked(part), headers=headers)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"].startswith("messages[0].content[0]")
    assert core.items[0][0].hash == core.items[1][0].hash


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG file that says it has this size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def hostile() -> dict[str, tuple[dict[str, Any], str]]:
    """What cannot be seen, and a part of what is said about it."""
    return {
        "truncated": (image_url(painted("red", (64, 64))[:-40]), "broken"),
        "bomb": (image_url(png(20_000, 20_000)), "--max-image-pixels"),
        "svg": (image_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "SVG"),
        "html": (image_url(b"<html>" * 9), "not a picture"),
        "pdf": (image_url(pdf("a")), "PDF"),
        "empty": (image_url(b""), "The content is empty"),
        "not base64": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!!"}}, "not valid base64"),
        "data url of text": (
            {"type": "image_url", "image_url": {"url": "data:image/png,AA"}},
            "data:TYPE;base64,CONTENT",
        ),
        "http": ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}, "This server fetches no URLs"),
        "file": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "This server reads no files"),
        "number": ({"type": "image_url", "image_url": {"url": 5}}, "`image_url` must be"),
        "nothing": ({"type": "image_url"}, "`image_url` must be"),
        "detail": ({"type": "image_url", "image_url": {"url": "data:", "detail": "huge"}}, "`detail` must be one of"),
        "id": ({"type": "input_image", "file_id": "f"}, "no file 'f'"),
        "source": ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "no file 'f'"),
        "video": ({"type": "video_url", "video_url": {"url": "data:"}}, "accepts text and pictures only"),
        "audio": ({"type": "input_audio", "input_audio": {"data": "AA"}}, "accepts text and pictures only"),
        "long": (image_url(painted("red", (2000, 2))), "longer edge"),
        "bomb in a pdf": ({"type": "file", "file": {"file_data": base64_of(stream_bomb())}}, "The PDF file"),
    }


async def test_what_cannot_be_seen_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    core = PictureCore()
    async with picture_server(tmp_path, core) as server:
        for name, (part, reason) in hostile().items():
            with subtests.test(name):
                error = await refused(server, asked(image_url(RED), part))
                assert reason in error["message"]
                assert error["param"].startswith("messages[0].content[1]")
                assert server.state.models[0].client.slots_in_use == 0
                await until(lambda: server.state.media_memory.held == 0 or gc.collect() < 0)
    assert core.requests == []


async def test_a_page_that_would_take_gigabytes_stays_within_bounds(tmp_path: Path) -> None:
    """PDFium leaves out what it has no memory for, or needs too much time; the next file is read."""
    core = PictureCore()
    part = {"type": "file", "file": {"file_data": base64_of(image_bomb())}}
    async with picture_server(tmp_path, core) as server:
        answer = await server.post(CHAT, asked(part))
        assert answer.status_code == 200 or "too much time" in answer.text
        await said(server, asked({"type": "file", "file": {"file_data": base64_of(pdf("a"))}}))
    assert len(core.items[-1]) == 1


async def test_limits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_image_size": "1KiB", "max_image_parts": 2}
    async with picture_server(tmp_path, PictureCore(context=24), **options) as server:
        large = await refused(server, asked(image_url(bytes(2000))))
        assert "limit: 1024 bytes, --max-image-size" in large["message"]
        many = await refused(server, asked(*[image_url(RED)] * 10_000))
        assert many["message"] == "A chat may have at most 2 pictures (--max-image-parts), not 10000."
        short = await refused(server, asked(image_url(RED), truncate_prompt_tokens=5))
        assert short["param"] == "truncate_prompt_tokens"
        full = await refused(server, asked(image_url(RED), "a" * 10))
        assert "maximum context length is 24 tokens" in full["message"]
    async with picture_server(tmp_path / "b", PictureCore(context=4)) as server:
        full = await refused(server, asked(image_url(RED)))
        assert "the pictures and videos have 4 tokens" in full["message"]
        assert full["param"] == "messages[0].content[0]"


async def test_a_template_that_leaves_pictures_out(tmp_path: Path) -> None:
    template = PARTS.replace("<image>", "")
    async with picture_server(tmp_path, PictureCore(), template=template) as server:
        error = await refused(server, asked(image_url(RED)))
    assert "has rendered 0 pictures" in error["message"]


async def test_pictures_from_an_allowed_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ipaddress

    real, core = httpx.AsyncClient, PictureCore()

    def client(**settings: Any) -> httpx.AsyncClient:
        if "trust_env" not in settings:  # the test's own
            return real(**settings)
        answer = httpx.Response(200, stream=httpx.ByteStream(RED))
        return real(transport=httpx.MockTransport(lambda _: answer), **settings)

    monkeypatch.setattr("quire.multimodal.fetch.httpx.AsyncClient", client)
    monkeypatch.setattr("quire.multimodal.fetch._look_up", lambda _: [ipaddress.ip_address("93.184.216.34")])
    async with picture_server(tmp_path, core, allowed_media_domains=["media.example"]) as server:
        part = {"type": "image_url", "image_url": {"url": "https://media.example/red.png"}}
        await said(server, asked(part))
        elsewhere = {"type": "image_url", "image_url": {"url": "https://other.example/red.png"}}
        assert "allowed domains" in (await refused(server, asked(elsewhere)))["message"]
    assert len(core.items[0]) == 1
