"""Whitespace around a text that arrives in pieces. The cost is linear in the text, however long the whitespace is."""

from __future__ import annotations


class LeadingWhitespace:
    """Remove the whitespace at the beginning of a text."""

    def __init__(self) -> None:
        self._removed: list[str] = []
        self._ended = False

    def push(self, text: str) -> str:
        """Add text; returns it without the whitespace at the beginning of the whole text."""
        if self._ended:
            return text
        body = text.lstrip()
        self._removed.append(text[: len(text) - len(body)])
        self._ended = bool(body)
        return body

    @property
    def removed(self) -> str:
        """The whitespace that was removed."""
        return "".join(self._removed)


class TrailingWhitespace:
    """Hold the whitespace at the end of a text until other text follows."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """Add text; returns the text before the whitespace at the end."""
        body = text.rstrip()
        if not body:
            self._held.append(text)
            return ""
        before = self._held
        self._held = [text[len(body) :]]
        return "".join([*before, body])

    def take(self) -> str:
        """Return the whitespace that is held, and hold it no more."""
        held = self._held
        self._held = []
        return "".join(held)
