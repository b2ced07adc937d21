"""How deeply a grammar nests and refers; compiling it takes a native stack frame or more for each level."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

N = TypeVar("N", bound=Hashable)

_LARK = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?![/*])(?:[^/\\\n]|\\.)+/|//[^\n]*|#[^\n]*|(?<![\w@])[A-Za-z_][\w]*')
_GBNF = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|#[^\n]*|[A-Za-z_][\w-]*')
_LARK_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\[[^\]\n]*\])?(?:\.-?\d+)?[ \t]*:", re.MULTILINE)
_GBNF_RULE = re.compile(r"^[ \t]*([A-Za-z_][\w-]*)[ \t]*::=", re.MULTILINE)
_NESTING = frozenset({"properties", "patternProperties", "items", "prefixItems"})  # keywords of values in a value
_FREE_LEVELS = 4  # of an object or array whose values have no schema
_MAX_LEVELS = 8


def rules_depth(text: str) -> int:
    """Length of the longest chain of references between the rules of a Lark or GBNF grammar."""
    head, token = (_GBNF_RULE, _GBNF) if "::=" in text else (_LARK_RULE, _LARK)
    heads = list(head.finditer(text))
    ends = [*(match.start() for match in heads), len(text)][1:]
    bodies = {match[1]: (match.end(), end) for match, end in zip(heads, ends, strict=True)}

    def referenced(name: str) -> Iterator[str]:
        start, end = bodies[name]
        names = {match[0] for match in token.finditer(text, start, end)}
        return (other for other in names if other in bodies)

    return _longest_path(bodies, referenced)


def schema_depth(schema: Any) -> int:
    """Length of the longest chain of nested values and local references in a JSON schema."""
    return _longest_schema_path(schema, lambda _: 1)


def json_levels(schema: Any) -> int:
    """Return how many levels of indentation JSON of a schema needs, at most 8."""
    return min(_longest_schema_path(schema, _levels_of), _MAX_LEVELS)


def _levels_of(part: Any) -> int:
    """Levels that a part of a schema adds to what is inside of it; too many if a property has the name of a keyword."""
    if not isinstance(part, dict):
        return 0
    if not _NESTING.isdisjoint(part):
        return 1
    return _FREE_LEVELS if part.get("type") in ("object", "array") or not part else 0


def _longest_schema_path(schema: Any, weight: Callable[[Any], int]) -> int:
    values: dict[int, Any] = {}

    def known(value: Any) -> int:
        values[id(value)] = value
        return id(value)

    def inside(number: int) -> Iterator[int]:
        value = values[number]
        if isinstance(value, Mapping):
            target = _target(schema, value.get("$ref"))
            parts = [*value.values(), *([] if target is None else [target])]
        else:
            parts = value
        return (known(part) for part in parts if isinstance(part, dict | list))

    if not isinstance(schema, dict | list):
        return 0
    return _longest_path([known(schema)], inside, lambda number: weight(values[number]))


def _target(schema: Any, reference: Any) -> Any:
    """Return what a reference such as `#/$defs/a` points to; None if that is not in this schema."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node = schema
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        node = node.get(part) if isinstance(node, dict) else None
        if node is None:
            return None
    return node


def _longest_path(
    starts: Iterable[N], successors: Callable[[N], Iterable[N]], weight: Callable[[N], int] = lambda _: 1
) -> int:
    """Weight of the heaviest path, without going around a cycle. It takes linear time and no recursion."""
    lengths: dict[N, int] = {}  # 0 while a node is on the path
    for start in starts:
        path: list[tuple[N, Iterator[N]]] = []
        longest: list[int] = []  # of what follows each node of the path
        if start not in lengths:
            lengths[start] = 0
            path.append((start, iter(successors(start))))
            longest.append(0)
        while path:
            node, unvisited = path[-1]
            following = next(unvisited, None)
            if following is None:
                path.pop()
                lengths[node] = longest.pop() + weight(node)
                if longest:
                    longest[-1] = max(longest[-1], lengths[node])
            elif following in lengths:
                longest[-1] = max(longest[-1], lengths[following])
            else:
                lengths[following] = 0
                path.append((following, iter(successors(following))))
                longest.append(0)
    return max(lengths.values(), default=0)
