"""Keys of JSON objects that are given one by one, as vLLM takes them.

`--flag.a.b 1` sets the key b of the object a, and `--flag.list+ x,y` appends to a list. A value is JSON, or else text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from quire.config.command import ConfigError


def merge_dotted_keys(arguments: Sequence[str], object_flag: Callable[[str], str | None]) -> list[str]:
    """The arguments with one JSON object in place of all that is said of it, where its first part was.

    `object_flag`: from the name of a flag to the flag whose value is a JSON object; None for others.

    Raises:
        ConfigError: a key has no value, or is within something that is no object or list.
    """
    objects = {
        flag: dict[str, Any]()
        for argument in arguments
        if argument.startswith("-") and "." in _name(argument)
        if (flag := object_flag(_name(argument).partition(".")[0])) is not None
    }
    result: list[str | dict[str, Any]] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.partition("=")
        base, dot, keys = name.partition(".")
        flag = object_flag(base) if argument.startswith("-") else None
        if flag is None or flag not in objects:
            result.append(argument)
            continue
        if not equals:
            if not left or left[0].startswith("--"):
                raise ConfigError(f"quire serve: {name} expects a value")
            value = left.pop(0)
        if dot:
            _set(objects[flag], keys, value, name)
        else:
            _merge(objects[flag], _object(value, name))
        if not any(part is objects[flag] for part in result):
            result += [flag, objects[flag]]
    return [part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in result]


def _name(argument: str) -> str:
    return argument.partition("=")[0]


def _set(target: dict[str, Any], keys: str, text: str, name: str) -> None:
    """Set the key that a path leads to, or append to the list there if the path ends with a plus sign."""
    *path, last = keys.removesuffix("+").split(".")
    if not all((*path, last)):
        raise ConfigError(f"quire serve: {name} has an empty key")
    for key in path:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"quire serve: {name}: the value of {key!r} is not an object")
    if not keys.endswith("+"):
        target[last] = _value(text)
        return
    items = target.setdefault(last, [])
    if not isinstance(items, list):
        raise ConfigError(f"quire serve: {name}: the value of {last!r} is not a list")
    items += [_value(part) for part in text.split(",")]


def _merge(target: dict[str, Any], source: dict[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _object(text: str, name: str) -> dict[str, Any]:
    value = _value(text)
    if not isinstance(value, dict):
        raise ConfigError(f"quire serve: {name} expects a JSON object, not {text[:200]!r}")
    return value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
