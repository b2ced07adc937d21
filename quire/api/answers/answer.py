"""Reads an answer as it comes: reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.api.answers.reasoning import ReasoningSplitter, ReasoningTags
from quire.api.answers.structured.constraint import Thought
from quire.api.answers.tools.calls import Parsed, Piece, TextDelta
from quire.api.answers.tools.choice import ToolPlan
from quire.api.answers.tools.custom_input import CustomCalls
from quire.api.answers.tools.registry import ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the answers to a request are to be read.

    Attributes:
        tags: around the reasoning, if the model reasons.
        prompt: as its template made it.
        continued: the message that the answers go on with.
        plan: of the tools, if calls are to be found.
        whole: the format that all of the model's answers have, if they have one.
    """

    tags: ReasoningTags | None
    prompt: str | None
    continued: str = ""
    plan: ToolPlan | None = None
    whole: ToolFormat | None = None

    def parser(self) -> AnswerParser:
        """A parser of one answer."""
        return AnswerParser(self)

    def splitter(self) -> ReasoningSplitter | None:
        """What splits the reasoning off."""
        if self.tags is None or self.whole is not None:
            return None
        return ReasoningSplitter(self.tags, self.prompt, self.continued)

    def counter(self, text_of: Callable[[int], str]) -> ReasoningCounter:
        """What counts the reasoning tokens of one answer, given the texts of tokens."""
        return ReasoningCounter(self.parser(), text_of)

    @property
    def thought(self) -> Thought:
        """What may come before a structured answer."""
        if self.whole is not None and self.tags is not None:
            return Thought.POSSIBLE
        splitter = self.splitter()
        if splitter is None or splitter.in_content:
            return Thought.NONE
        return Thought.OPEN if splitter.in_reasoning else Thought.POSSIBLE


class AnswerParser:
    """Reads one answer. However it is cut, what comes out adds up to the same, in the same order.

    Attributes:
        plain: there is nothing but text in it, which need not be read.
        called: a call was found.
    """

    def __init__(self, reading: Reading) -> None:
        self._splitter = reading.splitter()
        plan = self._plan = reading.plan
        form = reading.whole if plan is None else plan.format
        self._tools = None if form is None else form.parser({} if plan is None else plan.schemas)
        self._custom = CustomCalls(plan.custom) if plan is not None and plan.custom else None
        self._whole = reading.whole is not None
        self.plain = self._splitter is None and self._tools is None
        self.called = False

    def push(self, text: str, *, last: bool = False) -> Parsed:
        """What is certain after more text."""
        parsed, content = Parsed(), text
        if self._splitter is not None:
            reasoning, content = self._splitter.push(text, last=last)
            parsed.say(reasoning, reasoning=True)
        if self._tools is None:
            parsed.say(content)
            return parsed
        found = self._tools.push(content, last=last)
        if self._custom is not None:
            found = self._custom.read(found, last=last)
        for piece in found.pieces:
            self._add(parsed, piece)
        return parsed

    def _add(self, parsed: Parsed, piece: Piece) -> None:
        if isinstance(piece, TextDelta):
            parsed.say(piece.text, reasoning=piece.reasoning)
        elif self._plan is None:  # nobody asked for calls: what they say is text
            parsed.say(piece.arguments)
        elif self._plan.several or piece.index == 0:
            self.called = True
            parsed.call(piece)

    @property
    def in_reasoning(self) -> bool:
        """Whether reasoning is being read."""
        return (
            self._tools is not None and self._tools.thinking if self._splitter is None else self._splitter.in_reasoning
        )

    @property
    def past_reasoning(self) -> bool:
        """Whether none will come any more."""
        return self._splitter.in_content if self._splitter is not None else not self._whole

    def finish_reason(self, given: str | None) -> str | None:
        """Why the answer ended, given why the text did."""
        return "tool_calls" if given == "stop" and self.called and self._plan and not self._plan.named else given


class ReasoningCounter:
    """Counts the tokens from the start tag's to the end tag's."""

    def __init__(self, parser: AnswerParser, text_of: Callable[[int], str]) -> None:
        self._parser = parser
        self._text_of = text_of

    def count(self, tokens: Sequence[int]) -> int:
        """How many of the next tokens belong to the reasoning."""
        parser, found = self._parser, 0
        for token in tokens:
            if parser.past_reasoning:
                break
            reasoned = parser.in_reasoning
            parser.push(self._text_of(token))
            found += reasoned or parser.in_reasoning
        return found
