"""Splits the reasoning from the content of an answer while it streams: reasoning is between a model's tags."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from quire.engine.client.partial import partial_suffix
from quire.parsing.whitespace import LeadingWhitespace, TrailingWhitespace


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What a model writes around its reasoning.

    Attributes:
        starts, ends: the tags, each in all of its variants; the first one is the usual. Without any, there is no
            reasoning.
        implicit_start: an answer begins with reasoning even without a start tag.
        closers: marks that end the reasoning as well, and belong to the content.
        wrapper: tags around the content, which are removed; empty if there are none.
        in_content: the reasoning stays in the content, with its tags.
        dropped: marks in the content that are removed.
        citations: the text may be cited, as <co>text</co: 0:[1]>; these marks are removed.
        switchable: a request may switch reasoning off, so that all text is content.
        on_request: if a request switches reasoning on, an answer begins with it even without a start tag.
    """

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    implicit_start: bool = False
    closers: tuple[str, ...] = ()
    wrapper: tuple[str, str] = ("", "")
    in_content: bool = False
    dropped: tuple[str, ...] = ()
    citations: bool = False
    switchable: bool = False
    on_request: bool = False

    def switched(self, thinking: bool | None, prompt: str | None) -> ReasoningTags | None:
        """Return the tags of an answer to a request; None if all text is content.

        Args:
            thinking: whether the request switches reasoning on or off; None: it leaves that to the model.
            prompt: text of the rendered prompt. A block that it opens is reasoning, whatever the request says.
        """
        if thinking is None or not self.switchable or (prompt or "").rstrip().endswith(self.starts):
            return self
        if not thinking:
            return replace(self, starts=(), ends=(), implicit_start=False) if self.dropped else None
        return replace(self, implicit_start=True) if self.on_request else self


_SPACES = re.compile(r"\s*")
# Marks of citations, and the beginning of a mark at the end of a text.
_CITATION = re.compile(r"<co>|</co(?::[\d:,\[\] ]{0,200})?>")
_CITATION_BEGUN = re.compile(r"<(?:/?(?:c(?:o)?)?|/co:[\d:,\[\] ]{0,200})\Z")


class _Part(Enum):
    UNDECIDED = "only whitespace or a part of a start tag has arrived"
    REASONING = "between the tags"
    CONTENT = "after the reasoning"


class ReasoningSplitter:
    """Split an answer that arrives in pieces into reasoning and content.

    The result does not depend on how the text is cut into pieces. Whitespace next to the tags is removed, and so is a
    start tag at the beginning of the reasoning or an end tag at the beginning of the content, which models repeat.
    """

    def __init__(self, tags: ReasoningTags, prompt: str | None, continued: str = "") -> None:
        """Begin inside the reasoning if the prompt, or the `continued` message, has opened it."""
        self._tags = tags
        self._part = _Part.UNDECIDED
        self._buffer = ""
        self._at_start = True  # no text of the current part has been returned
        self._leading = LeadingWhitespace()  # before the first tag
        self._trailing = TrailingWhitespace()  # of the reasoning
        self._unwrapper = _Unwrapper(*tags.wrapper)
        self._remover = _Remover(tags.dropped)
        self._citations = (_Citations(), _Citations())  # of the reasoning and of the content
        self._withheld = ""  # the beginning of an answer whose reasoning is kept
        self._begun = bool(continued.strip())  # that beginning is complete
        prompt_text = (prompt or "").rstrip()
        if not tags.starts:
            self._part = _Part.CONTENT
            self._at_start = False
        elif continued.strip():
            self._continue(continued)
        elif prompt_text.endswith(tags.starts):
            self._part = _Part.REASONING
        elif prompt_text.endswith(tags.ends):
            self._part = _Part.CONTENT
        self._longest = max(map(len, (*tags.starts, *tags.ends)), default=0)  # characters of a tag
        self._opened = self.in_reasoning  # before the answer begins

    @property
    def in_content(self) -> bool:
        """Whether the content has begun."""
        return self._part is _Part.CONTENT

    @property
    def in_reasoning(self) -> bool:
        """Whether a reasoning block is open."""
        return self._part is _Part.REASONING or (self._part is _Part.UNDECIDED and self._tags.implicit_start)

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Add text; returns the reasoning and the content that are certain now."""
        reasoning, content = self._split(text, last)
        if self._tags.in_content:
            return "", self._keep(text, last)
        if self._tags.citations:
            cited, cited_content = self._citations
            return cited.remove(reasoning, last or self.in_content), cited_content.remove(content, last)
        return reasoning, content

    def _keep(self, text: str, last: bool) -> str:
        """Return all of the text, with the start tag that the prompt has, or that is missing."""
        if self._begun:
            return text
        self._withheld += text
        beginning = self._withheld.lstrip()
        if not last and any(tag.startswith(beginning) for tag in self._tags.starts):
            return ""
        self._begun = True
        if self._opened and beginning and not beginning.startswith(self._tags.starts):
            return self._tags.starts[0] + self._withheld
        return self._withheld

    def _split(self, text: str, last: bool) -> tuple[str, str]:
        self._buffer += self._leading.push(text) if self._part is _Part.UNDECIDED else text
        reasoning, content = "", ""
        if self._part is _Part.UNDECIDED:
            self._decide(last)
        if self._part is _Part.REASONING:
            reasoning = self._reason(last)
        if self._part is _Part.CONTENT:
            if self._begins(self._tags.ends, last):
                content = self._buffer
                self._buffer = ""
                self._at_start = self._at_start and not content
            content = self._remover.remove(self._unwrapper.push(content, last), last)
        return reasoning, content

    def _continue(self, text: str) -> None:
        start = max(text.rfind(tag) for tag in self._tags.starts)
        end = max(text.rfind(tag) for tag in self._tags.ends)
        open_block = start > end or (end < 0 and self._tags.implicit_start)
        self._part = _Part.REASONING if open_block else _Part.CONTENT
        tags = self._tags.starts if open_block else self._tags.ends
        after_tag = min((text.rpartition(tag)[2] for tag in tags), key=len)
        self._at_start = not after_tag.strip()

    def _decide(self, last: bool) -> None:
        text, marks = self._buffer, (*self._tags.starts, *self._tags.ends)
        if not last and _may_grow(text, marks):
            return
        mark = _longest(text, marks)
        if mark is None:
            self._buffer = self._leading.removed + text
            implicit = self._tags.implicit_start
            self._part, self._at_start = (_Part.REASONING, True) if implicit else (_Part.CONTENT, False)
        else:
            self._buffer = text[len(mark) :]
            self._part = _Part.REASONING if mark in self._tags.starts else _Part.CONTENT

    def _begins(self, marks: Iterable[str], last: bool) -> bool:
        """Drop whitespace and marks at the beginning of a part; returns whether the text that follows is certain."""
        if not self._at_start:
            return True
        text = self._buffer
        at = 0
        certain = True
        mark: str | None = ""
        while mark is not None and certain:
            at = _end_of_spaces(text, at + len(mark))
            certain = last or not _may_grow(text[at : at + self._longest], marks)
            mark = _longest(text, marks, at)
        self._buffer = text[at:]
        return certain

    def _reason(self, last: bool) -> str:
        if not self._begins(self._tags.starts, last):
            return ""
        marks = (*self._tags.ends, *self._tags.closers)
        first_mark = min(((at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0), default=None)
        if first_mark is not None:
            at, mark = first_mark
            before = self._buffer[:at]
            after = self._buffer[at:]
            self._buffer = after if mark in self._tags.closers else after[len(mark) :]
            self._part = _Part.CONTENT
            self._at_start = True
            return self._trailing.push(before)
        keep = 0 if last else partial_suffix(self._buffer, marks, max(map(len, marks)))
        text = self._buffer[: len(self._buffer) - keep]
        self._buffer = self._buffer[len(self._buffer) - keep :]
        self._at_start = self._at_start and not text
        return self._trailing.push(text)


def _may_grow(text: str, marks: Iterable[str]) -> bool:
    """Return whether a text may be the beginning of one of the marks."""
    return any(len(mark) > len(text) and mark.startswith(text) for mark in marks)


def _longest(text: str, marks: Iterable[str], at: int = 0) -> str | None:
    """The longest of the marks that the text has at a place."""
    return max((mark for mark in marks if text.startswith(mark, at)), key=len, default=None)


def _end_of_spaces(text: str, at: int) -> int:
    """The place of the first character from a place on that is not whitespace."""
    spaces = _SPACES.match(text, at)
    return at if spaces is None else spaces.end()


class _Citations:
    """Remove the marks of citations from a text that arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = ""  # text that may be a part of a mark

    def remove(self, text: str, last: bool) -> str:
        """Add text; returns the part without marks that is certain now."""
        text = _CITATION.sub("", self._buffer + text)
        begun = None if last else _CITATION_BEGUN.search(text)
        self._buffer = "" if begun is None else begun[0]
        return text.removesuffix(self._buffer)


