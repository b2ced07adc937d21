"""A pair of texts: what is searched for, and the text that should be found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pair:
    """A query and its text.

    ``asks`` are marks of what the query asks for, ``holds`` those of what the text holds. A query also fits the text of
    another pair that holds all marks it asks for; such a text is no wrong answer. ``negative`` is a text that looks
    right but is wrong, or empty.
    """

    query: str
    text: str
    asks: frozenset[str] = field(default_factory=frozenset)
    holds: frozenset[str] = field(default_factory=frozenset)
    negative: str = ""

    def fits(self, other: Pair) -> bool:
        """Whether the text of the other pair answers the query of this one as well."""
        return self.asks <= other.holds or self.text == other.text


def same(query: str, text: str, marks: Iterable[str], negative: str = "") -> Pair:
    """Return a pair whose query asks for exactly what its text holds."""
    held = frozenset(marks)
    return Pair(query, text, held, held, negative)
