"""Streamed text is the whole text, and stop strings cut it wherever tokens end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.wire.detokenizer import Detokenizer, TextParams
from tests.support.tokenizer import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()


def feed(text: str, chunks: list[int], params: TextParams) -> tuple[list[str], Detokenizer]:
    """Push a text's tokens in chunks of the given sizes, the rest at once."""
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
def test_pieces_add_up_to_the_text(text: str, chunks: list[int]) -> None:
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
    got = "".join(out)
    if not ends:
        assert got == text
        assert detokenizer.matched is None
        return
    # The one that is complete first wins; of those that end together, the longest, as it began first.
    end = min(ends)[0]
    stop = max((stop for at, stop in ends if at == end), key=len)
    assert detokenizer.matched == stop
    assert got == text[: end if include else end - len(stop)]
    assert detokenizer.tokens_used == len(TOKENIZER.encode(text[:end]).ids)


def test_nothing_that_may_begin_a_stop_string_is_given_out() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], TextParams(stop=("STOP",)))
    ids = TOKENIZER.encode("a ST no STO").ids
    given = [detokenizer.push([token]) for token in ids]
    assert given == ["a", " ", "", "", "ST ", "n", "o", " ", "", "", ""]
    assert detokenizer.push([], last=True) == "STO"


def test_stop_strings_within_min_tokens_do_not_count() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], TextParams(stop=("b",), min_tokens=3))
    assert detokenizer.push(TOKENIZER.encode("ab ab").ids) == "ab a"
    assert detokenizer.matched == "b"


def test_characters_of_several_tokens_come_whole() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], TextParams())
    ids = TOKENIZER.encode("\u20ac").ids
    assert [detokenizer.push([token]) for token in ids] == ["", "", "\u20ac"]


def test_special_tokens_show_only_if_wanted() -> None:
    ids = [*TOKENIZER.encode("hi").ids, EOS]
    assert Detokenizer(TOKENIZER, [], TextParams()).push(ids, last=True) == "hi"
    shown = Detokenizer(TOKENIZER, [], TextParams(skip_special_tokens=False))
    assert shown.push(ids, last=True) == "hi<|im_end|>"


def test_what_a_prompt_ends_in_does_not_come_again() -> None:
    for end in ("hello \ufffd", "\ufffd\ufffd"):
        detokenizer = Detokenizer(TOKENIZER, TOKENIZER.encode(end).ids, TextParams())
        given = [detokenizer.push([token]) for token in TOKENIZER.encode("xyz").ids]
        assert given == ["x", "y", "z"]


def test_a_character_that_the_prompt_began_is_completed() -> None:
    ids = TOKENIZER.encode("to \u20ac!").ids
    for end in range(4, 6):
        detokenizer = Detokenizer(TOKENIZER, ids[:end], TextParams())
        assert "".join(detokenizer.push([token]) for token in ids[end:]) == "\u20ac!"


def test_broken_bytes_at_the_end_are_given_out() -> None:
    euro = TOKENIZER.encode("\u20ac").ids
    for ids, text in ((TOKENIZER.encode("a\ufffd").ids, "a\ufffd"), (euro[:2], "\ufffd")):
        assert Detokenizer(TOKENIZER, [], TextParams()).push(ids, last=True) == text
        shown = Detokenizer(TOKENIZER, [], TextParams(stop=("never",)))
        assert shown.push(ids) + shown.push([], last=True) == text


def test_broken_bytes_are_not_held_without_bound() -> None:
    begun = TOKENIZER.encode("\u20ac").ids[0]
    detokenizer = Detokenizer(TOKENIZER, TOKENIZER.encode("so ").ids, TextParams())
    given = [detokenizer.push([begun]) for _ in range(1000)]
    held = 1000 - len("".join(given))
    assert held < 50
    rest = detokenizer.push(TOKENIZER.encode("end").ids, last=True)
    assert "".join(given) + rest == "\ufffd" * 1000 + "end"


def test_special_tokens_without_number_leave_the_text_alone() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], TextParams())
    text = [detokenizer.push([token]) for token in [*TOKENIZER.encode("a\u20ac").ids, *[EOS] * 500, 65]]
    assert "".join(text) == TOKENIZER.decode([*TOKENIZER.encode("a\u20ac").ids, 65])
