"""Keeps what users write from becoming control tokens: `<image>` in a text is a text, not a picture.

A mark is put into each control text of a user before the template is rendered, so that the tokenizer does not
recognize it. The tokens of the marks are left out afterwards, and what is left are the tokens of the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from os.path import commonprefix
from typing import Any, Self

from quire.multimodal.errors import PromptError

_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # code points that are no characters, so that texts have none of them
_ASSISTANT = "assistant"


class ControlTexts:
    """Recognize the texts of some control tokens."""

    def __init__(self, texts: frozenset[str]) -> None:
        known = [text for text in texts if len(text) > 1]
        self._whole = re.compile(_pattern(known) if known else r"(?!)")
        # What follows in the prompt could complete them.
        self._beginnings = {text[:length] for text in known for length in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, texts: frozenset[str]) -> Self:
        """The same object for equal texts."""
        return cls(texts)

    def occur_in(self, text: str) -> bool:
        """Whether a text has one of them, or ends with the beginning of one."""
        return bool(self._whole.search(text)) or self._begun_at_end(text)

    def marked(self, text: str, mark: str) -> str:
        """The text, with a mark in each of them, and behind one that it ends with the beginning of."""
        text = self._whole.sub(lambda match: f"{match[0][0]}{mark}{match[0][1:]}", text)
        return text + mark if self._begun_at_end(text) else text

    def _begun_at_end(self, text: str) -> bool:
        return any(text[-length:] in self._beginnings for length in range(1, min(self._longest, len(text)) + 1))


def _pattern(texts: Collection[str]) -> str:
    """A regular expression of texts, longest first, as a tree of their beginnings.

    A list of a thousand texts, of which each is tried at each place of a prompt, would hold all threads for seconds.
    """
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text)
    branches = []
    for alike in by_first.values():
        # At once: otherwise groups would be in groups as often as the longest text has characters.
        shared = commonprefix(alike)  # noqa: RUF071 characters are to be compared
        branches.append(re.escape(shared) + _pattern([text[len(shared) :] for text in alike]))
    if not branches:
        return ""
    joined = f"(?:{'|'.join(branches)})"
    return f"{joined}?" if "" in texts else joined


class TextGuard:
    """Mark the control texts in the messages and other values that a template gets.

    Attributes:
        mark: a character that no text has.
    """

    def __init__(self, mark: str, texts: ControlTexts, of_assistants: ControlTexts) -> None:
        self.mark = mark
        self._texts = texts
        self._of_assistants = of_assistants

    @classmethod
    def needed_for(
        cls,
        messages: Sequence[Mapping[str, Any]],
        others: Sequence[Any],
        texts: ControlTexts,
        of_assistants: ControlTexts,
    ) -> Self | None:
        """The guard of a conversation; None if no text of it needs one.

        Args:
            messages: its messages. The arguments of their tool calls are objects: in JSON, escapes may hide control
                texts.
            others: other values that the template gets.
            texts: control texts that it must not have.
            of_assistants: those that messages of an assistant must not have, but for their tool calls; models may have
                written others.

        Raises:
            PromptError: the texts have all characters that may be marks.
        """
        strings = [
            (string, of_assistants if _written_by_model(message, name) else texts)
            for message in messages
            for name, value in message.items()
            for string in _strings((name, value))
        ]
        strings += [(string, texts) for string in _strings(others)]
        if not any(known.occur_in(string) for string, known in strings):
            return None
        for mark in _MARKS:
            if not any(mark in string for string, _ in strings):
                return cls(mark, texts, of_assistants)
        raise PromptError(
            "The messages have all of the code points U+FDD0 to U+FDEF, which are no characters.", "messages"
        )

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Copies of messages with marks."""
        return [
            {
                self._marked(key, texts): self._marked(value, texts)
                for key, value in message.items()
                for texts in (self._of_assistants if _written_by_model(message, key) else self._texts,)
            }
            for message in messages
        ]

    def value(self, value: Any) -> Any:
        """A copy of a value with marks."""
        return self._marked(value, self._texts)

    def unmarked(self, text: str) -> str:
        """A text without marks."""
        return text.replace(self.mark, "")

    def _marked(self, value: Any, texts: ControlTexts) -> Any:
        if isinstance(value, str):
            return texts.marked(value, self.mark)
        if isinstance(value, Mapping):
            return {self._marked(key, texts): self._marked(inner, texts) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(inner, texts) for inner in value]
        return value


def _written_by_model(message: Mapping[str, Any], name: str) -> bool:
    """Whether a field of a message has what a model may have written with control tokens; arguments of calls do not."""
    return message.get("role") == _ASSISTANT and name != "tool_calls"


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON-like value, keys included."""
    left = [value]
    while left:
        node = left.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, Mapping):
            left += node.keys()
            left += node.values()
        elif isinstance(node, list | tuple):
            left += node
