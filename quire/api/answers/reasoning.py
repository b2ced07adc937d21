"""Splits the reasoning off an answer, as it streams: what stands between a model's tags before the answer itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What a model writes around its reasoning.

    Attributes:
        starts, ends: the tags, each in any of its wordings; the first one is the usual.
        begun: an answer begins within the reasoning, whether it says so or not.
        closers: marks that end the reasoning too, and belong to what follows.
        wrapper: tags around the answer itself, which are no part of it; empty ones are none.
    """

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    begun: bool = False
    closers: tuple[str, ...] = ()
    wrapper: tuple[str, str] = ("", "")


_THINK = ReasoningTags()
_BEGUN = ReasoningTags(begun=True)

# By vLLM's names of its parsers, and those of models that share one.
REASONING: Mapping[str, ReasoningTags] = {
    "deepseek_r1": _BEGUN,
    "deepseek_v3": _THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    "glm4_moe": _THINK,
    "granite": ReasoningTags(
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    ),
    "mistral": ReasoningTags(starts=("[THINK]",), ends=("[/THINK]",)),
    "hunyuan_a13b": ReasoningTags(wrapper=("<answer>", "</answer>")),
    "minimax_m2": _BEGUN,
    "step3": _BEGUN,
    "kimi_k2": ReasoningTags(closers=("<|tool_calls_section_begin|>",)),
    "seed_oss": ReasoningTags(starts=("<seed:think>",), ends=("</seed:think>",)),
    "ernie45": ReasoningTags(begun=True, wrapper=("<response>", "</response>")),
    "olmo3": _BEGUN,
    "nemotron_v3": _THINK,
    # The tags as grammars need them; answers are read by the form that tools have there.
    "openai_gptoss": ReasoningTags(("<|channel|>analysis<|message|>",), ("<|end|><|start|>assistant",)),
}

# What a chat template has to contain, of which the first that does decides.
_SIGNS = (
    ("<|channel|>", "openai_gptoss"),
    ("<seed:think>", "seed_oss"),
    ("[THINK]", "mistral"),
    ("Here is my thought process", "granite"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("</response>", "ernie45"),
    ("</answer>", "hunyuan_a13b"),
    ("</think>", "qwen3"),
)


def reasoning_of(template: str) -> ReasoningTags | None:
    """The tags that a chat template knows, as far as one can tell."""
    return next((REASONING[name] for sign, name in _SIGNS if sign in template), None)


def tags_named(text: str) -> ReasoningTags:
    """The tags of a parser, or those of START...END."""
    if text in REASONING:
        return REASONING[text]
    start, _, end = text.partition("...")
    return ReasoningTags(starts=(start,), ends=(end,))


class _Part(Enum):
    UNDECIDED = "nothing but white space or a piece of a start tag has come"
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
        self._wrapping = _Unwrapper(*tags.wrapper)
        written = (prompt or "").rstrip()
        if continued.strip():
            self._go_on(continued)
        elif written.endswith(tags.starts):
            self._part = _Part.REASONING
        elif written.endswith(tags.ends):
            self._part = _Part.CONTENT

    @property
    def in_content(self) -> bool:
        """Whether the answer itself has begun."""
        return self._part is _Part.CONTENT

    @property
    def in_reasoning(self) -> bool:
        """Whether a reasoning block is open."""
        return self._part is _Part.REASONING or (self._part is _Part.UNDECIDED and self._tags.begun)

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
            content = self._wrapping.push(content, last)
        return reasoning, content

    def _go_on(self, text: str) -> None:
        start = max(text.rfind(tag) for tag in self._tags.starts)
        end = max(text.rfind(tag) for tag in self._tags.ends)
        open_block = start > end or (end < 0 and self._tags.begun)
        self._part = _Part.REASONING if open_block else _Part.CONTENT
        tags = self._tags.starts if open_block else self._tags.ends
        given = min((text.rpartition(tag)[2] for tag in tags), key=len)
        self._fresh = not given.strip()

    def _decide(self, last: bool) -> None:
        text = self._held.lstrip()
        start = next((tag for tag in self._tags.starts if text.startswith(tag)), None)
        if start is not None:
            self._part, self._held = _Part.REASONING, text[len(start) :]
        elif last or not any(tag.startswith(text) for tag in self._tags.starts):
            begun = self._tags.begun
            self._part, self._fresh = (_Part.REASONING, True) if begun else (_Part.CONTENT, False)

    def _reason(self, last: bool) -> str:
        if self._fresh:
            self._held = self._held.lstrip()
        marks = (*self._tags.ends, *self._tags.closers)
        found = min(((at, mark) for mark in marks if (at := self._held.find(mark)) >= 0), default=None)
        if found is not None:
            at, mark = found
            before, after = self._held[:at], self._held[at:]
            self._held = after if mark in self._tags.closers else after[len(mark) :]
            self._part, self._fresh = _Part.CONTENT, True
            return before.rstrip()
        keep = 0 if last else _undecided_tail(self._held, marks)
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._fresh = self._fresh and not given
        return given.rstrip() if last else given


@dataclass(slots=True)
class _Unwrapper:
    """Takes the tags around an answer off, if there are such."""

    start: str
    end: str
    _held: str = field(default="", init=False)
    _inside: bool | None = field(default=None, init=False)
    _begun: bool = field(default=False, init=False)  # something of the inside was given out

    def push(self, text: str, last: bool) -> str:
        """The text without them, as far as it is certain."""
        if not self.start:
            return text
        self._held += text
        if self._inside is None:
            body = self._held.lstrip()
            if not last and self.start.startswith(body[: len(self.start)]) and len(body) < len(self.start):
                return ""
            self._inside = body.startswith(self.start)
            self._held = body.removeprefix(self.start) if self._inside else self._held
        if not self._inside:
            given, self._held = self._held, ""
            return given
        return self._until_end(last)

    def _until_end(self, last: bool) -> str:
        if not self._begun:
            self._held = self._held.lstrip()
        given = self._certain(last)
        self._begun = self._begun or bool(given)
        return given

    def _certain(self, last: bool) -> str:
        if last:
            given, self._held = self._held.rstrip().removesuffix(self.end).rstrip(), ""
            return given
        body = self._held.rstrip()
        body = body.removesuffix(self.end).rstrip() if body.endswith(self.end) else self._held
        keep = len(self._held) - len(body) + _undecided_tail(body, (self.end,))
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return given


def _undecided_tail(text: str, marks: tuple[str, ...]) -> int:
    """Length of the end that may be dropped white space or a piece of a mark."""
    longest = max(map(len, marks)) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    tag = next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)
    body = text[: len(text) - tag]
    return tag + len(body) - len(body.rstrip())
