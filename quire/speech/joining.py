"""Joins the texts of windows and of their parts to one, piece by piece."""

from __future__ import annotations

from quire.speech.types import TranscriptDelta

_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})


class Joiner:
    """The text so far has no white space at its ends, and a space between parts where the language has them."""

    def __init__(self, language: str | None) -> None:
        self._spaced = language not in _WITHOUT_SPACES
        self._texts: list[str] = []
        self._held = ""  # white space that is given once something follows
        self._held_input = self._held_output = 0  # tokens that are counted once something follows
        self._fresh = False  # the next piece is the first of a part

    @property
    def text(self) -> str:
        """The text given so far."""
        return "".join(self._texts)

    def next_part(self) -> None:
        """Note that the text of another part follows."""
        self._fresh = True

    def add(self, piece: TranscriptDelta) -> TranscriptDelta | None:
        """The piece as it is given; None if there is nothing to give yet."""
        text = self._held + piece.text
        if not self._texts:
            text = text.lstrip()
        elif self._fresh and self._spaced and piece.text and not text[:1].isspace():
            text = f" {text}"
        self._fresh = self._fresh and not piece.text
        given = text.rstrip()
        self._held = text[len(given) :]
        self._held_input += piece.input_tokens
        self._held_output += piece.output_tokens
        if not given and not piece.logprobs:
            return None
        if given:
            self._texts.append(given)
        delta = TranscriptDelta(given, piece.logprobs, self._held_input, self._held_output)
        self._held_input = self._held_output = 0
        return delta
