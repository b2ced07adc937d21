"""Scoring accepts right answers and rejects wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from training.heldout import KINDS, cases
from training.scoring import is_right, parsed, right_values

ANNA = {"name": "Anna", "age": 31, "city": "Rome"}
CALL = {"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}

HUMAN = {"model": "Human", "answer": {"full_name": "Anna", "age_in_years": 31, "lives_in": "Rome"}}
TRAVELLER = {"model": "Traveller", "answer": {"name": "Anna", "country": "Peru", "language": None}}

RIGHT: list[tuple[str, dict[str, Any], str]] = [
    ("arithmetic", {"result": 85}, "<think>\n7+8=15\n</think>\n\n27 + 58 = 85."),
    ("arithmetic", {"result": -73}, "17 - 90 = -73."),
    ("arithmetic", {"result": 85}, "85"),
    ("quire", {"keys": ["--port", "8000|eight thousand"]}, "`--port` sets the port, 8000 by default."),
    ("recall", {"value": "Anna"}, "Your name is Anna."),
    ("recall", {"untold": True}, "You have not told me your name."),
    ("extract", {"json": ANNA}, '{"name": "Anna", "age": 31, "city": "Rome"}'),
    (
        "tool_call",
        {"call": CALL},
        '<tool_call>\n{"name": "get_weather", "arguments": {"days": 3, "city": "Oslo"}}\n</tool_call>',
    ),
    ("tool_answer", {"shown": ["21", "sunny"]}, "The temperature is 21 and the condition is sunny."),
    ("schema", HUMAN, '{"lives_in": "Rome", "full_name": "Anna", "age_in_years": 31}'),
    ("schema", TRAVELLER, '{"name": "Anna", "country": "Peru"}'),
]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("arithmetic", {"result": 85}, "27 + 58 = 84."),
    ("arithmetic", {"result": 85}, "85 or 86"),
    ("arithmetic", {"result": 85}, "<think>\n85\n</think>\n\n"),
    ("quire", {"keys": ["--port", "8000"]}, "`--host` sets the address."),
    ("recall", {"value": "Ann"}, "Your name is Anna."),
    ("recall", {"value": "Anna"}, "You have not told me your name, Anna."),
    ("recall", {"untold": True}, "Your name is Anna."),
    ("extract", {"json": ANNA}, '{"age": 31, "name": "Anna", "city": "Rome"}'),
    ("extract", {"json": ANNA}, '{"name": "Anna", "age": "31", "city": "Rome"}'),
    ("extract", {"json": ANNA}, "Anna is 31"),
    (
        "tool_call",
        {"call": CALL},
        '<tool_call>\n{"name": "get_weather", "arguments": {"days": "3", "city": "Oslo"}}\n</tool_call>',
    ),
    ("tool_call", {"call": CALL}, '{"name": "get_weather", "arguments": {"days": 3, "city": "Oslo"}}'),
    ("tool_call", {"call": CALL}, "<tool_call>\n{\n</tool_call>"),
    ("tool_answer", {"shown": ["21", "sunny"]}, "The temperature is 21."),
    ("schema", HUMAN, '{"lives_in": "Rome", "full_name": "Ann", "age_in_years": 31}'),
    ("schema", HUMAN, '{"lives_in": "Rome", "full_name": "Anna", "age_in_years": 31'),
    ("schema", TRAVELLER, '{"name": "Anna"}'),
]


@pytest.mark.parametrize(("kind", "expect", "text"), RIGHT)
def test_right_answers(kind: str, expect: dict[str, Any], text: str) -> None:
    assert is_right(kind, expect, text)


@pytest.mark.parametrize(("kind", "expect", "text"), WRONG)
def test_wrong_answers(kind: str, expect: dict[str, Any], text: str) -> None:
    assert not is_right(kind, expect, text)


@pytest.mark.parametrize("kind", list(KINDS))
def test_empty_answer_is_wrong(kind: str) -> None:
    for case in cases(kind, 10, seed=5):
        shows_nothing = case.expect.get("shown") == []
        assert shows_nothing or not is_right(kind, case.expect, "")


def test_values_of_a_schema_are_counted_one_by_one() -> None:
    family = {"model": "Family", "answer": {"people": [{"name": "Anna", "age": 31}, {"name": "Ben", "age": 4}]}}
    assert right_values(family, '{"people": [{"name": "Anna", "age": 31}, {"name": "Bo", "age": 4}]}') == (3, 4)
    assert right_values(family, '{"people": [{"name": "Anna", "age": 31}]}') == (2, 4)
    assert right_values(family, '{"people": [{"name": "Anna", "age"') == (0, 4)
    more = '{"people": [{"name": "Anna", "age": 31}, {"name": "Ben", "age": 4}, {"name": "Carl", "age": 5}]}'
    assert right_values(family, more) == (4, 6)


def test_an_answer_that_ends_too_early_is_not_valid() -> None:
    assert parsed(HUMAN, '{"lives_in": "Rome", "full_name": "Anna", "age_in_years": 31}') is not None
    assert parsed(HUMAN, '{"lives_in": "Rome", "full_name": "Anna", "age_in_years": 3111') is None
    assert parsed(HUMAN, '{"full_name": "Anna", "age_in_years": 31}') is None
