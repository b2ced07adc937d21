"""Calls between delimiters: a header with the function's name, then the arguments as JSON (DeepSeek, Kimi)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from quire.parsing.grammar_writer import GrammarWriter
from quire.parsing.tools.calls import Schemas, Steps, ToolParser
from quire.parsing.tools.references import standalone_schema


def name_is_header(header: str) -> tuple[str, str | None]:
    """Read a header that is the name."""
    return header.strip(), None


def kimi_name(header: str) -> tuple[str, str | None]:
    """Read a header of the form functions.NAME:INDEX, which is the id of the call as well."""
    header = header.strip()
    name, colon, _ = header.removeprefix("functions.").partition(":")
    if not colon and name != header:  # not an id; such headers are cut off or made up
        return "", None
    return name, header or None


def name_after(separator: str) -> Callable[[str], tuple[str, str | None]]:
    """Read a header in which the name follows a separator."""
    return lambda header: (header.rpartition(separator)[2].strip(), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DelimitedSyntax:
    """The delimiters around calls.

    Attributes:
        section: marks around all calls; empty if there are none.
        begin: text before the header of a call.
        header_end: text between header and arguments; if empty, the arguments begin at their brace.
        end: text after the arguments; empty if there is none.
        name: gives the function's name and the id of the call, if it has one, from a header.
        header: texts before and after the name in a header.
        fence: text between arguments and end.
    """

    section: tuple[str, str] = ("", "")
    begin: str
    header_end: str = ""
    end: str = ""
    name: Callable[[str], tuple[str, str | None]] = name_is_header
    header: tuple[str, str] = ("", "")
    fence: str = ""

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer."""
        scan = out.scanner
        outside = tuple(mark for mark in (*self.section, self.begin) if mark)
        scan.stop_json_at((*outside, self.end, self.fence))
        mark = yield from scan.read_until(outside, out.add_text)
        while mark is not None:
            if mark == self.begin:
                mark = yield from self._call(out)
            if mark != self.begin:
                if mark and mark in self.section:
                    out.begin_text()
                mark = yield from scan.read_until(outside, out.add_text)

    def _call(self, out: ToolParser) -> Generator[None, None, str | None]:
        """Parse a call; returns the mark that ended it, which may be the begin of the next call."""
        scan = out.scanner
        marks = tuple(mark for mark in (self.end, self.begin, *self.section) if mark)
        scan.mark()
        pieces: list[str] = []
        mark: str | None = ""
        if self.header_end:
            mark = yield from scan.read_until((self.header_end, *marks), pieces.append)
            begun = mark == self.header_end
        else:
            pieces.append((yield from scan.read_word("{" + self.begin[0])))
            begun = scan.next_character == "{"
        name, call_id = self.name("".join(pieces))
        if not begun or not name:
            read = scan.since_mark
            out.add_text(self.begin + (read.removesuffix(mark) if mark == self.begin else read))
            return mark
        out.begin_call(name, call_id)
        yield from scan.skip_whitespace()
        complete = yield from scan.read_json(out.add_arguments)
        if complete and not self.end:
            return ""
        return (yield from scan.read_until(marks, lambda _: None))

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, parallel: bool) -> str:
        """A grammar expression for calls of these functions."""
        before, after = self.header
        calls = [
            writer.sequence(
                writer.text(self.begin + before),
                writer.plain(name),
                writer.text(after + self.header_end),
                writer.json(standalone_schema(name, schema), spaces=2),
                writer.text(self.fence + self.end),
            )
            for name, schema in schemas.items()
        ]
        first, last = map(writer.text, self.section)
        return writer.sequence(first, writer.either(calls) + ("+" if parallel else ""), last)
