"""Files in messages: their text reaches models of text, in all APIs, and what cannot be read is refused in time."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from quire.engine.client.protocol import AddRequest
from tests.support.fake_core import FakeCore, says
from tests.support.pdf import document, drawn, image_bomb, pdf, stream, stream_bomb
from tests.support.server import Server, running_server
from tests.support.tokenizer import byte_tokenizer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def file_part(content: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{encoded(content)}", **fields}}


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def input_file(content: bytes) -> dict[str, Any]:
    return {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{encoded(content)}"}


def document_block(content: bytes, **fields: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "application/pdf", "data": encoded(content)}
    return {"type": "document", "source": source, **fields}


async def prompt_of(folder: Path, path: str, body: dict[str, Any], **settings: Any) -> str:
    """The prompt that a request becomes."""
    core = FakeCore(answer=says("ok"))
    async with running_server(folder, core, **settings) as server:
        answer = await server.post(path, body)
        assert answer.status_code == 200, answer.text
    (added,) = (message for message in core.received if isinstance(message, AddRequest))
    return byte_tokenizer().decode(added.prompt.tolist(), skip_special_tokens=False)


async def refused(server: Server, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    answer = await server.post(path, body)
    assert answer.status_code == 400, answer.text
    assert len(answer.text) < 1000
    error: dict[str, Any] = answer.json()["error"]
    return error


TWO_PAGES = pdf("The first page.", "And the second.")


async def test_the_text_of_a_pdf_file(tmp_path: Path) -> None:
    body = chat(file_part(TWO_PAGES, filename="report.pdf"), {"type": "text", "text": "What is it?"})
    prompt = await prompt_of(tmp_path, CHAT, body)
    assert "report.pdf\n\nThe first page.\n\nAnd the second.\n\nWhat is it?<|im_end|>" in prompt


async def test_a_text_file(tmp_path: Path) -> None:
    for data in (encoded("Größe: 5\n".encode()), "data:text/plain;base64," + encoded("Größe: 5\n".encode())):
        part = {"type": "file", "file": {"file_data": data, "filename": "notes.txt"}}
        assert "notes.txt\n\nGröße: 5" in await prompt_of(tmp_path, CHAT, chat(part))


async def test_a_small_text_file_needs_little_memory(tmp_path: Path) -> None:
    part = {"type": "file", "file": {"file_data": encoded(b"Five."), "filename": "notes.txt"}}
    assert "notes.txt\n\nFive." in await prompt_of(tmp_path, CHAT, chat(part), max_media_memory="1MiB")


async def test_files_in_other_apis(tmp_path: Path) -> None:
    """In messages, in results of tools, and in system messages."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [input_file(TWO_PAGES)]}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document_block(TWO_PAGES, title="T", context="C")]}
    cases: list[tuple[str, dict[str, Any], str]] = [
        (RESPONSES, {"input": [{"role": "user", "content": [input_file(TWO_PAGES)]}]}, "user\na.pdf\n"),
        (RESPONSES, {"input": [{"role": "user", "content": "?"}, call, output]}, "tool\na.pdf\n"),
        (
            RESPONSES,
            {"instructions": "Be brief.", "input": [{"role": "developer", "content": [input_file(TWO_PAGES)]}]},
            "system\nBe brief.\n\n\na.pdf\n",
        ),
        (MESSAGES, {"messages": [{"role": "user", "content": [document_block(TWO_PAGES)]}]}, "user"),
        (
            MESSAGES,
            {
                "messages": [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": [use]},
                    {"role": "user", "content": [result]},
                ]
            },
            "tool\nT\nC\n",
        ),
    ]
    for path, body, before in cases:
        prompt = await prompt_of(tmp_path, path, {"max_tokens": 4, **body} if path == MESSAGES else body)
        assert f"{before}\nThe first page.\n\nAnd the second.\n" in prompt, path


