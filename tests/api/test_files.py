"""Files that clients upload and name in messages, as of OpenAI."""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import os
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.multimodal.file_store import FileStore
from quire.workers.errors import QueueFull, ShareExceeded
from tests.support.picture_chat import CHAT, IMAGE, MESSAGES, RESPONSES, PictureCore, asked, painted, picture_server
from tests.support.server import Server

FILES = "/v1/files"
RED = painted("red")
KEYS = {"a": {"authorization": "Bearer a"}, "b": {"authorization": "Bearer b"}}


async def uploaded(server: Server, content: bytes, name: str = "a.txt", **fields: Any) -> dict[str, Any]:
    answer = await server.http.post(FILES, files={"file": (name, content)}, data={"purpose": "user_data", **fields})
    assert answer.status_code == 200, answer.text
    file: dict[str, Any] = answer.json()
    return file


async def test_a_file_in_all_apis(tmp_path: Path) -> None:
    core = PictureCore()
    async with picture_server(tmp_path, core) as server:
        text, red = await uploaded(server, b"Five.", "notes.txt"), await uploaded(server, RED, "red.png")
        assert (text["object"], text["bytes"], text["filename"], text["status"]) == (
            "file",
            5,
            "notes.txt",
            "processed",
        )
        assert text["expires_at"] == text["created_at"] + 24 * 3600
        note, picture = {"file_id": text["id"]}, {"file_id": red["id"]}
        bodies: list[tuple[str, dict[str, Any]]] = [
            (CHAT, asked({"type": "file", "file": note}, {"type": "image_url", **picture})),
            (
                RESPONSES,
                {"input": [{"role": "user", "content": [
                    {"type": "input_file", **note}, {"type": "input_image", **picture},
                ]}]},
            ),
            (
                MESSAGES,
                {"max_tokens": 4, "messages": [{"role": "user", "content": [
                    {"type": "document", "source": {"type": "file", **note}},
                    {"type": "image", "source": {"type": "file", **picture}},
                ]}]},
            ),
        ]  # fmt: skip
        for path, body in bodies:
            answer = await server.post(path, body)
            assert answer.status_code == 200, answer.text
            assert "x-quire-ignored-fields" not in answer.headers
            assert f"notes.txt\nFive.\n<pic>{IMAGE * 4}</pic>" in core.prompts[-1].replace("\n\n", "\n")
    assert len({item.hash for items in core.items for item in items}) == 1


