"""The built-in page at /: live captions from a microphone, and transcripts of files."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from quire.app.middleware import PAGE_FILES
from quire.protocol.errors import NotFound

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "captions.js": "text/javascript; charset=utf-8",
    "microphone.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing of other hosts, and no script but the files beside the page.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self' ws: wss:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def router() -> APIRouter:
    """The page and its files. They are read once."""
    folder = files(__package__)
    contents = {name: (folder / name).read_bytes() for name in _TYPES}
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def page() -> Response:
        return _response("index.html", contents)

    @routes.get(PAGE_FILES + "{name}")
    async def page_file(name: str) -> Response:
        if name not in contents:
            raise NotFound("The page has no such file.")
        return _response(name, contents)

    return routes


def _response(name: str, contents: dict[str, bytes]) -> Response:
    return Response(contents[name], headers=_HEADERS, media_type=_TYPES[name])
