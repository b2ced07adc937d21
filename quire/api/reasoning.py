"""Splits a leading <think>...</think> block off an answer, as it streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What a model writes around its reasoning."""

    start: str = "<think>"
    end: str = "</think>"


class _Part(Enum):
    UNDECIDED = "nothing but white space or a piece of the start tag has come"
    REASONING = "between the tags"
    CONTENT = "the answer itself"


class ReasoningSplitter:
    """Takes an answer's text in pieces and tells reasoning from content.

    Whatever the pieces, the reasoning and the content add up to the same texts. White space around either is dropped
    where the tags touch it.
    """

    def __init__(self, tags: ReasoningTags, prompt: str | None, continued: str = "") -> None:
        """It begins inside the block if the template, or a message that is `continued`, has opened it already."""
        self._tags = tags
        self._part = _Part.UNDECIDED
        self._held = ""
        self._fresh = True  # nothing of the current part was given out yet
        if prompt is not None and prompt.rstrip().endswith(tags.start):
            self._part = _Part.REASONING
        elif continued.strip():
            self._go_on(continued)

    @property
    def in_content(self) -> bool:
        """Whether the answer itself has begun."""
        return self._part is _Part.CONTENT

    @property
    def in_reasoning(self) -> bool:
        """Whether a reasoning block is open."""
        return self._part is _Part.REASONING

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Reasoning and content that are certain after more text."""
        self._held += text
        reasoning, content = "", ""
        if self._part is _Part.UNDECIDED:
            self._decide(last)
        if self._part is _Part.REASONING:
            reasoning = self._reason(last)
        if self._part is _Part.CONTENT:
            content, self._held = self._held, ""
            if self._fresh:
                content = content.lstrip()
                self._fresh = not content
        return reasoning, content

    def _go_on(self, text: str) -> None:
        start, end = (text.rfind(tag) for tag in (self._tags.start, self._tags.end))
        self._part = _Part.REASONING if start > end else _Part.CONTENT
        given = text.rpartition(self._tags.start if start > end else self._tags.end)[2]
        self._fresh = not given.strip()

    def _decide(self, last: bool) -> None:
        start, text = self._tags.start, self._held.lstrip()
        if text.startswith(start):
            self._part, self._held = _Part.REASONING, text[len(start) :]
        elif last or not start.startswith(text):
            self._part, self._fresh = _Part.CONTENT, False

    def _reason(self, last: bool) -> str:
        if self._fresh:
            self._held = self._held.lstrip()
        before, found, after = self._held.partition(self._tags.end)
        if found:
            self._part, self._held, self._fresh = _Part.CONTENT, after, True
            return before.rstrip()
        keep = 0 if last else self._undecided_tail(before)
        given, self._held = before[: len(before) - keep], before[len(before) - keep :]
        self._fresh = self._fresh and not given
        return given.rstrip() if last else given

    def _undecided_tail(self, text: str) -> int:
        """Length of the end that may be dropped white space or a piece of the end tag."""
        end = self._tags.end
        tag = next((size for size in range(min(len(end) - 1, len(text)), 0, -1) if text.endswith(end[:size])), 0)
        body = text[: len(text) - tag]
        return tag + len(body) - len(body.rstrip())


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
