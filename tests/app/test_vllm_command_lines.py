"""Servers started with documented command lines of vLLM, whose model is a tiny one, answer."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.process import serving, tiny_model
from tests.support.vllm_command_lines import DOCUMENTED

WITHOUT_EFFECT = {"--enable-auto-tool-choice", "--swap-space", "--trust-remote-code"}
LINES = [(line, expected) for line, expected in DOCUMENTED if isinstance(expected, dict)]  # the others are refused
# Starts of servers that differ most; tests/config reads all lines.
QUICK = ("--uds", "--speculative_config", "--model ")
CASES = [
    pytest.param(*case, id=case[0], marks=() if any(flag in case[0] for flag in QUICK) else pytest.mark.slow)
    for case in LINES
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=1 << 17)


def arguments(line: str, folder: Path, template: Path, socket: Path) -> list[str]:
    """The line, with files that exist and a free port."""
    template.write_text("{{ messages[0].content }}")
    words = shlex.split(line)
    if "--port" in words:
        del words[words.index("--port") : words.index("--port") + 2]
    replaced = {"/tmp/vllm.sock": str(socket)}  # noqa: S108 it is not opened
    out = []
    for word in words:
        is_model = "/" in word and not word.startswith(("/", "{")) and not word.endswith(".jinja")
        out.append(str(folder) if is_model else str(template) if word.endswith(".jinja") else replaced.get(word, word))
    return [*out, "--kv-cache-memory-bytes", "256MiB"]


def test_there_are_ten_of_them() -> None:
    assert len(LINES) >= 10


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_a_server_answers(line: str, expected: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    socket = tmp_path / "s"
    with serving(*arguments(line, folder, tmp_path / "t.jinja", socket)) as server:
        transport = httpx.HTTPTransport(uds=str(socket)) if "uds" in expected else None
        url = server.url if transport is None else "http://quire.test"
        headers = {"Authorization": f"Bearer {expected.get('api_key', ('none',))[0]}"}
        with httpx.Client(base_url=url, transport=transport, timeout=60, headers=headers) as client:
            card, *_ = client.get("/v1/models").json()["data"]
            assert card["max_model_len"] == expected.get("max_model_len", 1 << 17)
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
            answer = client.post("/v1/chat/completions", json=chat)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 3
        for flag in WITHOUT_EFFECT.intersection(line.split()):
            assert re.search(rf"{flag}( \S+)? has no effect", server.log), server.log
