"""Answers that consist of messages of several kinds: reasoning, text and tool calls (Inkling, Muse)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.parsing.grammar_writer import GrammarWriter
from quire.parsing.tools.calls import Schemas, Steps, ToolParser
from quire.parsing.tools.json_syntax import JsonSyntax
from quire.parsing.tools.tagged_syntax import TaggedSyntax

_RECIPIENT = re.compile(r"to=([^\s<]+)\s*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class InklingSyntax:
    """The marks of a message: its start, its kind, its ends. A name between start and kind is not content."""

    start: str = "<|message_model|>"
    thinking: str = "<|content_thinking|>"
    texts: tuple[str, ...] = ("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>")
    call: str = "<|content_invoke_tool_json|>"
    ends: tuple[str, ...] = ("<|end_message|>", "<|content_model_end_sampling|>")

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer."""
        scan = out.scanner
        calls = JsonSyntax(begins=(self.call,), end=self.ends[0], arguments="args")
        scan.stop_json_at((self.call, *self.ends, self.start))
        known = False  # the answer has messages
        while True:
            header: list[str] = []
            kind = yield from scan.read_until((self.thinking, *self.texts, self.call, *self.ends), header.append)
            if kind is None or kind in self.ends:
                if not known and self.start not in "".join(header):  # an answer without messages is content
                    out.add_text("".join(header))
                if kind is None:
                    return
            elif kind == self.call:
                scan.mark()
                yield from calls.calls(out, mark=kind, end=self.ends[0])
            else:
                out.in_reasoning = kind == self.thinking
                out.begin_text()
                yield from scan.read_until(
                    (*self.ends, self.start), out.add_reasoning if out.in_reasoning else out.add_text
                )
                out.in_reasoning = False
            known = True

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, parallel: bool) -> str:
        """A grammar expression for calls of these functions."""
        calls = JsonSyntax(begins=(self.call,), end=self.ends[0], separator=self.start, arguments="args")
        return calls.grammar(writer, schemas, parallel=parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class MuseSyntax:
    """The marks of a message: its start, the end of its header, which names the recipient, and its ends.

    Attributes:
        shown: recipients of texts that are content.
        hidden: recipients of texts that are dropped.
        calls: the syntax of calls in messages to tools.
    """

    start: str = "<|start|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|eom|>", "<|eot|>")
    shown: tuple[str, ...] = ("user", "commentary")
    hidden: tuple[str, ...] = ("developer",)
    calls: TaggedSyntax

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer."""
        scan, known, ends = out.scanner, False, (*self.ends, self.start)
        while True:
            header: list[str] = []
            if (yield from scan.read_until((self.message,), header.append)) is None:
                if not known and self.start not in "".join(header):  # an answer without messages is content
                    out.add_text("".join(header))
                return
            known = True
            recipient = _RECIPIENT.search("".join(header))
            name = "self" if recipient is None else recipient[1]
            out.begin_text()
            if name in self.hidden:
                yield from scan.read_until(ends, lambda _: None)
            elif name == "self":
                out.in_reasoning = True
                yield from scan.read_until(ends, out.add_reasoning)
                out.in_reasoning = False
            elif name in self.shown:
                yield from scan.read_until(ends, out.add_text)
            else:
                yield from self.calls.parse_until(out, ends)

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, parallel: bool) -> str:
        """A grammar expression for calls of these functions, each in a message of its own."""
        call = writer.either(
            writer.sequence(
                writer.text(" to="),
                writer.plain(name),
                writer.text(self.message),
                self.calls.grammar(writer, {name: schema}, parallel=False),
            )
            for name, schema in schemas.items()
        )
        between = writer.text(f"{self.ends[0]}{self.start}assistant")
        return writer.rule(f"{call} ({between} {call})*") if parallel else call
