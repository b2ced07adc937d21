"""Parses answers as they arrive into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.parsing.reasoning import ReasoningSplitter, ReasoningTags
from quire.parsing.structured.constraint import ReasoningPrefix
from quire.parsing.tools.calls import Parsed, Piece, TextDelta
from quire.parsing.tools.choice import ToolPlan
from quire.parsing.tools.custom_input import CustomCallReader
from quire.parsing.tools.registry import ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How the answers to a request are parsed.

    Attributes:
        tags: around the reasoning; None if the model does not reason.
        prompt: text of the rendered prompt.
        continued: text of the message that the answers continue.
        plan: tool calls to look for; None if the request has no tools.
        tools: format of the model's tool calls; None if it is not known.
    """

    tags: ReasoningTags | None
    prompt: str | None
    continued: str = ""
    plan: ToolPlan | None = None
    tools: ToolFormat | None = None

    @property
    def full_answer_format(self) -> ToolFormat | None:
        """The model's tool format, if it describes all answers and not only calls."""
        return self.tools if self.tools is not None and self.tools.full_answer else None

    def parser(self, report: Callable[[bool], None] | None = None, *, each_piece: bool = False) -> AnswerParser:
        """A parser of one answer. `report`, `each_piece`: see `AnswerParser`."""
        return AnswerParser(self, report, each_piece=each_piece)

    def splitter(self) -> ReasoningSplitter | None:
        """A splitter of reasoning and content of one answer; None if the tool parser does that or nothing does."""
        if self.tags is None or self.full_answer_format is not None:
            return None
        return ReasoningSplitter(self.tags, self.prompt, self.continued)

    def counter(self, text_of: Callable[[int], str]) -> ReasoningCounter:
        """A counter of the reasoning tokens of one answer. `text_of`: gives the text of a token."""
        return ReasoningCounter(self.parser(), text_of)

    @property
    def reasoning_prefix(self) -> ReasoningPrefix:
        """The reasoning that may precede a structured answer."""
        if self.full_answer_format is not None and self.tags is not None:
            return ReasoningPrefix.POSSIBLE
        splitter = self.splitter()
        if splitter is None or splitter.in_content:
            return ReasoningPrefix.NONE
        return ReasoningPrefix.OPEN if splitter.in_reasoning else ReasoningPrefix.POSSIBLE


class AnswerParser:
    """Parse one answer. The result does not depend on how the text is cut into pieces.

    Attributes:
        plain: all text is content; it need not be parsed.
        called: a tool call was found.
    """

    def __init__(
        self, answer_format: AnswerFormat, report: Callable[[bool], None] | None = None, *, each_piece: bool = False
    ) -> None:
        """Make a parser that has read nothing.

        Args:
            answer_format: how the answer is parsed.
            report: if the request has tools, called with whether the text has a tool call, or a part of one.
            each_piece: report each text that is pushed; else the whole answer at its end.
        """
        self._report = report if answer_format.plan is not None else None
        self._reports_each_piece = each_piece
        self._splitter = answer_format.splitter()
        plan = self._plan = answer_format.plan
        full = answer_format.full_answer_format
        tools = full if plan is None else plan.format
        self._tools = None if tools is None else tools.parser({} if plan is None else plan.schemas)
        self._custom = CustomCallReader(plan.custom) if plan is not None and plan.custom else None
        self._full_answer = full is not None
        self.plain = self._splitter is None and self._tools is None
        self.called = False

    def push(self, text: str, *, last: bool = False) -> Parsed:
        """Parse more text; returns the pieces that are certain now."""
        parsed = Parsed()
        content = text
        if self._splitter is not None:
            reasoning, content = self._splitter.push(text, last=last)
            parsed.add_text(reasoning, reasoning=True)
        if self._tools is None:
            parsed.add_text(content)
            return parsed
        calls = self._tools.push(content, last=last)
        if self._custom is not None:
            calls = self._custom.read(calls, last=last)
        for piece in calls.pieces:
            self._add(parsed, piece)
        if self._report is not None and (last or self._reports_each_piece):
            self._report(bool(parsed.calls) if self._reports_each_piece else self.called)
        return parsed

    def _add(self, parsed: Parsed, piece: Piece) -> None:
        if isinstance(piece, TextDelta):
            parsed.add_text(piece.text, reasoning=piece.reasoning, apart=piece.apart)
        elif self._plan is None:  # the request has no tools: the arguments are content
            parsed.add_text(piece.arguments)
        elif self._plan.parallel or piece.index == 0:
            self.called = True
            parsed.add_call(piece)

    @property
    def in_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, as far as that is known."""
        if self._splitter is not None:
            return self._splitter.in_reasoning
        return self._tools is not None and self._tools.in_reasoning

    @property
    def past_reasoning(self) -> bool:
        """Whether no more reasoning can come."""
        return self._splitter.in_content if self._splitter is not None else not self._full_answer

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish reason of the answer. `reason`: finish reason of its sequence."""
        return "tool_calls" if reason == "stop" and self.called and self._plan and not self._plan.named else reason


class ReasoningCounter:
    """Count the tokens of the reasoning, its tags included."""

    def __init__(self, parser: AnswerParser, text_of: Callable[[int], str]) -> None:
        self._parser = parser
        self._text_of = text_of

    def count(self, tokens: Sequence[int]) -> int:
        """Return how many of the next tokens belong to the reasoning."""
        parser = self._parser
        count = 0
        for token in tokens:
            if parser.past_reasoning:
                break
            was_reasoning = parser.in_reasoning
            parser.push(self._text_of(token))
            count += was_reasoning or parser.in_reasoning
        return count
