"""Stop strings are found as by a search of the whole text, without searching it again for each token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.client.stop_strings import StopStrings


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
)
@settings(deadline=None, max_examples=500)
def test_matches_and_held_text_are_those_of_a_search(stops: list[str], pieces: list[str]) -> None:
    matcher, text = StopStrings(stops), ""
    for piece in pieces:
        before, text = len(text), text + piece
        match = matcher.push(piece)
        starts = [
            (start - before, stop)
            for stop in stops
            for start in range(max(0, before - len(stop) + 1), len(text))
            if text.startswith(stop, start)
        ]
        assert match == min(starts, default=None)
        sizes = [size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
        assert matcher.held == max(sizes)


class CountedText(str):
    """A text that counts how often its characters are compared."""

    compared = 0
    __hash__ = str.__hash__

    def __getitem__(self, index: object) -> str:
        CountedText.compared += 1
        return str.__getitem__(self, index)  # type: ignore[index]


def test_a_token_costs_the_same_however_much_text_is_held() -> None:
    stop = CountedText("ab" * 500 + "c")
    matcher = StopStrings([stop])
    matcher.push("ab" * 400)
    assert matcher.held == 800
    CountedText.compared = 0
    for _ in range(100):
        matcher.push("a")
        matcher.push("b")
    assert matcher.held == 1000
    assert CountedText.compared < 1000
