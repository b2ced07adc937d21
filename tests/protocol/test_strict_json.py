"""The number of JSON values in a body is bounded before the body is parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.protocol import strict_json
from quire.protocol.strict_json import count_values
from tests.support.server import running_server

PATH = "/v1/completions"
TEXTS = st.text('ab\\",:[{}]\n\u20ac', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def commas_and_containers(value: Any) -> tuple[int, int]:
    """Commas; and arrays, objects and keys."""
    if not isinstance(value, list | dict):
        return 0, 0
    members = list(value.values()) if isinstance(value, dict) else value
    inner = [commas_and_containers(member) for member in members]
    keys = len(value) if isinstance(value, dict) else 0
    return max(0, len(value) - 1) + sum(a for a, _ in inner), 1 + keys + sum(b for _, b in inner)


def strings(value: Any) -> int:
    """Strings, keys too."""
    if isinstance(value, dict):
        return len(value) + sum(map(strings, value.values()))
    return sum(map(strings, value)) if isinstance(value, list) else isinstance(value, str)


def objects(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    return 1 + sum(objects(member) for member in (value.values() if isinstance(value, dict) else value))


@given(value=VALUES, chunk=st.integers(1, 40), ascii_only=st.booleans())
@settings(deadline=None, max_examples=300)
def test_only_what_is_outside_of_strings_counts(value: Any, chunk: int, ascii_only: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "_CHUNK", chunk)
        values, containers, texts = count_values(json.dumps(value, ensure_ascii=ascii_only).encode(), 10_000)
    commas, expected = commas_and_containers(value)
    assert (values, containers, texts) == (1 + commas + objects(value), expected, strings(value))


@pytest.mark.parametrize("junk", ["0," * 3000 + "0", "[]," * 1000 + "[]", '{"a":0},' * 600 + "0", '"x",' * 600 + "0"])
async def test_bodies_with_too_many_values_are_refused(tmp_path: Path, junk: str) -> None:
    async with running_server(tmp_path, max_json_values=2048) as server:
        body = f'{{"prompt": "x", "junk": [{junk}]}}'.encode()
        answer = await server.http.post(PATH, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert "JSON" in answer.json()["error"]["message"]
        assert "--max-json-values" in answer.json()["error"]["message"]


def test_counting_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "_CHUNK", 100)
    assert count_values(b"[" + b"0," * 100_000 + b"0]", 2048)[0] <= 2048 + 50
    assert count_values(b"[" + b"[]," * 100_000 + b"0]", 2048)[1] <= 256 + 34
    assert count_values(b"[" + b'"x",' * 100_000 + b"0]", 2048)[2] <= 512 + 25


async def test_long_texts_have_few_values(tmp_path: Path) -> None:
    async with running_server(tmp_path, max_json_values=2048) as server:
        text = '[1, 2, {"a": "\\"}] ' * 5000
        answer = await server.post(PATH, {"prompt": "x", "max_tokens": 1, "junk": text})
        assert answer.status_code == 200
