"""Reads an answer as it comes: reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.api.reasoning import ReasoningSplitter, ReasoningTags
from quire.api.structured.constraint import Thought
from quire.api.tools.calls import Parsed
from quire.api.tools.choice import ToolPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the answers to a request are to be read.

    Attributes:
        tags: around the reasoning, if the model reasons.
        prompt: as its template made it.
        continued: the message that the answers go on with.
        plan: of the tools, if calls are to be found.
    """

    tags: ReasoningTags | None
    prompt: str | None
    continued: str = ""
    plan: ToolPlan | None = None

    def parser(self) -> AnswerParser:
        """A parser of one answer."""
        return AnswerParser(self)

    def splitter(self) -> ReasoningSplitter | None:
        """What splits the reasoning off."""
        return None if self.tags is None else ReasoningSplitter(self.tags, self.prompt, self.continued)

    @property
    def thought(self) -> Thought:
        """What may come before a structured answer."""
        splitter = self.splitter()
        if splitter is None or splitter.in_content:
            return Thought.NONE
        return Thought.OPEN if splitter.in_reasoning else Thought.POSSIBLE


class AnswerParser:
    """Reads one answer. However it is cut, what comes out adds up to the same."""

    def __init__(self, reading: Reading) -> None:
        self._splitter = reading.splitter()
        plan = self._plan = reading.plan
        self._tools = None if plan is None else plan.format.parser(plan.schemas)
        self.called = False

    def push(self, text: str, *, last: bool = False) -> Parsed:
        """What is certain after more text."""
        reasoning, content = "", text
        if self._splitter is not None:
            reasoning, content = self._splitter.push(text, last=last)
        if self._tools is None or self._plan is None:
            return Parsed(reasoning, content)
        parsed = self._tools.push(content, last=last)
        parsed.reasoning = reasoning
        parsed.calls = [call for call in parsed.calls if self._plan.several or call.index == 0]
        self.called = self.called or bool(parsed.calls)
        return parsed

    def finish_reason(self, given: str | None) -> str | None:
        """Why the answer ended, given why the text did."""
        return "tool_calls" if given == "stop" and self.called and self._plan and not self._plan.named else given


class ReasoningCounter:
    """Counts the tokens from the start tag's to the end tag's."""

    def __init__(self, splitter: ReasoningSplitter | None, text_of: Callable[[int], str]) -> None:
        self._splitter = splitter
        self._text_of = text_of

    def count(self, tokens: Sequence[int]) -> int:
        """How many of the next tokens belong to the reasoning."""
        splitter, found = self._splitter, 0
        for token in tokens:
            if splitter is None or splitter.in_content:
                break
            reasoned = splitter.in_reasoning
            splitter.push(self._text_of(token))
            found += reasoned or splitter.in_reasoning
        return found
