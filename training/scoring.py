"""Scores the answers of each kind, of a local model or a server."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel, ValidationError

from training.heldout_models import MODELS

TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
THINK = re.compile(r"^.*?</think>\s*", re.DOTALL)
EQUATION = re.compile(r"^\s*(?:-?\d+\s*[-+]\s*-?\d+\s*=\s*)?(-?\d+)\s*\.?\s*$")


def answer_of(text: str) -> str:
    """Return the text after the scratch steps."""
    return THINK.sub("", text, count=1).strip() if "</think>" in text else text.strip()


def is_right(kind: str, expect: dict[str, Any], text: str) -> bool:
    """Score one answer. The key of ``expect`` determines the comparison."""
    answer = answer_of(text)
    if "result" in expect:
        return bool(_number(answer) == expect["result"])
    if "keys" in expect:
        return has_keys(answer, expect["keys"])
    if "json" in expect:
        return same_json(answer, expect["json"])
    if "model" in expect:
        right, values = right_values(expect, answer)
        return right == values
    if "call" in expect:
        return bool(_call(answer) == expect["call"])
    if "shown" in expect:
        return "<tool_call>" not in answer and all(has_value(answer, value) for value in expect["shown"])
    if expect.get("untold"):
        return "not told me" in answer
    if "value" in expect:
        return has_value(answer, expect["value"]) and "not told" not in answer
    if "values" in expect:
        return all(has_value(answer, value) for value in expect["values"])
    if "text" in expect:
        return bool(answer == expect["text"])
    raise ValueError(f"no scoring criterion for a {kind} answer: {sorted(expect)}")


def _number(answer: str) -> int | None:
    match = EQUATION.match(answer)
    return int(match[1]) if match else None


def has_keys(answer: str, keys: list[str]) -> bool:
    """Whether every key phrase is in the answer; "a|b" accepts either."""
    low = answer.lower()
    return all(any(option.lower() in low for option in key.split("|")) for key in keys)


def has_value(answer: str, value: str) -> bool:
    """Whether the value is in the answer as whole words, ignoring case."""
    return re.search(rf"(?<!\w){re.escape(value.lower())}(?!\w)", answer.lower()) is not None


def same_json(answer: str, expected: Any) -> bool:
    """Whether the answer is exactly this JSON, with the keys in the same order."""
    try:
        parsed_answer = json.loads(answer)
    except json.JSONDecodeError:
        return False
    return json.dumps(parsed_answer) == json.dumps(expected)


def parsed(expect: dict[str, Any], answer: str) -> BaseModel | None:
    """Return the answer as an object of the pydantic model; None if it is not one, or ended too early."""
    try:
        return MODELS[expect["model"]].model_validate_json(answer)
    except ValidationError:
        return None


def right_values(expect: dict[str, Any], answer: str) -> tuple[int, int]:
    """Return how many values of an answer with a schema are right, and how many there are."""
    answered = parsed(expect, answer)
    expected = dict(_values(expect["answer"]))
    actual = {} if answered is None else dict(_values(answered.model_dump(mode="json")))
    right = sum(path in actual and actual[path] == value for path, value in expected.items())
    return right, max(len(expected), len(actual))


def _values(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the values in nested objects and lists by their paths."""
    if isinstance(value, dict):
        return [leaf for key, part in value.items() for leaf in _values(part, f"{path}.{key}")]
    if isinstance(value, list):
        return [leaf for at, part in enumerate(value) for leaf in _values(part, f"{path}.{at}")]
    return [(path, value)]


def _call(answer: str) -> Any:
    """Return the tool call of an answer that contains only one tool call, otherwise None."""
    match = TOOL_CALL.fullmatch(answer)
    if not match:
        return None
    try:
        return json.loads(match[1])
    except json.JSONDecodeError:
        return None
