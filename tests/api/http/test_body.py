"""Request bodies: only valid JSON is accepted, and large or hostile ones do not block other requests."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import running_server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["a", 1] * 500_000}),
        (COMPLETIONS, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(200_000)), "a")}),
        (CHAT, {"messages": [5] * 500_000}),
        ("/detokenize", {"tokens": ["a"] * 500_000}),
    ],
)
async def test_a_million_mistakes_are_answered_at_once(tmp_path: Path, path: str, body: Any) -> None:
    async with running_server(tmp_path) as server:
        content = json.dumps(body)
        began = time.monotonic()
        answer = await server.http.post(path, content=content, headers={"content-type": "application/json"})
        assert time.monotonic() - began < 5
        assert answer.status_code == 400
        assert len(answer.text) < 2000


HALF = r'"\ud800"'


@pytest.mark.parametrize("field", ["prompt", "stop", "cache_salt", "model", "nonsense"])
async def test_half_characters_are_refused(tmp_path: Path, field: str) -> None:
    async with running_server(tmp_path) as server:
        body = f'{{"prompt": "x", "{field}": {HALF}}}'
        answer = await server.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400


async def test_only_json_is_taken(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""):
            headers = {"content-type": kind} if kind else {}
            answer = await server.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == "Unsupported Media Type: Only 'application/json' is allowed"
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        answer = await server.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == 200
