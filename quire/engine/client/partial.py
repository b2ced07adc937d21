"""Finds delimiters that may begin at the end of a partial text."""

from __future__ import annotations

from collections.abc import Sequence


def partial_suffix(text: str, marks: Sequence[str], longest: int) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a mark; 0 if there is none.

    `longest`: length of the longest mark.
    """
    for size in range(min(longest - 1, len(text)), 0, -1):
        suffix = text[-size:]
        if any(mark.startswith(suffix) for mark in marks):
            return size
    return 0
