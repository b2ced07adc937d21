"""OpenAI's harmony format of gpt-oss: messages on channels for reasoning, tool calls and the final answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.parsing.grammar_writer import GrammarWriter
from quire.parsing.tools.calls import Schemas, Steps, ToolParser
from quire.parsing.tools.references import standalone_schema

_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonySyntax:
    """The marks of a message: its start, its channel, its text, its end.

    Source: OpenAI's description of the harmony response format, 2025.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")

    def parse(self, out: ToolParser) -> Steps:
        """Parse an answer."""
        scan = out.scanner
        while True:
            before: list[str] = []
            if (yield from scan.read_until((self.channel,), before.append)) is None:
                if self.start not in "".join(before):  # an answer without channels is content
                    out.add_text("".join(before))
                return
            header: list[str] = []
            if (yield from scan.read_until((self.message,), header.append)) is None:
                return
            called = _RECIPIENT.search(f"{''.join(before)} {''.join(header)}")
            if called is not None:
                out.begin_call(called[1])
                sink = out.add_arguments
            else:
                out.in_reasoning = "".join(header).split()[:1] == ["analysis"]
                sink = out.add_reasoning if out.in_reasoning else out.add_text
                out.begin_text()
            yield from scan.read_until((*self.ends, self.start), sink)
            out.in_reasoning = False

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, parallel: bool) -> str:
        """A grammar expression for calls of these functions."""
        calls = [
            writer.sequence(
                writer.text(f"{self.channel}commentary to=functions."),
                writer.plain(name),
                writer.text(f" {self.constrain}json{self.message}"),
                writer.json(standalone_schema(name, schema), spaces=2),
            )
            for name, schema in schemas.items()
        ]
        call = writer.either(calls)
        separator = writer.text(f"{self.ends[1]}{self.start}assistant")
        return writer.rule(f"{call} ({separator} {call})*") if parallel else call
