"""The longest suffix of a text that may begin a mark."""

from __future__ import annotations

import pytest

from quire.engine.client.partial import partial_suffix


@pytest.mark.parametrize(
    ("text", "marks", "size"),
    [
        ("", ("</think>",), 0),
        ("abc", ("</think>",), 0),
        ("abc<", ("</think>",), 1),
        ("abc</thi", ("</think>",), 5),
        ("abc</think>", ("</think>",), 0),  # complete marks are found elsewhere
        ("aab", ("aabc", "bd"), 3),
        ("xaa", ("aab",), 2),
        ("anything", (), 0),
    ],
)
def test_the_longest_suffix_counts(text: str, marks: tuple[str, ...], size: int) -> None:
    assert partial_suffix(text, marks, max(map(len, marks), default=0)) == size
