"""Who may use which route: every route with keys of all kinds, and odd spellings of keys and paths."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import RouteContext, iter_route_contexts
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from quire.api.http.keys import KeyRing
from quire.app import factory
from quire.app.doors import ROUTES, Level, doors, level_of
from quire.app.middleware import Middleware, apply_middleware
from quire.config.commands import Serve
from quire.realtime.secrets import ClientSecrets
from tests.support.keys import bearer, write_keys
from tests.support.raw import connected
from tests.support.realtime import speech_server
from tests.support.server import running_server

Header = tuple[bytes, bytes]
_PASSED, _ACCEPTED = 204, 101  # what gets through to the routes

KEYS: dict[str, list[Header]] = {
    "none": [],
    "bad": [(b"authorization", b"Bearer nobody")],
    "api": [(b"authorization", b"Bearer client")],
    "admin": [(b"authorization", b"Bearer root")],
}
# For each kind of server, what the keys get at routes of the levels API and ADMIN.
SERVERS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, int]]] = {
    "API keys and admin keys": (
        {"api_key": ("client",), "admin_api_key": ("root",)},
        {"none": 401, "bad": 401, "api": _PASSED, "admin": _PASSED},
        {"none": 401, "bad": 401, "api": 403, "admin": _PASSED},
    ),
    "API keys": (
        {"api_key": ("client",)},
        {"none": 401, "bad": 401, "api": _PASSED, "admin": 401},
        {"none": 401, "bad": 401, "api": _PASSED, "admin": 401},
    ),
    "admin keys": (
        {"admin_api_key": ("root",), "host": "10.1.2.3"},
        {"none": _PASSED, "bad": _PASSED, "api": _PASSED, "admin": _PASSED},
        {"none": 401, "bad": 401, "api": 401, "admin": _PASSED},
    ),
    "no keys": (
        {},
        {"none": _PASSED, "bad": _PASSED, "api": _PASSED, "admin": _PASSED},
        {"none": _PASSED, "bad": _PASSED, "api": _PASSED, "admin": _PASSED},
    ),
    "no keys, for other machines": (
        {"host": "10.1.2.3"},
        {"none": _PASSED, "bad": _PASSED, "api": _PASSED, "admin": _PASSED},
        {"none": 403, "bad": 403, "api": 403, "admin": 403},
    ),
}


class Doors:
    """Middleware of a server, behind which everything is accepted."""

    def __init__(self, layers: Sequence[Middleware]) -> None:
        self._app = apply_middleware(_accept, layers)

    async def ask(self, method: str, path: str, headers: Sequence[Header], query: bytes = b"") -> tuple[int, bytes]:
        """The status that a request gets, and the body."""
        scope: Scope = {
            "type": "websocket" if method == "WEBSOCKET" else "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "root_path": "",
            "query_string": query,
            "headers": [(b"host", b"localhost"), *headers],
            "client": ("127.0.0.1", 1),
        }
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request"}

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        return int(sent[0].get("status", _ACCEPTED)), bytes(sent[-1].get("body", b""))

    async def status(self, method: str, path: str, headers: Sequence[Header], query: bytes = b"") -> int:
        """The status that a request gets."""
        return (await self.ask(method, path, headers, query))[0]


async def _accept(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
    else:
        await send({"type": "http.response.start", "status": _PASSED, "headers": []})


def doors_of(**settings: Any) -> Doors:
    options = Serve(**settings)
    return Doors([doors(KeyRing(options), ClientSecrets(), options)])


@asynccontextmanager
async def whole_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[tuple[Doors, list[RouteContext]]]:
    """All middleware of a server, and all its routes."""
    made: list[tuple[Doors, list[RouteContext]]] = []

    def apply(app: Any, layers: Sequence[Middleware]) -> ASGIApp:
        made.append((Doors(layers), list(iter_route_contexts(app.routes))))
        return _accept

    monkeypatch.setattr(factory, "apply_middleware", apply)
    async with running_server(folder, **settings):
        yield made[0]


def listed_level(method: str, path: str) -> Level:
    """The level of a route in the table."""
    levels = [level for level, routes in ROUTES.items() if {path, f"{method} {path}"} & routes]
    assert len(levels) == 1, f"{method} {path} has no level, or several: see ROUTES in quire/app/doors.py"
    return levels[0]


async def test_every_route_has_the_door_of_its_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(iter(SERVERS))
    async with whole_server(tmp_path, monkeypatch, enable_tokenizer_info_endpoint=True, **SERVERS[first][0]) as made:
        whole, contexts = made
        routes = [(method, str(route.path)) for route in contexts for method in sorted(route.methods or {"WEBSOCKET"})]
        assert len(routes) > 60, "some routes were not found"
        wrong = []
        for name, (settings, of_clients, of_admins) in SERVERS.items():
            server = whole if name == first else doors_of(**settings)
            for method, template in routes:
                level, path = listed_level(method, template), re.sub(r"\{.*?\}", "x", template)
                for kind, headers in KEYS.items():
                    status = await server.status(method, path, headers)
                    expected = {Level.API: of_clients, Level.ADMIN: of_admins}.get(level, of_clients)[kind]
                    if level is Level.OPEN:
                        fits = status not in (401, 403)
                    else:
                        fits = status == (_ACCEPTED if method == "WEBSOCKET" and expected == _PASSED else expected)
                    if not fits:
                        wrong.append((name, method, path, kind, status))
            for path in sorted(ROUTES[Level.ADMIN]):  # those that come later, too
                for kind, headers in KEYS.items():
                    assert await server.status("POST", path, headers) == of_admins[kind], (name, path, kind)
        assert not wrong
        for route in contexts:
            if route.path in ROUTES[Level.ADMIN]:
                assert_no_other_spelling(route)


def assert_no_other_spelling(route: RouteContext) -> None:
    """The router finds the route by no path that has another level."""
    path = str(route.path)
    spellings = [path, path.upper(), path * 2, f"{path}\n\n", f"\n{path}\n", f"{path}\r\n"]
    for character in map(chr, range(0x2100)):
        spellings += [path + character, character + path, path.replace(path[1], character)]
    found = [spelling for spelling in spellings if route.path_regex.match(spelling)]
    assert path in found
    for spelling in found:
        scope = {"type": "http", "method": "POST", "path": spelling, "root_path": ""}
        assert level_of(scope) is Level.ADMIN, repr(spelling)


ACCEPTED = {
    "as documented": [(b"authorization", b"Bearer client")],
    "small letters": [(b"authorization", b"bearer client")],
    "capitals and spaces": [(b"authorization", b"BEARER   client  ")],
    "Anthropic's header": [(b"x-api-key", b"client")],
    "twice the same": [(b"authorization", b"Bearer client")] * 2,
    "beside a key of something else": [(b"authorization", b"Basic Y2xpZW50"), (b"x-api-key", b"client")],
}
REFUSED = {
    "no scheme": [(b"authorization", b"client")],
    "another scheme": [(b"authorization", b"Basic client")],
    "another scheme, encoded": [(b"authorization", b"Basic Y2xpZW50Og==")],
    "nothing": [(b"authorization", b"")],
    "no key": [(b"authorization", b"Bearer")],
    "spaces": [(b"authorization", b"Bearer    ")],
    "two keys": [(b"authorization", b"Bearer client root")],
    "a list of keys": [(b"authorization", b"Bearer client,root")],
    "in quotes": [(b"authorization", b'Bearer "client"')],
    "capitals": [(b"authorization", b"Bearer CLIENT")],
    "a part": [(b"authorization", b"Bearer clien")],
    "more": [(b"authorization", b"Bearer clientt")],
    "a tab": [(b"authorization", b"Bearer\tclient")],
    "not ASCII": [(b"authorization", "Bearer cli\u00e9nt".encode())],
    "no UTF-8": [(b"authorization", b"Bearer client\xff\xfe")],
    "long": [(b"authorization", b"Bearer " + b"client" * 5000)],
    "its hash": [(b"authorization", b"Bearer 948fe603f61dc036b5c596dc09fe3ce3f3d30dc90f024c85f3c82db2ccab679d")],
    "two different headers": [(b"authorization", b"Bearer nobody"), (b"authorization", b"Bearer client")],
    "two different headers, the first of them right": [
        (b"authorization", b"Bearer client"),
        (b"authorization", b"Bearer nobody"),
    ],
    "two different keys of Anthropic": [(b"x-api-key", b"client"), (b"x-api-key", b"nobody")],
    "a cookie": [(b"cookie", b"authorization=Bearer client; api_key=client")],
    "another header": [(b"api-key", b"client"), (b"proxy-authorization", b"Bearer client")],
}


async def test_a_key_has_few_spellings() -> None:
    server = doors_of(api_key=("client",), admin_api_key=("root",))
    for spelling, headers in ACCEPTED.items():
        assert await server.status("GET", "/v1/models", headers) == _PASSED, spelling
        assert await server.status("WEBSOCKET", "/v1/realtime", headers) == _ACCEPTED, spelling
        assert await server.status("POST", "/sleep", headers) == 403, spelling
        as_root = [(name, value.replace(b"client", b"root")) for name, value in headers]
        assert await server.status("POST", "/sleep", as_root) == _PASSED, spelling
    for spelling, headers in REFUSED.items():
        assert await server.status("GET", "/v1/models", headers) == 401, spelling
        assert await server.status("WEBSOCKET", "/v1/realtime", headers) == 401, spelling
        assert await server.status("POST", "/sleep", headers) == 401, spelling
    for query in (b"api_key=client", b"key=client", b"authorization=Bearer+client", b"access_token=client"):
        assert await server.status("GET", "/v1/models", [], query) == 401, query
    protocol = [(b"sec-websocket-protocol", b"realtime, openai-insecure-api-key.client")]
    assert await server.status("WEBSOCKET", "/v1/realtime", protocol) == _ACCEPTED


TARGETS = (
    *("//sleep", "/sleep/", "/./sleep", "/x/../sleep", "/page/../sleep", "/page/..%2fsleep", "/%73leep", "/sleep%2f"),
    *("/%2fsleep", "/sleep%20", "/sleep%00", "/sleep%0a", "/SLEEP", "/Sleep", "/sleep;x", "/sleep?", "/sleep?key=root"),
    *("/sleep#x", "http://localhost/sleep", "http://localhost//sleep", "/proxy/sleep", "/proxy//sleep"),
    *(
        "/proxy%2fsleep",
        "/proxy/proxy/sleep",
        "/health/../sleep",
        "/health%2f..%2fsleep",
        "/health;/../sleep",
        "/%E2%80%8Bsleep",
    ),
)


async def test_no_spelling_of_a_path_opens_another_door(tmp_path: Path) -> None:
    """On a server that would fall asleep, behind a proxy."""
    keys: dict[str, Any] = {"api_key": ("client",), "admin_api_key": ("root",)}
    async with running_server(tmp_path, enable_sleep_mode=True, root_path="/proxy", **keys) as server:
        for target in TARGETS:
            for key, accepted in (("nobody", {400, 401}), ("client", {307, 400, 403, 404, 405})):
                for method in ("POST", "GET"):
                    async with connected(server) as client:
                        head = f"{method} {target} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}"
                        await client.send(f"{head}\r\n\r\n")
                        answer = await client.answer()
                        assert answer.status in accepted, (method, target, key)
                        if answer.status == 400:
                            assert "Invalid HTTP request" in answer.message, (method, target, key)
        root = {"authorization": "Bearer root"}
        assert (await server.http.get("/is_sleeping", headers=root)).json() == {"is_sleeping": False}
        assert (await server.post("/proxy/sleep", headers=root)).status_code == 200
        assert (await server.http.get("/is_sleeping", headers=root)).json() == {"is_sleeping": True}
        assert (await server.post("/wake_up", headers=root)).status_code == 200


async def test_refusals_say_what_is_needed() -> None:
    keyed, remote = doors_of(api_key=("client",), admin_api_key=("root",)), doors_of(host="10.1.2.3")
    for server, path, key, status, words, kind in (
        (keyed, "/v1/completions", "none", 401, b"A valid API key", b"AuthenticationError"),
        (keyed, "/sleep", "none", 401, b"A valid admin key", b"AuthenticationError"),
        (keyed, "/sleep", "api", 403, b"one of --admin-api-key", b"PermissionDeniedError"),
        (keyed, "/v1/messages", "none", 401, b"A valid API key", b"authentication_error"),
        (remote, "/sleep", "none", 403, b"Set --admin-api-key or --api-key.", b"PermissionDeniedError"),
    ):
        answered, body = await server.ask("POST", path, KEYS[key])
        assert answered == status
        assert words in body
        assert kind in body


async def test_web_pages_do_not_administer_a_server_without_keys(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"enable_sleep_mode": True, "allowed_origins": ("http://friend.example",)}
    async with running_server(tmp_path, **settings) as server:
        for origin, status in (
            ("http://evil.example", 403),
            ("null", 403),
            ("http://[", 403),
            ("http://friend.example", 200),
            (server.url, 200),
        ):
            assert (await server.post("/wake_up", headers={"origin": origin})).status_code == status, origin


async def test_without_admin_keys_a_file_opens_no_admin_door(tmp_path: Path) -> None:
    """Also after its last admin key was removed."""
    path = write_keys(tmp_path / "keys.toml", alice={}, ops={"admin": True})
    async with running_server(tmp_path, api_key_file=path, enable_sleep_mode=True) as server:
        assert (await server.post("/wake_up", headers=bearer("ops"))).status_code == 200
        assert (await server.post("/wake_up", headers=bearer("alice"))).status_code == 403
        write_keys(path, alice={})
        server.keys.read()
        assert (await server.post("/wake_up", headers=bearer("ops"))).status_code == 401
        assert (await server.post("/wake_up", headers=bearer("alice"))).status_code == 403


async def test_a_client_secret_opens_sessions_only(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"api_key": ("client",), "admin_api_key": ("root",)}
    async with speech_server(tmp_path, enable_sleep_mode=True, **keys) as server:
        for owner in ("client", "root"):
            made = await server.post("/v1/realtime/client_secrets", {}, headers={"authorization": f"Bearer {owner}"})
            secret = {"authorization": f"Bearer {made.json()['value']}"}
            for path in ("/v1/realtime/client_secrets", "/v1/completions", "/sleep"):
                assert (await server.post(path, {}, headers=secret)).status_code == 401, path
            url = server.url.replace("http", "ws") + "/v1/realtime?model=fake"
            async with connect(url, additional_headers=secret) as session:
                assert "session.created" in str(await session.recv())
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, additional_headers={"authorization": "Bearer ek_nothing"})
            assert refused.value.response.status_code == 401
