"""Harmony, the way gpt-oss answers: messages on channels, one for reasoning, one that may call, one for the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.api.answers.grammar_writer import GrammarWriter
from quire.api.answers.tools.calls import Schemas, Steps, ToolParser

_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyForm:
    """The marks around a message: its beginning, its channel, its text, its end.

    Source: OpenAI's description of the harmony response format, 2025.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")

    def parse(self, out: ToolParser) -> Steps:
        """Read an answer."""
        scan = out.scanner
        while True:
            before: list[str] = []
            if (yield from scan.until((self.channel,), before.append)) is None:
                if self.start not in "".join(before):  # no channel at all: it is taken at its word
                    out.say("".join(before))
                return
            header: list[str] = []
            if (yield from scan.until((self.message,), header.append)) is None:
                return
            called = _RECIPIENT.search(f"{''.join(before)} {''.join(header)}")
            if called is not None:
                out.begin(called[1])
                sink = out.argue
            else:
                out.thinking = "".join(header).split()[:1] == ["analysis"]
                sink = out.think if out.thinking else out.say
            yield from scan.until((*self.ends, self.start), sink)
            out.thinking = False

    def grammar(self, writer: GrammarWriter, schemas: Schemas, *, several: bool) -> str:
        """An expression for one or more calls of these functions."""
        calls = [
            writer.sequence(
                writer.text(f"{self.channel}commentary to=functions.{name} {self.constrain}json{self.message}"),
                writer.json(schema, spaces=2),
            )
            for name, schema in schemas.items()
        ]
        one = writer.either(calls)
        again = writer.text(f"{self.ends[1]}{self.start}assistant")
        return writer.rule(f"{one} ({again} {one})*") if several else one
