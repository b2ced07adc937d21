"""Words that successive passes over an utterance agree on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.realtime.stable_prefix import StablePrefix, separator, split

WORDS = st.lists(st.sampled_from(["a", "b", "see", "Sea", "c."]), max_size=8)


def told_after(*passes: str) -> tuple[list[str], StablePrefix]:
    """What is told after each pass."""
    prefix, told = StablePrefix(), []
    for transcript in passes:
        words = prefix.stable_words(transcript)
        prefix.record_sent(words)
        told.append("".join(words))
    return told, prefix


def test_a_word_is_told_once_two_passes_agree_on_it() -> None:
    told, prefix = told_after("turn", "turn the", "Turn the light", "turn, the lights on", "turn the lights off")
    assert told == ["", "turn", " the", "", " lights"]
    assert prefix.sent == "turn the lights"
    assert prefix.remaining("Turn the lights off.") == " off."


def test_a_word_that_changes_is_not_told() -> None:
    told, prefix = told_after("recognize", "wreck a", "recognize speech", "recognize speech now")
    assert told == ["", "", "", "recognize speech"]
    assert prefix.remaining("recognize speech now") == " now"


def test_what_was_told_is_not_repeated_when_the_end_differs() -> None:
    _, prefix = told_after("four tea birds", "four tea birds fly")
    assert prefix.sent == "four tea birds"
    assert prefix.remaining("forty birds fly south") == " fly south"
    assert prefix.remaining("four tea birds") == ""
    assert prefix.remaining("") == ""


def test_scripts_without_spaces_are_told_by_characters() -> None:
    told, prefix = told_after("今日", "今日は天", "今日は天気")
    assert told == ["", "今日", "は天"]
    assert prefix.remaining("今日は天気です。") == "気です。"
    assert split("안녕 하세요") == ["안녕", " 하세요"]


def test_texts_are_joined_as_their_scripts_are() -> None:
    assert [separator("a", "b"), separator("", "b"), separator("a", ""), separator("a", " b")] == [" ", "", "", ""]
    assert [separator("今日", "は"), separator("今日", "b")] == ["", " "]


@given(st.lists(WORDS, min_size=2, max_size=6), WORDS)
def test_the_told_text_only_grows_and_the_rest_is_an_end_of_the_transcript(
    passes: list[list[str]], last: list[str]
) -> None:
    final = " ".join(last)
    _, prefix = told_after(*(" ".join(words) for words in passes))
    assert final.endswith(prefix.remaining(final))
    _, same = told_after(*[final] * 2)
    assert same.sent == final
    assert same.remaining(final) == ""
