"""Host names that the server accepts, against DNS rebinding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.server import running_server

OWN = ("localhost", "LOCALHOST:8000", "localhost.", "api.localhost", "host.docker.internal:1", "127.0.0.1",
       "127.0.0.1:9", "[::1]", "[::1]:9", "10.0.0.1:8000", "[fe80::1]:1", "")  # fmt: skip
FOREIGN = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "evil-localhost",
           "internal", "[evil]", ":80", "evil\u00e9.example")  # fmt: skip


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.5"])
async def test_a_server_for_this_machine_is_not_reached_under_foreign_names(tmp_path: Path, host: str) -> None:
    async with running_server(tmp_path, host=host) as server:
        for name in (*OWN, f"[{host}]" if ":" in host else host):
            assert (await server.http.get("/v1/models", headers=[("host", name)])).status_code == 200, name
        for name in FOREIGN:
            headers = [(b"host", name.encode())]
            answer = await server.http.get("/v1/models", headers=headers)
            assert answer.status_code == 421, name
            assert "--allowed-hosts" in answer.json()["error"]["message"]
            assert (await server.http.get("/health", headers=headers)).status_code == 200
            answer = await server.post("/v1/messages", {}, headers={"host": "evil.example"})
            assert (answer.status_code, answer.json()["type"]) == (421, "error")


@pytest.mark.parametrize(
    "settings",
    [{"host": "0.0.0.0"},  # noqa: S104
     {"host": ""}, {"host": "::"}, {"host": "192.168.1.5"}, {"allowed_hosts": ("*",)},
     {"host": "machine.example"}, {"api_key": ("k",)}],
)  # fmt: skip
async def test_other_servers_are_reached_under_every_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    async with running_server(tmp_path, **settings) as server:
        for name in (*OWN, *FOREIGN):
            headers = [(b"host", name.encode()), (b"authorization", b"Bearer k")]
            assert (await server.http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104
async def test_names_are_added(tmp_path: Path, host: str) -> None:
    settings: dict[str, Any] = {"host": host, "allowed_hosts": ("API.example", "*.b.example"), "api_key": ("k",)}
    async with running_server(tmp_path, **settings) as server:
        for name, status in (
            *dict.fromkeys((*OWN, "api.example", "api.Example:80", "a.b.example", "a.a.b.example"), 200).items(),
            *dict.fromkeys((*FOREIGN, "b.example", "a.api.example", "ab.example"), 421).items(),
        ):
            headers = [(b"host", name.encode()), (b"authorization", b"Bearer k")]
            assert (await server.http.get("/v1/models", headers=headers)).status_code == status, name
