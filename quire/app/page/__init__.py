"""The built-in page at /: a chat, live captions from a microphone, and transcripts of files."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath

import xxhash
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.app.middleware import PAGE_FILES
from quire.protocol.errors import NotFound

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing of other hosts, no script but the files beside the page, and no HTML made of text. Pictures that users
    # attach are shown from memory (blob:).
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "media-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "permissions-policy": "camera=(self), microphone=(self), clipboard-write=(self), geolocation=(), usb=()",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class _PageFile:
    """A file of the page, its media type and its ETag."""

    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """The file, or only its ETag if the browser has it already."""
        headers = {**_HEADERS, "etag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def router() -> APIRouter:
    """The page and its files. They are read once."""
    page_files = _read()
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def page(request: Request) -> Response:
        return page_files["index.html"].response(request)

    @routes.get(PAGE_FILES + "{name}")
    async def page_file(name: str, request: Request) -> Response:
        if name not in page_files:
            raise NotFound("The page has no such file.")
        return page_files[name].response(request)

    return routes


def _read() -> dict[str, _PageFile]:
    page_files = {}
    for path in files(__package__).iterdir():
        if media_type := _TYPES.get(PurePath(path.name).suffix):
            content = path.read_bytes()
            page_files[path.name] = _PageFile(content, media_type, f'"{xxhash.xxh3_64_hexdigest(content)}"')
    return page_files
