"""Splits the reasoning from the content of an answer while it streams: reasoning is between a model's tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from quire.api.answers.whitespace import LeadingWhitespace, TrailingWhitespace
from quire.engine.wire.partial import partial_suffix


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What a model writes around its reasoning.

    Attributes:
        starts, ends: the tags, each in all of its variants; the first one is the usual.
        implicit_start: an answer begins with reasoning even without a start tag.
        closers: marks that end the reasoning as well, and belong to the content.
        wrapper: tags around the content, which are removed; empty if there are none.
        kept: the reasoning stays in the content, with its tags.
        citations: the text may be cited, as <co>text</co: 0:[1]>; these marks are removed.
    """

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    implicit_start: bool = False
    closers: tuple[str, ...] = ()
    wrapper: tuple[str, str] = ("", "")
    kept: bool = False
    citations: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """A registered parser.

    Attributes:
        name: vLLM's name of it, or that of a model that shares it.
        marker: a text by which chat templates are recognized; empty: the parser is never chosen automatically.
    """

    name: str
    tags: ReasoningTags
    marker: str = ""


_THINK = ReasoningTags()
_IMPLICIT = ReasoningTags(implicit_start=True)
# Marks of citations, and the beginning of a mark at the end of a text.
_CITATION = re.compile(r"<co>|</co(?::[\d:,\[\] ]{0,200})?>")
_CITATION_BEGUN = re.compile(r"<(?:/?(?:c(?:o)?)?|/co:[\d:,\[\] ]{0,200})\Z")
_COHERE = (("<|START_THINKING|>",), ("<|END_THINKING|>",))

# All parsers. The first one whose marker is in a chat template is used for it.
PARSERS: Mapping[str, ReasoningParser] = {
    parser.name: parser
    for parser in (
        # The tags as grammars need them; answers are parsed by the tool parser of this name.
        ReasoningParser(
            "openai_gptoss",
            ReasoningTags(("<|channel|>analysis<|message|>",), ("<|end|><|start|>assistant",)),
            "<|channel|>",
        ),
        ReasoningParser("seed_oss", ReasoningTags(("<seed:think>",), ("</seed:think>",)), "<seed:think>"),
        ReasoningParser("mistral", ReasoningTags(("[THINK]",), ("[/THINK]",)), "[THINK]"),
        ReasoningParser(
            "granite",
            ReasoningTags(
                starts=("Here is my thought process:", "Here's my thought process:"),
                ends=("Here is my response:", "Here's my response:"),
            ),
            "Here is my thought process",
        ),
        ReasoningParser(
            "kimi_k2", ReasoningTags(closers=("<|tool_calls_section_begin|>",)), "<|tool_calls_section_begin|>"
        ),
        ReasoningParser(
            "ernie45", ReasoningTags(implicit_start=True, wrapper=("<response>", "</response>")), "</response>"
        ),
        ReasoningParser(
            "cohere_command3",
            ReasoningTags(*_COHERE, wrapper=("<|START_RESPONSE|>", "<|END_RESPONSE|>"), citations=True),
            "<|START_RESPONSE|>",
        ),
        ReasoningParser(
            "cohere_command4",
            ReasoningTags(*_COHERE, wrapper=("<|START_TEXT|>", "<|END_TEXT|>"), citations=True),
            "<|START_TEXT|>",
        ),
        ReasoningParser("apertus", ReasoningTags(("<|inner_prefix|>",), ("<|inner_suffix|>",)), "<|inner_prefix|>"),
        ReasoningParser("hunyuan_a13b", ReasoningTags(wrapper=("<answer>", "</answer>")), "</answer>"),
        ReasoningParser("qwen3", _THINK, "</think>"),
        ReasoningParser("deepseek_r1", _IMPLICIT),
        ReasoningParser("deepseek_v3", _THINK),
        ReasoningParser("glm45", _THINK),
        ReasoningParser("glm47", _THINK),
        ReasoningParser("glm4_moe", _THINK),
        ReasoningParser("minimax_m2", _IMPLICIT),
        ReasoningParser("minimax_m2_append_think", ReasoningTags(implicit_start=True, kept=True)),
        ReasoningParser("step3", _IMPLICIT),
        ReasoningParser("step3p5", _IMPLICIT),
        ReasoningParser("holo2", _IMPLICIT),
        ReasoningParser("olmo3", _IMPLICIT),
        ReasoningParser("nemotron_v3", _THINK),
    )
}


def detect_tags(template: str) -> ReasoningTags | None:
    """The tags that a chat template contains; None if it contains none that are known."""
    return next((parser.tags for parser in PARSERS.values() if parser.marker and parser.marker in template), None)


