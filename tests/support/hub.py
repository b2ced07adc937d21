"""A server that speaks the API of the Hugging Face Hub, with repositories in memory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

REVISIONS = {"main": "0" * 39 + "a", "v1": "0" * 39 + "b"}


@dataclass
class Hub:
    """A running hub.

    Attributes:
        url: for HF_ENDPOINT.
        repositories: files by path, by the id of their repository.
        tokens: the token that a repository needs, by its id.
        sent: paths of the files whose contents were sent, each with the first byte that was asked for.
        cut_after: bytes after which the next file's connection breaks; None: it does not.
    """

    url: str
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    sent: list[tuple[str, int]] = field(default_factory=list)
    cut_after: int | None = None

    def add(self, repository: str, files: Mapping[str, bytes | str] | Path) -> None:
        """Add a repository: files, or those in a directory."""
        if isinstance(files, Path):
            paths = [path for path in files.rglob("*") if path.is_file()]
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in paths}
        contents = {name: text.encode() if isinstance(text, str) else text for name, text in files.items()}
        self.repositories[repository] = {".gitattributes": b"", **contents}

    @property
    def names_sent(self) -> set[str]:
        """Names of the files whose contents were sent, but for what every repository has."""
        return {name for name, _ in self.sent} - {".gitattributes"}


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use_hub(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process use a hub, as if HF_ENDPOINT, HF_HUB_OFFLINE and HF_HUB_CACHE had been set before it started."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _hub(self) -> Hub:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        return hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        repository, rest = "/".join(parts[:2]), parts[2:]
        files = self._hub.repositories.get(repository)
        token = self._hub.tokens.get(repository)
        if files is None or (token is not None and self.headers.get("Authorization") != f"Bearer {token}"):
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound" if files is None else "GatedRepo"})
            return
        revision = rest[1] if len(rest) > 1 else "main"
        commit = REVISIONS.get(revision, revision)
        if commit not in REVISIONS.values():
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif is_api:
            self._send(200, json.dumps(_info(files, commit) if rest[:1] != ["tree"] else _tree(files)).encode())
        else:
            self._send_file(files, "/".join(rest[2:]), commit)

    def _send_file(self, files: Mapping[str, bytes], name: str, commit: str) -> None:
        if name not in files:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        content = files[name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_digest(content)}"', "Accept-Ranges": "bytes"}
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self._send(206 if begin else 200, content[begin:], headers, name=name, begin=begin)

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, name: str = "", begin: int = 0
    ) -> None:
        self.send_response(status)
        for header, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if name:
            self._hub.sent.append((name, begin))
        if name and self._hub.cut_after is not None and len(body) > self._hub.cut_after:
            body, self.close_connection = body[: self._hub.cut_after], True
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _info(files: Mapping[str, bytes], commit: str) -> dict[str, Any]:
    return {"id": "x/y", "sha": commit, "siblings": [{"rfilename": name} for name in files]}


def _tree(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": name, "size": len(content), "oid": _digest(content)} for name, content in files.items()
    ]


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
