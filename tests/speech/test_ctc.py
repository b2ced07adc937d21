"""CTC: repetitions and blanks, words and segments."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import Wav2Vec2CTCTokenizer

from quire.speech.aligned_words import align_words, segment_words
from quire.speech.ctc import collapse
from tests.support.ctc import CHARACTERS

SPACE, SHIFT = 4, 0.02


def positions(tokens: list[int]) -> NDArray[np.float32]:
    """The array of these tokens, each less likely than the one before."""
    return np.stack([np.array(tokens), -0.125 * np.arange(len(tokens))], 1).astype(np.float32)


def spelled(text: str, *, stretch: int = 1, gap: int = 0) -> list[int]:
    """Each character, then blanks; a blank between equal neighbours at least."""
    tokens: list[int] = []
    for char in text:
        token = SPACE if char == " " else CHARACTERS.index(char)
        if tokens and tokens[-1] == token:
            tokens.append(0)
        tokens += [token] * stretch + [0] * gap
    return tokens


def contents(tokens: list[int]) -> list[bytes]:
    return [b" " if token == SPACE else CHARACTERS[token].encode() for token in tokens]


def words(tokens: list[int], seconds: float = 30.0, *, spaced: bool = True) -> list[tuple[str, float, float]]:
    placed = collapse(positions(tokens), 0)
    actual = align_words(
        placed, contents([placed_token.token for placed_token in placed]), SHIFT, seconds, spaced=spaced
    )
    return [(word.text, word.start, word.end) for word in actual]


def test_tokens_words_and_times_are_those_of_transformers(tmp_path: Path) -> None:
    """On random paths, with spaces at both ends and in rows."""
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps({text: token for token, text in enumerate(CHARACTERS)}))
    tokenizer = Wav2Vec2CTCTokenizer(str(path))
    random = np.random.default_rng(0)
    for length in range(60):
        path_tokens = np.repeat(random.choice([0, 4, 4, 5, 6, 7], length), random.integers(1, 4, length)).tolist()
        reference = tokenizer.decode(path_tokens, output_word_offsets=True)
        placed = collapse(positions(path_tokens), 0)
        text = b"".join(contents([placed_token.token for placed_token in placed])).decode()
        assert text.strip() == reference.text
        actual = words(path_tokens)
        assert [word for word, _, _ in actual] == [word["word"] for word in reference.word_offsets]
        assert [start for _, start, _ in actual] == pytest.approx(
            [word["start_offset"] * SHIFT for word in reference.word_offsets]
        )
        assert [end for _, _, end in actual] == pytest.approx(
            [word["end_offset"] * SHIFT for word in reference.word_offsets]
        )


def test_a_token_has_the_log_probability_of_its_likeliest_position() -> None:
    array = np.array([[5, -2.0], [5, -0.5], [5, -1.0], [0, -0.1], [5, -3.0]], np.float32)
    assert [(placed_token.logprob, placed_token.first, placed_token.last) for placed_token in collapse(array, 0)] == [
        (-0.5, 0, 3),
        (-3.0, 4, 5),
    ]
    assert collapse(positions([]), 0) == []
    assert collapse(positions([0, 0]), 0) == []


def test_pieces_that_begin_with_a_space_and_end_with_punctuation() -> None:
    placed = collapse(positions([1, 1, 2, 0, 3, 4, 0]), 0)
    actual = align_words(placed, [b" hel", b"lo,", b" w", b"orld"], 0.08, 30.0)
    assert [(word.text, word.first, word.last) for word in actual] == [("hello,", 0, 2), ("world", 2, 4)]


def test_a_vocabulary_without_spaces_has_a_word_for_each_token() -> None:
    assert [word[0] for word in words(spelled("ABC"), spaced=False)] == ["A", "B", "C"]
    assert [word[0] for word in words(spelled("ABC"))] == ["ABC"]


def test_bytes_of_a_character_are_one_word() -> None:
    placed = collapse(positions([1, 2, 3, 4]), 0)
    actual = align_words(placed, [b" ", "ü".encode()[:1], "ü".encode()[1:], b"!"], SHIFT, 30.0)
    assert [word.text for word in actual] == ["ü!"]


def test_no_time_exceeds_the_window() -> None:
    actual = words(spelled("AB CD", stretch=4), seconds=0.3)
    assert max(end for _, _, end in actual) == 0.3
    assert all(start <= end for _, start, end in actual)


def test_segments_end_at_pauses_and_before_they_are_too_long() -> None:
    tokens = [*spelled("HELLO THERE"), SPACE, *[0] * 40, *spelled("AGAIN")]
    placed = collapse(positions(tokens), 0)
    pieces = contents([placed_token.token for placed_token in placed])
    spans = segment_words(align_words(placed, pieces, SHIFT, 30.0), placed)
    assert [b"".join(pieces[span.first : span.last]) for span in spans] == [b"HELLO THERE", b"AGAIN"]
    assert spans[1].start - spans[0].end >= 0.8
    assert spans[0].tokens == tuple(placed_token.token for placed_token in placed[:11])

    steady = [token for _ in range(60) for token in (*spelled("WORD", gap=6), SPACE)]
    placed = collapse(positions(steady), 0)
    pieces = contents([placed_token.token for placed_token in placed])
    spans = segment_words(align_words(placed, pieces, SHIFT, 60.0), placed)
    assert len(spans) > 3
    assert all(span.end - span.start <= 7.0 for span in spans)
    assert all(span.end <= two.start for span, two in pairwise(spans))
    assert b" ".join(b"".join(pieces[span.first : span.last]) for span in spans).count(b"WORD") == 60
    assert segment_words([], []) == []
