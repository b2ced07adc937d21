"""Reasoning and content do not depend on how the text was cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.api.reasoning import ReasoningCounter, ReasoningSplitter, ReasoningTags

TAGS = ReasoningTags()
PIECES = st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "a", "b c", "\n", " ", "<", ">"])


def split(pieces: list[str], prompt: str | None = None, continued: str = "") -> tuple[str, str]:
    splitter = ReasoningSplitter(TAGS, prompt, continued)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.push("", last=True)]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@given(pieces=st.lists(PIECES, max_size=15), opened=st.booleans())
def test_pieces_and_the_whole_give_the_same(pieces: list[str], opened: bool) -> None:
    prompt = "x<think>\n" if opened else "x"
    whole = ReasoningSplitter(TAGS, prompt).push("".join(pieces), last=True)
    assert split(pieces, prompt) == whole


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("plain", None, ("", "plain")),
        ("  plain", None, ("", "  plain")),
        ("<think>a</think>b", None, ("a", "b")),
        ("\n<think>\n a \n</think>\n\nb\n", None, ("a", "b\n")),
        ("<think></think>b", None, ("", "b")),
        ("<think>a", None, ("a", "")),
        ("a</think>b", "user<think>\n", ("a", "b")),
        ("a</think>b", "user", ("", "a</think>b")),
        ("b<think>a</think>", None, ("", "b<think>a</think>")),
        ("<thinker>", None, ("", "<thinker>")),
        ("<think>a</think>b</think>c", None, ("a", "b</think>c")),
        ("<thi", None, ("", "<thi")),
        ("", None, ("", "")),
    ],
)
def test_what_is_reasoning_and_what_is_not(text: str, prompt: str | None, expected: tuple[str, str]) -> None:
    assert split([text], prompt) == expected
    assert split(list(text), prompt) == expected


@pytest.mark.parametrize(
    ("continued", "text", "expected"),
    [
        ("<think>\n27", " + 1</think>\n28", (" + 1", "28")),
        ("<think>\n", " 27</think>28", ("27", "28")),
        ("<think>a</think>b", " c", ("", " c")),
        ("<think>a</think>", "\n\nb", ("", "b")),
        ("I say ", "<think>", ("", "<think>")),
        (" ", "<think>a</think>b", ("a", "b")),
    ],
)
def test_a_continued_message_may_have_begun_to_reason(continued: str, text: str, expected: tuple[str, str]) -> None:
    assert split([text], "x" + continued, continued) == expected
    assert split(list(text), "x" + continued, continued) == expected


def test_tokens_of_the_reasoning_are_counted() -> None:
    texts = ["<think>", "a", "b", "</think>", "c"]
    for size in (1, 2, 5):
        counter = ReasoningCounter(ReasoningSplitter(TAGS, None), texts.__getitem__)
        tokens = list(range(5))
        assert sum(counter.count(tokens[i : i + size]) for i in range(0, 5, size)) == 4
