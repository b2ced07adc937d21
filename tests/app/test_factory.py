"""The OpenAPI page."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.server import running_server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


async def test_the_openapi_page_describes_every_route(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        spec = json.loads((await server.http.get("/openapi.json")).text)
        assert {CHAT, COMPLETIONS, "/v1/models", "/tokenize", "/detokenize", "/health", "/ready"} <= set(spec["paths"])
        answers = spec["paths"][CHAT]["post"]["responses"]
        assert {"200", "400", "404", "503"} <= set(answers)