class _Remover:
    """Remove marks from a text that arrives in pieces."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks = marks
        self._pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        self._buffer = ""  # text that may be a part of a mark

    def remove(self, text: str, last: bool) -> str:
        """Add text; returns the part without marks that is certain now."""
        if not self._marks:
            return text
        text = self._buffer + text
        pieces = list[str]()
        at = 0
        for mark in self._pattern.finditer(text):
            pieces.append(text[at : mark.start()])
            at = mark.end()
        text = text[at:]
        keep = 0 if last else partial_suffix(text, self._marks, max(map(len, self._marks)))
        self._buffer = text[len(text) - keep :]
        return "".join([*pieces, text[: len(text) - keep]])


class _Unwrapper:
    """Remove the tags around the content, if there are any."""

    def __init__(self, start: str, end: str) -> None:
        self._start = start
        self._end = end
        self._buffer = ""  # text that may be a part of a tag
        self._inside: bool | None = None
        self._leading = LeadingWhitespace()  # before the first tag
        self._inner = LeadingWhitespace()  # after it
        self._trailing = TrailingWhitespace()  # before the last tag
        self._after_end = TrailingWhitespace()  # after it

    def push(self, text: str, last: bool) -> str:
        """Add text; returns the part without tags that is certain now."""
        if not self._start:
            return text
        if self._inside is None:
            self._buffer += self._leading.push(text)
            if not last and len(self._buffer) < len(self._start) and self._start.startswith(self._buffer):
                return ""
            self._inside = self._buffer.startswith(self._start)
            removed = "" if self._inside else self._leading.removed
            text = removed + self._buffer.removeprefix(self._start)
            self._buffer = ""
        return self._until_end(self._inner.push(text), last) if self._inside else text

    def _until_end(self, text: str, last: bool) -> str:
        """The part before the last tag, which is the end of the text."""
        if self._buffer == self._end:
            text = self._after_end.push(text)
            if not text and not last:
                return ""
            text += self._after_end.take()
        text = self._buffer + text
        body = text.rstrip()
        if body.endswith(self._end):
            self._buffer = self._end
            self._after_end.push(text[len(body) :])
            return self._trailing.push(body.removesuffix(self._end))
        keep = 0 if last else partial_suffix(text, (self._end,), len(self._end))
        self._buffer = text[len(text) - keep :]
        return self._trailing.push(text[: len(text) - keep])
