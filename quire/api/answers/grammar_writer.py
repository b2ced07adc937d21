"""Writes grammars for llguidance: Lark rules, and grammars of their own that these refer to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

_MOST_SPACES = 64  # deep enough an indentation; without a limit models lose themselves in white space
_ANYTHING = r"ANYTHING: /(.|\n)*/"
# In the rules that are written here: texts and regular expressions, and what refers to another grammar.
_REFERENCE = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)*/|@(g\d+)')


class GrammarWriter:
    """Puts a grammar together. Its methods give expressions, to be joined by spaces (and then) or by `|` (or)."""

    def __init__(self, special: Mapping[str, int]) -> None:
        """`special`: ids of the tokens that are no text, by what they are called."""
        self._special = special
        self._marks = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []

    def text(self, text: str) -> str:
        """This text, nothing if it is empty; special tokens in it are meant as such."""
        pieces, at = [], 0
        for mark in self._marks.finditer(text):
            pieces += [_quoted(text[at : mark.start()]), f"<[{self._special[mark[0]]}]>"]
            at = mark.end()
        return " ".join(piece for piece in [*pieces, _quoted(text[at:])] if piece)

    def json(self, schema: Any, *, spaces: int = _MOST_SPACES) -> str:
        """JSON of a schema, with so many spaces in a row at most, if the schema does not say how many."""
        if isinstance(schema, dict) and "x-guidance" not in schema:
            schema = {**schema, "x-guidance": {"whitespace_pattern": rf"[ \t\r\n]{{1,{spaces}}}"}}
        return self._other({"json_schema": schema})

    def grammar(self, text: str) -> str:
        """Text of a Lark or GBNF grammar.

        Raises:
            ValueError: it is neither.
        """
        try:
            return self._other({"lark_grammar": any_to_lark(text)})
        except (GbnfToLarkError, RecursionError) as error:
            raise ValueError(str(error)) from error

    def regex(self, pattern: str) -> str:
        """Text that a regular expression matches as a whole; digits, words and spaces are those of ASCII."""
        return self._terminal(f"/{regex_to_lark(pattern, 'dws')}/")

    def choice(self, texts: Iterable[str]) -> str:
        """One of several texts."""
        return self.either(dict.fromkeys(self.text(text) or '""' for text in texts))

    def anything(self) -> str:
        """Any text without special tokens."""
        if _ANYTHING not in self._rules:
            self._rules.append(_ANYTHING)
        return _ANYTHING.partition(":")[0]

    def until(self, end: str) -> str:
        """Any text up to the first `end`, and that."""
        if end.startswith(tuple(self._special)):
            return self.rule(f"{self.anything()} {self.text(end)}")
        return self.rule(f"{self.anything()} {_quoted(end)}", "[lazy]")

    def matching(self, pattern: str, end: str) -> str:
        """Text that a regular expression matches as a whole, up to the first `end` that may follow it, and that."""
        return self.rule(f"{self.regex(pattern)} {self.text(end)}", "" if self._marks.search(end) else "[lazy]")

    def spaces(self) -> str:
        """White space, or none; not so much that a model could lose itself in it."""
        blank = self._terminal(r"/[ \t\r\n]{1,4}/")
        return self.rule(f"{blank}?")

    def rule(self, expression: str, options: str = "") -> str:
        """An expression under a name, so that it may stand anywhere."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def sequence(self, *pieces: str) -> str:
        """One after the other, without those that are nothing."""
        given = [piece for piece in pieces if piece]
        return given[0] if len(given) == 1 else self.rule(" ".join(given) or '""')

    def either(self, expressions: Iterable[str]) -> str:
        """One of several."""
        return self.rule(" | ".join(expressions))

    def finish(self, start: str) -> str:
        """The whole grammar, which begins with an expression."""
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


def as_lark(grammar: str) -> str:
    """A grammar that a writer has finished, as one Lark grammar."""
    first, *others = json.loads(grammar)["grammars"]
    rules = [_REFERENCE.sub(lambda found: found[1] or found[0], first["lark_grammar"])]
    for other in others:
        schema = other.get("json_schema")
        inner = f"%lark {{\n{other['lark_grammar']}\n}}" if schema is None else f"%json {json.dumps(schema)}"
        rules.append(f"{other['name']}: {inner}")
    return "\n".join(rules)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
