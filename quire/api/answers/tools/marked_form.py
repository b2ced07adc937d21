"""Calls between marks: a header with the function's name, then its arguments as JSON (DeepSeek, Kimi, Mistral)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.api.answers.grammar_writer import GrammarWriter
from quire.api.answers.tools.calls import Schemas, Steps, ToolParser


def plain_name(header: str) -> tuple[str, str | None]:
    """The header is the name."""
    return header.strip(), None


def kimi_name(header: str) -> tuple[str, str | None]:
    """functions.NAME:INDEX, which is the call's id as well."""
    header = header.strip()
    return header.removeprefix("functions.").partition(":")[0], header or None


def last_part(separator: str) -> Callable[[str], tuple[str, str | None]]:
    """The name stands behind a separator."""
    return lambda header: (header.rpartition(separator)[2].strip(), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedForm:
    """The marks.

    Attributes:
        section: marks around all calls; empty ones are none.
        begin: before a call's header.
        header_end: between header and arguments; the arguments' own brace, if empty.
        end: behind the arguments, after anything else; empty: none.
        name: of a header.
        header: the text before a name that the model writes, and the one behind it.
        fence: what the model writes between arguments and end.
    """

    section: tuple[str, str] = ("", "")
    begin: str
    header_end: str = ""
    end: str = ""
    name: Callable[[str], tuple[str, str | None]] = plain_name
    header: tuple[str, str] = ("", "")
    fence: str = ""

    def parse(self, out: ToolParser) -> Steps:
        """Read an answer."""
        scan = out.scanner
        marks = tuple(mark for mark in (*self.section, self.begin) if mark)
        while (mark := (yield from scan.until(marks, out.say))) is not None:
            if mark != self.begin:
                continue
            scan.note()
            pieces: list[str] = []
            if self.header_end:
                found = (yield from scan.until((self.header_end,), pieces.append)) is not None
            else:
                pieces.append((yield from scan.word("{" + self.begin[0])))
                found = scan.held[:1] == "{"
            name, call_id = self.name("".join(pieces))
            if not found or not name:
                out.say(mark + scan.noted)
                continue
            out.begin(name, call_id)
            yield from scan.blanks()
            if not (yield from scan.json(out.argue)) or not self.end:
                continue
            yield from scan.until((self.end,), lambda _: None)

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, several: bool) -> str:
        """An expression for one or more calls of these functions."""
        before, behind = self.header
        calls = [
            writer.sequence(
                writer.text(self.begin + before + name + behind + self.header_end),
                writer.json(schema, spaces=2),
                writer.text(self.fence + self.end),
            )
            for name, schema in schemas.items()
        ]
        first, last = map(writer.text, self.section)
        return writer.sequence(first, writer.either(calls) + ("+" if several else ""), last)