async def test_files_are_listed_read_and_deleted(tmp_path: Path) -> None:
    async with (
        picture_server(tmp_path) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        first = await client.files.create(file=("a.txt", b"one"), purpose="user_data")
        second = await client.files.create(
            file=("b.txt", b"two"), purpose="assistants", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert second.expires_at == second.created_at + 3600
        assert [file.id async for file in client.files.list()] == [second.id, first.id]
        assert [file.id async for file in client.files.list(purpose="user_data")] == [first.id]
        page = await client.files.list(limit=1, order="asc")
        assert [file.id for file in page.data] == [first.id]
        assert [file.id async for file in page] == [first.id, second.id]
        assert (await client.files.retrieve(first.id)).filename == "a.txt"
        assert (await client.files.content(first.id)).content == b"one"
        assert (await client.files.delete(first.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(first.id)


def encoded_form(name: bytes) -> bytes:
    """A form with a file of this name, as a client's multipart encoder writes it."""
    return (
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="' + name + b'"\r\n\r\nFive.\r\n--x--\r\n'
    )


def refuse(*_: Any) -> None:
    """Write to a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_charsets_of_forms(tmp_path: Path) -> None:
    """Some of Python's codecs are slow, others raise errors of their own or make halves of characters."""
    async with picture_server(tmp_path, PictureCore()) as server:
        for charset in ("", "; charset=UTF-8", '; charset="iso-8859-1"', "; charset=us-ascii"):
            kind = {"content-type": f"multipart/form-data; boundary=x{charset}"}
            for name in (b"a\\ud800.txt", b"\xffa\x01.txt", b"\xc3\xa9"):
                answer = await server.http.post(FILES, content=encoded_form(name), headers=kind)
                assert answer.status_code == 200, answer.text
        for charset in ("unicode_escape", "punycode", "idna", "undefined", "x-unknown"):
            kind = {"content-type": f"multipart/form-data; boundary=x; charset={charset}"}
            for path in (FILES, "/v1/audio/transcriptions"):
                answer = await server.http.post(path, content=encoded_form(b"xn--zzzzzzzzzzzz"), headers=kind)
                assert (answer.status_code, f"'{charset}'" in answer.text) == (400, True), answer.text
        names = {file["filename"] for file in (await server.http.get(FILES)).json()["data"]}
        assert names == {"a\\ud800.txt", "ÿa\x01.txt", "é", "Ã©"}


@pytest.mark.parametrize(
    "place", ["quire.multimodal.file_store.shutil.copyfileobj", "tempfile.SpooledTemporaryFile.write"]
)
async def test_a_full_disk(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error of the server, and what could not be written takes no room."""
    async with picture_server(tmp_path, PictureCore(), file_store_size=10) as server:
        with monkeypatch.context() as patch:
            patch.setattr(place, refuse)
            answer = await server.http.post(FILES, files={"file": ("a", b"0123456")}, data={"purpose": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        error = {"message": "The file cannot be stored: No space left on device.", "param": "file"}
        assert answer.json()["error"].items() >= error.items()
        assert (await server.http.get(FILES)).json()["data"] == []
        await uploaded(server, b"0123456")


async def test_a_full_disk_in_a_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with picture_server(tmp_path, PictureCore()) as server:
        part = {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(RED).decode()}"}}
        with monkeypatch.context() as patch:
            patch.setattr("tempfile.SpooledTemporaryFile.write", refuse)
            answer = await server.post(CHAT, asked(part))
        assert (answer.status_code, answer.json()["error"]["param"]) == (503, "messages[0].content[0]")
        assert (await server.post(CHAT, asked(part))).status_code == 200


async def test_a_file_belongs_to_the_key_that_sent_it(tmp_path: Path) -> None:
    async with picture_server(tmp_path, api_key=["a", "b"]) as server:
        form: Any = {"files": {"file": ("a.txt", b"secret")}, "data": {"purpose": "user_data"}}
        sent = (await server.http.post(FILES, headers=KEYS["a"], **form)).json()["id"]
        body = asked({"type": "file", "file": {"file_id": sent}})
        assert (await server.http.post(CHAT, json=body, headers=KEYS["a"])).status_code == 200
        refused = await server.http.post(CHAT, json=body, headers=KEYS["b"])
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages[0].content[0].file.file_id"
        assert (await server.http.get(f"{FILES}/{sent}/content", headers=KEYS["b"])).status_code == 404
        assert (await server.http.get(FILES, headers=KEYS["b"])).json()["data"] == []


async def test_what_is_refused(tmp_path: Path) -> None:
    async with picture_server(tmp_path, max_document_size="1KiB") as server:
        forms: list[dict[str, Any]] = [
            {"files": {"file": ("a", b"")}, "data": {"purpose": "x"}},
            {"files": {"file": ("a", b"b")}},
            {"files": {"file": ("a", b"b")}, "data": {"purpose": "x", "expires_after[anchor]": "now"}},
            {"data": {"purpose": "x"}, "files": {"other": ("a", b"b")}},
            {"json": {"purpose": "x"}},
        ]
        for form in forms:
            answer = await server.http.post(FILES, **form)
            assert answer.status_code == 400, answer.text
        large = await uploaded(server, b"x" * 2000)
        text = base64.b64encode(b"x").decode()
        for part, where in (
            ({"file_id": large["id"]}, "file.file_id"),
            ({"file_id": "file-none"}, "file.file_id"),
            ({"file_id": 5}, "file"),
            ({"file_id": large["id"], "file_data": text}, "file"),
        ):
            answer = await server.post(CHAT, asked({"type": "file", "file": part}))
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == f"messages[0].content[0].{where}"
        for path in (f"{FILES}/x", f"{FILES}/x/content"):
            assert (await server.http.get(path)).status_code == 404
        assert (await server.http.get(FILES, params={"after": "x"})).status_code == 400
    async with picture_server(tmp_path / "small", file_store_size=10) as server:
        answer = await server.http.post(FILES, files={"file": ("a", b"01234567890")}, data={"purpose": "x"})
        assert (answer.status_code, "at most 10 are accepted" in answer.text) == (400, True)
    async with picture_server(tmp_path / "none", file_store_size=0) as server:
        answer = await server.http.post(FILES, files={"file": ("a", b"b")}, data={"purpose": "x"})
        assert (answer.status_code, "--file-store-size" in answer.text) == (400, True)


async def test_the_store_is_bounded_and_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(100, 60.0, share=0.75)
    content = tmp_path / "content"
    content.write_bytes(bytes(50))

    async def add(tenant: str, size: int = 50) -> Any:
        with content.open("rb") as file:
            fields: Any = {"name": "a", "purpose": "p", "owner": "", "tenant": tenant, "seconds": None}
            return await store.add(file, size, **fields)

    stored = await add("a")
    with pytest.raises(ShareExceeded, match="--max-client-share of --file-store-size"):
        await add("a")
    with pytest.raises(QueueFull, match="--file-store-size"):
        await add("b", 51)
    await store.delete(stored)
    assert not stored.path.exists()
    stored = await add("a")
    monkeypatch.setattr("quire.multimodal.file_store.time.time", lambda: float(stored.expires_at))
    assert store.find(stored.id, "") is None
    await add("a")  # in the room that it has left
    assert not stored.path.exists()
    store.close()


async def test_places_of_files_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.multimodal.file_store._MAX_FILES", 4)
    store = FileStore(1000, 60.0, share=0.75)
    content = tmp_path / "content"
    content.write_bytes(b"a")

    async def add(tenant: str) -> Any:
        with content.open("rb") as file:
            return await store.add(file, 1, name="a", purpose="p", owner="", tenant=tenant, seconds=None)

    stored = [await add("a") for _ in range(3)]
    with pytest.raises(ShareExceeded, match="3 of the 3 files"):
        await add("a")
    await add("b")
    with pytest.raises(QueueFull, match="4 of at most 4 files"):
        await add("b")
    await store.delete(stored[0])
    await store.delete(stored[1])
    await add("b")
    store.close()


class Blocking(io.BytesIO):
    """A content whose first piece is read once it is told so."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def read(self, size: int | None = -1, /) -> bytes:
        self.begun.set()
        self.goes_on.wait(60)
        return super().read(size)


async def test_an_upload_whose_client_has_gone_leaves_nothing() -> None:
    """The thread that copies it cannot be stopped."""
    store = FileStore(8, 60.0)
    fields: Any = {"name": "a", "purpose": "p", "owner": "", "tenant": "a", "seconds": None}
    content = Blocking(b"01234567")
    adding = asyncio.create_task(store.add(content, 8, **fields))
    await asyncio.to_thread(content.begun.wait, 30)
    adding.cancel()
    await asyncio.wait([adding])
    assert adding.cancelled()
    following = asyncio.create_task(store.add(io.BytesIO(b"7654321"), 7, **fields))
    content.goes_on.set()
    stored = await following
    assert [path.name for path in stored.path.parent.iterdir()] == [stored.id]
    assert store.files("") == [stored]
    store.close()
    assert not stored.path.parent.exists()
