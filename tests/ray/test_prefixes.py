from __future__ import annotations

from typing import Any

import orjson
import pytest

from quire.ray.prefixes import MAX_PIECES, PIECE, packed, prefix_hashes, unpacked

TEXT = "All that is gold does not glitter. " * 40  # more than five pieces


def _hashes(**fields: Any) -> list[int]:
    return prefix_hashes(orjson.dumps({"model": "m", **fields}))


def _chat(*contents: str, **fields: Any) -> list[int]:
    messages = [
        {"role": "user" if index % 2 == 0 else "assistant", "content": text} for index, text in enumerate(contents)
    ]
    return _hashes(messages=messages, **fields)


def _common(first: list[int], second: list[int]) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def test_a_later_turn_begins_as_the_earlier_ones() -> None:
    first, second = _chat(TEXT), _chat(TEXT, TEXT[::-1], "Go on.")

    assert len(first) == len(TEXT) // PIECE
    assert _common(first, second) == len(first)
    assert len(second) > len(first)


def test_the_order_of_fields_and_what_does_not_change_the_prompt_do_not_matter() -> None:
    body = {"temperature": 0.5, "stream": True, "messages": [{"content": TEXT, "role": "user"}], "model": "m"}

    assert prefix_hashes(orjson.dumps(body)) == _chat(TEXT)


@pytest.mark.parametrize("fields", [{"model": "other"}, {"cache_salt": "x"}, {"tools": [{"type": "function"}]}])
def test_requests_that_share_no_blocks_share_no_hashes(fields: dict[str, Any]) -> None:
    assert _common(_chat(TEXT), _chat(TEXT, **fields)) == 0


def test_a_difference_changes_all_pieces_from_there_on() -> None:
    changed = TEXT[: 3 * PIECE] + "?" + TEXT[3 * PIECE + 1 :]

    assert _common(_hashes(prompt=TEXT), _hashes(prompt=changed)) == 3


@pytest.mark.parametrize("field", ["prompt", "input", "query"])
def test_prompts_of_all_apis_have_hashes(field: str) -> None:
    assert len(_hashes(**{field: TEXT})) == len(TEXT) // PIECE
    assert len(_hashes(**{field: list(range(1000))})) > 5


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"1", b'{"messages": 5}', b'{"prompt": ""}', b'{"x": NaN}', b"[" * 5000, b'{"messages": [1]}'],
)
def test_bodies_that_are_no_requests_have_none(body: bytes) -> None:
    assert prefix_hashes(body) == []


def test_their_number_is_bounded() -> None:
    assert len(_hashes(prompt="x" * (PIECE * MAX_PIECES * 2))) == MAX_PIECES


def test_hashes_survive_packing() -> None:
    hashes = _chat(TEXT)

    assert unpacked(packed(hashes)) == hashes
