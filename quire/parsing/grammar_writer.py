"""Writes grammars for llguidance: Lark rules, and the JSON schemas and grammars that they refer to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from llguidance import regex_to_lark

from quire.engine.client.grammar import CLIENT_GRAMMAR
from quire.parsing.grammar_depth import json_levels

_INDENT = 4  # spaces for each level of pretty printed JSON
_MAX_LENGTH = 1 << 20  # characters
_MANY = 1000  # texts
_ANYTHING = r"ANYTHING: /(.|\n)*/"
_KINDS: Mapping[type, str] = {type(None): "null", list: "an array", str: "a string"}
# Strings, regular expressions and references to other grammars, in rules that are written here.
_REFERENCE = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)*/|@(g\d+)')


class GrammarTooLong(ValueError):
    """A grammar has more characters than are allowed."""

    def __init__(self) -> None:
        super().__init__(f"The constraint of the answer has more than {_MAX_LENGTH} characters.")


class GrammarWriter:
    """Build a grammar. Methods return Lark expressions, to be joined by spaces (sequence) or `|` (alternatives).

    All of them raise `GrammarTooLong` before they do work for a longer grammar than is allowed.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        """`special`: ids of special tokens by their texts."""
        self._special = special
        self._marks = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._rules: list[str] = []
        self._has_anything = False
        self._grammars: list[dict[str, Any]] = []
        self._room = _MAX_LENGTH

    def reserve(self, characters: int) -> None:
        """Count characters of the grammar, before work is done for them."""
        self._room -= characters
        if self._room < 0:
            raise GrammarTooLong

    def text(self, text: str) -> str:
        """Match a text, and special tokens in it as tokens; an empty expression if it is empty."""
        self.reserve(len(text))
        pieces = []
        at = 0
        for mark in self._marks.finditer(text):
            pieces += [_quoted(text[at : mark.start()]), f"<[{self._special[mark[0]]}]>"]
            at = mark.end()
        return " ".join(piece for piece in [*pieces, _quoted(text[at:])] if piece)

    def has_special(self, text: str) -> bool:
        """Return whether a text contains a special token."""
        return self._marks.search(text) is not None

    def plain(self, text: str) -> str:
        """Match a text, also where it spells a special token; an empty expression if it is empty."""
        self.reserve(len(text))
        return _quoted(text)

    def json(self, schema: Any, *, spaces: int | None = None) -> str:
        """JSON of a schema, which may set its own whitespace between tokens.

        Args:
            schema: the schema.
            spaces: maximum of consecutive whitespace; None: what pretty printing needs.

        Raises:
            ValueError: the schema is neither an object nor a boolean.
        """
        if not isinstance(schema, dict | bool):
            raise ValueError(f"A JSON schema must be an object or a boolean, not {_kind(schema)}.")
        self.reserve(_length(schema, self._room))
        schema = {} if schema is True else schema
        if isinstance(schema, dict) and "x-guidance" not in schema:
            whitespace = _pretty_whitespace(schema) if spaces is None else rf"[ \t\r\n]{{1,{spaces}}}"
            schema = {**schema, "x-guidance": {"whitespace_pattern": whitespace}}
        return self._other({"json_schema": schema})

    def grammar(self, text: str) -> str:
        """Text of a Lark or GBNF grammar. It is read where it is compiled."""
        self.reserve(len(text))
        return self._other({CLIENT_GRAMMAR: text})

    def regex(self, pattern: str) -> str:
        """Text that fully matches a regular expression; `\\d`, `\\w` and `\\s` match ASCII only."""
        self.reserve(len(pattern))
        return self._terminal(f"/{regex_to_lark(pattern, 'dws')}/")

    def choice(self, texts: Iterable[str]) -> str:
        """One of several texts."""
        distinct = list(dict.fromkeys(map(self.plain, texts)))
        if len(distinct) < _MANY:
            return self.either(text or '""' for text in distinct)
        # One terminal: an alternative of a rule costs a parser item for each token, and the parser limits these.
        terminal = self._terminal(" | ".join(text for text in distinct if text))
        return self.either([terminal, '""'] if "" in distinct else [terminal])

    def anything(self) -> str:
        """Any text without special tokens."""
        if not self._has_anything:
            self._rules.append(_ANYTHING)
            self._has_anything = True
        return _ANYTHING.partition(":")[0]

    def until(self, end: str) -> str:
        """Any text up to and including the first `end`."""
        if end.startswith(tuple(self._special)):
            return self.rule(f"{self.anything()} {self.text(end)}")
        return self.rule(f"{self.anything()} {self.plain(end)}", "[lazy]")

    def matching(self, pattern: str, end: str) -> str:
        """Text that fully matches a regular expression, followed by the first possible `end`."""
        return self.rule(f"{self.regex(pattern)} {self.text(end)}", "" if self._marks.search(end) else "[lazy]")

    def spaces(self) -> str:
        """Optional whitespace of up to four characters."""
        blank = self._terminal(r"/[ \t\r\n]{1,4}/")
        return self.rule(f"{blank}?")

    def rule(self, expression: str, options: str = "") -> str:
        """A named rule for an expression, so that it can be used in any place."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def sequence(self, *pieces: str) -> str:
        """A sequence of expressions; empty ones are left out."""
        present = [piece for piece in pieces if piece]
        return present[0] if len(present) == 1 else self.rule(" ".join(present) or '""')

    def either(self, expressions: Iterable[str]) -> str:
        """One of several expressions.

        Raises:
            ValueError: there are none.
        """
        alternatives = " | ".join(expressions)
        if not alternatives:
            raise ValueError("The constraint of the answer has an empty list of alternatives.")
        return self.rule(alternatives)

    def finish(self, start: str) -> str:
        """The complete grammar. `start`: the expression of the whole text."""
        lark = "\n".join([f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._grammars]}, ensure_ascii=False)

    def _terminal(self, expression: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def _other(self, grammar: dict[str, Any]) -> str:
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, **grammar})
        return f"@{name}"


def _pretty_whitespace(schema: dict[str, Any]) -> str:
    """A space, or a line break with the deepest indentation of the schema's JSON.

    Where more is allowed, weak models and high temperatures fill answers with whitespace until they are cut off.
    """
    levels = json_levels(schema)
    return rf" |\n( {{0,{_INDENT * levels}}}|\t{{0,{levels}}})"


def as_lark(grammar: str) -> str:
    """A finished grammar as a single Lark grammar."""
    first, *imported = json.loads(grammar)["grammars"]
    rules = [_REFERENCE.sub(lambda match: match[1] or match[0], first["lark_grammar"])]
    for other in imported:
        schema = other.get("json_schema")
        inner = f"%lark {{\n{other['lark_grammar']}\n}}" if schema is None else f"%json {json.dumps(schema)}"
        rules.append(f"{other['name']}: {inner}")
    return "\n".join(rules)


def _length(value: Any, limit: int) -> int:
    """Number of characters of a JSON value, or a smaller number above the limit."""
    length = 0
    left = [value]
    while left and length <= limit:
        node = left.pop()
        length += 2
        if isinstance(node, str):
            length += len(node)
        elif isinstance(node, dict):
            length += sum(map(len, node)) + 4 * len(node)
            left.extend(node.values())
        elif isinstance(node, list):
            left.extend(node)
        else:
            length += len(repr(node))
    return length


def _kind(value: Any) -> str:
    """Name of a JSON value's type."""
    return _KINDS.get(type(value), "a number")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