async def test_tokens_of_a_file_are_counted(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        empty = await server.post("/tokenize", chat("x"))
        counted = await server.post("/tokenize", chat(file_part(TWO_PAGES)))
        assert counted.json()["count"] > empty.json()["count"] + len("The first page.And the second.")
        body = {"messages": [{"role": "user", "content": [document_block(TWO_PAGES)]}]}
        tokens = await server.post("/v1/messages/count_tokens", body)
        assert tokens.json()["input_tokens"] > empty.json()["count"]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "broken": (b"%PDF-1.4\nnothing", "is broken"),
    "no pages": (document([]), "PDF file"),
    "cut off": (TWO_PAGES[:200], "PDF file"),
    "no text": (drawn(b"10 10 50 50 re f"), "has no text"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(50), "does not read pictures"),
    "something else": (bytes(range(256)), "must be a PDF file"),
    "no utf-8": ("Größe".encode("latin-1"), "must be a PDF file"),
    "many pages": (document([stream(b"")] * 40), "40 pages; at most 32 are allowed (--max-document-pages)"),
    "a million pages": (TWO_PAGES.replace(b"/Count 2", b"/Count 1000000"), "pages"),
    "a picture of gigabytes": (image_bomb(), "has no text"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    content, reason = HOSTILE[name]
    async with running_server(tmp_path) as server:
        error = await refused(server, chat("a", file_part(content)))
        assert reason in error["message"]
        assert error["param"] == "messages[0].content[1]"
        memory = server.state.media_memory
        assert memory.held == 0


async def test_a_bomb_ends_its_process_only(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        error = await refused(server, chat(file_part(stream_bomb())))
        assert "PDF file" in error["message"]
        answer = await server.post(CHAT, chat(file_part(TWO_PAGES)))
        assert answer.status_code == 200


FIELDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "id": ({"type": "file", "file": {"file_id": "f"}}, ".file.file_id", "no file 'f'"),
    "nothing": ({"type": "file", "file": {}}, ".file", "one of `file_data`, `file_url` and `file_id`"),
    "both": ({"type": "file", "file": {"file_data": "AA==", "file_url": "http://x"}}, ".file", "one of"),
    "text": ({"type": "file", "file": "AA=="}, "", "must be an object"),
    "number": ({"type": "file", "file": {"file_data": 5}}, ".file", "one of"),
    "name": ({"type": "file", "file": {"file_data": "AA==", "filename": 5}}, ".file.filename", "a string"),
    "not base64": ({"type": "file", "file": {"file_data": "!" * 500}}, ".file.file_data", "not valid base64"),
    "url": ({"type": "input_file", "file_url": "http://x/a.pdf"}, ".file_url", "fetches no URLs"),
    "scheme": ({"type": "input_file", "file_url": "x" * 5000}, ".file_url", "must be a data, http, https or file URL"),
    "source": ({"type": "document", "source": {"type": "base64"}}, ".source.data", "needs a string in `data`"),
    "no source": ({"type": "document"}, ".source", "`base64`, `url` or `file`"),
    "title": ({"type": "document", "title": 5, "source": {"type": "url", "url": "http://x"}}, ".title", "a string"),
    "video": ({"type": "video_url", "video_url": {"url": "http://x"}}, "", "'video_url' are not supported"),
    "bare video": ({"video_url": {"url": "http://x"}}, "", "'video_url' are not supported"),
    "embeddings": ({"type": "image_embeds", "image_embeds": "AA=="}, "", "'image_embeds' are not supported"),
    "a stand-in": ({"type": "audio"}, "", "'audio' are not supported"),
    "another stand-in": ({"type": "image"}, "", "'image' are not supported"),
    "picture": ({"image_url": "data:image/png;base64,AAAA"}, "", "the model `fake` accepts text only."),
    "picture of Anthropic": ({"type": "image", "source": {}}, "", "the model `fake` accepts text only."),
    "picture of Responses": ({"type": "input_image", "image_url": "x"}, "", "the model `fake` accepts text only."),
}


@pytest.mark.parametrize("name", FIELDS)
async def test_fields_of_parts_are_checked(tmp_path: Path, name: str) -> None:
    part, path, reason = FIELDS[name]
    async with running_server(tmp_path) as server:
        error = await refused(server, chat("a", part))
        assert reason in error["message"]
        assert error["param"] == f"messages[0].content[1]{path}"


async def test_errors_name_the_part_in_the_callers_api(tmp_path: Path) -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * 4000}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 4000}}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}, image]}
    content = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}, image]}}
    items = [
        {"role": "user", "content": "?"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}, picture]},
    ]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": [use]}]
    cases: list[tuple[str, dict[str, Any], str]] = [
        (RESPONSES, {"input": [{"role": "user", "content": [picture]}]}, "input[0].content[0]"),
        (RESPONSES, {"input": items}, "input[2].output[1]"),
        (RESPONSES, {"instructions": "a", "input": [{"role": "system", "content": [picture]}]}, "input[0].content[0]"),
        (MESSAGES, {"messages": [*turns, {"role": "user", "content": [result]}]}, "messages[2].content[0].content[1]"),
        (MESSAGES, {"messages": [{"role": "user", "content": [image]}]}, "messages[0].content[0]"),
        (MESSAGES, {"messages": [{"role": "user", "content": [content]}]}, "messages[0].content[0].source.content[1]"),
        (
            MESSAGES,
            {"messages": [*turns, {"role": "user", "content": [{**result, "content": "a"}, image]}]},
            "messages[2].content[1]",
        ),
    ]
    async with running_server(tmp_path) as server:
        for path, body, where in cases:
            error = await refused(server, {"max_tokens": 4, **body} if path == MESSAGES else body, path)
            assert where == error["param"] if path == RESPONSES else error["message"].startswith(f"{where}: ")
            assert "accepts text only" in error["message"]


async def test_the_size_of_a_file_is_limited(tmp_path: Path) -> None:
    async with running_server(tmp_path, max_document_size="1KiB", max_document_pages=1) as server:
        assert "--max-document-size" in (await refused(server, chat(file_part(bytes(2000)))))["message"]
        assert "--max-document-pages" in (await refused(server, chat(file_part(TWO_PAGES))))["message"]
        many = await refused(server, chat(*[file_part(b"a")] * 17))
        assert many["message"] == "A chat may have at most 16 documents, not 17."


async def test_ten_thousand_parts(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        error = await refused(server, chat(*[{"type": "file", "file": {"file_data": "AA=="}}] * 10_000))
        assert "at most 16 documents" in error["message"]


async def test_files_from_an_allowed_directory(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(TWO_PAGES)
    part = {"type": "input_file", "file_url": f"file://{tmp_path}/a.pdf"}
    prompt = await prompt_of(tmp_path / "m", CHAT, chat(part), allowed_local_media_path=tmp_path)
    assert "The first page." in prompt