def tags_named(text: str) -> ReasoningTags:
    """The tags of the parser with this name, or those of START...END.

    Raises:
        ValueError: it is neither.
    """
    if text in PARSERS:
        return PARSERS[text].tags
    start, dots, end = text.partition("...")
    if not (start and dots and end):
        raise ValueError(f"unknown reasoning parser {text!r}; known: {', '.join(PARSERS)} or START...END")
    return ReasoningTags(starts=(start,), ends=(end,))


class _Part(Enum):
    UNDECIDED = "only whitespace or a part of a start tag has arrived"
    REASONING = "between the tags"
    CONTENT = "after the reasoning"


class ReasoningSplitter:
    """Splits an answer that arrives in pieces into reasoning and content.

    The result does not depend on how the text is cut into pieces. Whitespace next to the tags is removed.
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
        self._citations = (_Citations(), _Citations())  # of the reasoning and of the content
        self._kept = ""  # the beginning of an answer whose reasoning is kept
        self._begun = bool(continued.strip())  # that beginning is complete
        prompt_text = (prompt or "").rstrip()
        if continued.strip():
            self._continue(continued)
        elif prompt_text.endswith(tags.starts):
            self._part = _Part.REASONING
        elif prompt_text.endswith(tags.ends):
            self._part = _Part.CONTENT
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
        if self._tags.kept:
            return "", self._keep(text, last)
        if self._tags.citations:
            cited, cited_content = self._citations
            return cited.remove(reasoning, last or self.in_content), cited_content.remove(content, last)
        return reasoning, content

    def _keep(self, text: str, last: bool) -> str:
        """All of the text, with the start tag that the prompt has, or that is missing."""
        if self._begun:
            return text
        self._kept += text
        beginning = self._kept.lstrip()
        if not last and any(tag.startswith(beginning) for tag in self._tags.starts):
            return ""
        self._begun = True
        if self._opened and beginning and not beginning.startswith(self._tags.starts):
            return self._tags.starts[0] + self._kept
        return self._kept

    def _split(self, text: str, last: bool) -> tuple[str, str]:
        self._buffer += self._leading.push(text) if self._part is _Part.UNDECIDED else text
        reasoning, content = "", ""
        if self._part is _Part.UNDECIDED:
            self._decide(last)
        if self._part is _Part.REASONING:
            reasoning = self._reason(last)
        if self._part is _Part.CONTENT:
            content, self._buffer = self._buffer, ""
            if self._at_start:
                content = content.lstrip()
                self._at_start = not content
            content = self._unwrapper.push(content, last)
        return reasoning, content

    def _continue(self, text: str) -> None:
        start = max(text.rfind(tag) for tag in self._tags.starts)
        end = max(text.rfind(tag) for tag in self._tags.ends)
        open_block = start > end or (end < 0 and self._tags.implicit_start)
        self._part = _Part.REASONING if open_block else _Part.CONTENT
        tags = self._tags.starts if open_block else self._tags.ends
        rest = min((text.rpartition(tag)[2] for tag in tags), key=len)
        self._at_start = not rest.strip()

    def _decide(self, last: bool) -> None:
        text = self._buffer
        start = next((tag for tag in self._tags.starts if text.startswith(tag)), None)
        if start is not None:
            self._part, self._buffer = _Part.REASONING, text[len(start) :]
        elif last or not any(tag.startswith(text) for tag in self._tags.starts):
            self._buffer = self._leading.removed + text
            implicit = self._tags.implicit_start
            self._part, self._at_start = (_Part.REASONING, True) if implicit else (_Part.CONTENT, False)

    def _reason(self, last: bool) -> str:
        if self._at_start:
            self._buffer = self._buffer.lstrip()
        marks = (*self._tags.ends, *self._tags.closers)
        found = min(((at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0), default=None)
        if found is not None:
            at, mark = found
            before, after = self._buffer[:at], self._buffer[at:]
            self._buffer = after if mark in self._tags.closers else after[len(mark) :]
            self._part, self._at_start = _Part.CONTENT, True
            return self._trailing.push(before)
        keep = 0 if last else partial_suffix(self._buffer, marks, max(map(len, marks)))
        text, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
        self._at_start = self._at_start and not text
        return self._trailing.push(text)


class _Citations:
    """Removes the marks of citations from a text that arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = ""  # text that may be a part of a mark

    def remove(self, text: str, last: bool) -> str:
        """Add text; returns the part without marks that is certain now."""
        text = _CITATION.sub("", self._buffer + text)
        begun = None if last else _CITATION_BEGUN.search(text)
        self._buffer = "" if begun is None else begun[0]
        return text.removesuffix(self._buffer)


class _Unwrapper:
    """Removes the tags around the content, if there are any."""

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
            text, self._buffer = removed + self._buffer.removeprefix(self._start), ""
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
