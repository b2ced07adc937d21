"""Detokenizer: streamed text equals the decoded text, and ends at the first stop string."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.client.detokenizer import Detokenizer, TextParams
from tests.support.tokenizer import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()


def feed(text: str, chunks: list[int], params: TextParams) -> tuple[list[str], Detokenizer]:
    """Push the tokens of a text in chunks of the given sizes, then the remaining ones."""
    ids = TOKENIZER.encode(text).ids
    detokenizer = Detokenizer(TOKENIZER, [], params)
    out = []
    for size in chunks:
        out.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    out.append(detokenizer.push(ids, last=True))
    return out, detokenizer


@given(text=st.text(max_size=40), chunks=st.lists(st.integers(0, 7), max_size=12))
@settings(deadline=None)
def test_streamed_pieces_equal_the_text(text: str, chunks: list[int]) -> None:
    out, _ = feed(text, chunks, TextParams())
    assert "".join(out) == text


@given(
    text=st.text("ab\u00e9 ", max_size=30),
    stops=st.lists(st.text("ab\u00e9 ", min_size=1, max_size=4), min_size=1, max_size=3),
    chunks=st.lists(st.integers(0, 5), max_size=12),
    include=st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_text_ends_at_the_first_stop_string(text: str, stops: list[str], chunks: list[int], include: bool) -> None:
    out, detokenizer = feed(text, chunks, TextParams(stop=tuple(stops), include_stop=include))
    ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    result = "".join(out)
    if not ends:
        assert result == text
        assert detokenizer.matched is None
        return
    # The stop string that is completed first wins. Of those that end together, the longest wins, as it begins first.
    end = min(ends)[0]
    stop = max((stop for at, stop in ends if at == end), key=len)
    assert detokenizer.matched == stop
    assert result == text[: end if include else end - len(stop)]
    assert detokenizer.tokens_used == len(TOKENIZER.encode(text[:end]).ids)


def test_text_that_may_begin_a_stop_string_is_held() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], TextParams(stop=("STOP",)))
    ids = TOKENIZER.encode("a ST no STO").ids
    texts = [detokenizer.push([token]) for token in ids]
    assert texts == ["a", " ", "", "", "ST ", "n", "o", " ", "", "", ""]
    assert detokenizer.push([], last=True) == "STO"


def test_stop_strings_within_min_tokens_are_ignored() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], TextParams(stop=("b",), min_tokens=3))
    assert detokenizer.push(TOKENIZER.encode("ab ab").ids) == "ab a"
    assert detokenizer.matched == "b"


def test_characters_of_several_tokens_are_returned_whole() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], TextParams())
    ids = TOKENIZER.encode("\u20ac").ids
    assert [detokenizer.push([token]) for token in ids] == ["", "", "\u20ac"]


def test_special_tokens_are_skipped_by_default() -> None:
    ids = [*TOKENIZER.encode("hi").ids, EOS]
    assert Detokenizer(TOKENIZER, [], TextParams()).push(ids, last=True) == "hi"
    detokenizer = Detokenizer(TOKENIZER, [], TextParams(skip_special_tokens=False))
    assert detokenizer.push(ids, last=True) == "hi<|im_end|>"


def test_the_end_of_the_prompt_is_not_repeated() -> None:
    for end in ("hello \ufffd", "\ufffd\ufffd"):
        detokenizer = Detokenizer(TOKENIZER, TOKENIZER.encode(end).ids, TextParams())
        texts = [detokenizer.push([token]) for token in TOKENIZER.encode("xyz").ids]
        assert texts == ["x", "y", "z"]


def test_a_character_that_starts_in_the_prompt_is_completed() -> None:
    ids = TOKENIZER.encode("to \u20ac!").ids
    for end in range(4, 6):
        detokenizer = Detokenizer(TOKENIZER, ids[:end], TextParams())
        assert "".join(detokenizer.push([token]) for token in ids[end:]) == "\u20ac!"


def test_invalid_bytes_at_the_end_are_returned() -> None:
    euro = TOKENIZER.encode("\u20ac").ids
    for ids, text in ((TOKENIZER.encode("a\ufffd").ids, "a\ufffd"), (euro[:2], "\ufffd")):
        assert Detokenizer(TOKENIZER, [], TextParams()).push(ids, last=True) == text
        detokenizer = Detokenizer(TOKENIZER, [], TextParams(stop=("never",)))
        assert detokenizer.push(ids) + detokenizer.push([], last=True) == text


def test_a_bounded_number_of_invalid_bytes_is_held() -> None:
    first_byte = TOKENIZER.encode("\u20ac").ids[0]
    detokenizer = Detokenizer(TOKENIZER, TOKENIZER.encode("so ").ids, TextParams())
    texts = [detokenizer.push([first_byte]) for _ in range(1000)]
    held = 1000 - len("".join(texts))
    assert held < 50
    text = detokenizer.push(TOKENIZER.encode("end").ids, last=True)
    assert "".join(texts) + text == "\ufffd" * 1000 + "end"


def test_many_special_tokens_do_not_change_the_text() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], TextParams())
    text = [detokenizer.push([token]) for token in [*TOKENIZER.encode("a\u20ac").ids, *[EOS] * 500, 65]]
    assert "".join(text) == TOKENIZER.decode([*TOKENIZER.encode("a\u20ac").ids, 65])
