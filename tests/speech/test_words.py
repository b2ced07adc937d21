"""Words: dynamic time warping is that of transformers, and tokens become words with their punctuation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from quire.rendering.tokenizer import Tokenizer
from quire.speech.segments import SegmentSpan, spans_of, within_segments
from quire.speech.tokens import TranscriptionTokens
from quire.speech.words import WordTokens, starts_of_tokens, words_of
from tests.support.speech import END, SPEECH, VOCAB, at, text, write_speech_tokenizer


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TranscriptionTokens:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_speech_tokenizer(folder)
    return TranscriptionTokens(SPEECH, Tokenizer.load(folder), VOCAB)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (2, 3), (7, 40), (40, 7), (60, 300)])
def test_the_path_is_that_of_transformers(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(shape[0])
    for levels in (2, 1000):  # with ties, and without
        alignment = random.integers(0, levels, shape).astype(np.float32)
        rows, columns = _dynamic_time_warping(-alignment.astype(np.float64))
        expected = columns[np.diff(rows, prepend=-1) > 0]
        assert starts_of_tokens(alignment).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("spoken", "language", "expected"),
    [
        (" Hello, world!", "en", [" Hello,", " world!"]),
        (' He said: "Yes (maybe)."', "en", [" He", " said:", ' "Yes', ' (maybe)."']),
        (" it's 5.5 km", "en", [" it's", " 5.5", " km"]),
        ("Grüße, Jürgen", "de", ["Grüße,", " Jürgen"]),
        ("今日は。「はい」", "ja", ["今", "日", "は。", "「は", "い」"]),
        ("", "en", []),
    ],
)
def test_words_have_their_punctuation(
    tokens: TranscriptionTokens, spoken: str, language: str, expected: list[str]
) -> None:
    token_ids = text(spoken)
    words = words_of(token_ids, tokens, language)
    assert [word.text for word in words] == expected
    assert [index for word in words for index in range(word.first, word.last)] == list(range(len(token_ids)))


def test_punctuation_takes_no_time(tokens: TranscriptionTokens) -> None:
    first, second = words_of(text(" so,, yes"), tokens, "en")
    assert (first.last, first.spoken) == (5, 3)
    assert (second.first, second.spoken) == (5, 9)


def test_an_incomplete_character_is_a_word_of_its_own(tokens: TranscriptionTokens) -> None:
    token_ids = text("é")[:1]
    (word,) = words_of(token_ids, tokens, "en")
    assert (word.first, word.last) == (0, 1)


def test_pauses_around_a_segment_are_not_part_of_its_words() -> None:
    words = [
        WordTokens("a", 0, 1, 1, 0.0, 1.0),
        WordTokens("b", 1, 2, 2, 1.0, 9.0),
        WordTokens("c", 2, 3, 3, 9.0, 10.0),
    ]
    within_segments(words, [SegmentSpan(0.5, 2.0, 0, 2, ()), SegmentSpan(8.0, 9.5, 2, 3, ())])
    assert [(word.start, word.end) for word in words] == [(0.5, 1.0), (1.0, 2.0), (9.0, 9.5)]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([at(0.0), 65, at(1.0), at(1.5), 66, at(2.0), END], [(0.0, 1.0, (0, 1)), (1.5, 2.0, (1, 2))]),
        ([at(0.0), 65, at(1.0), 66, at(2.0), END], [(0.0, 1.0, (0, 1)), (1.0, 2.0, (1, 2))]),
        ([65, 66, END], [(0.0, 5.0, (0, 2))]),  # without timestamps
        ([at(1.0), 65, 66, END], [(1.0, 5.0, (0, 2))]),  # without the last one
        ([at(1.0), 65, at(29.0), END], [(1.0, 5.0, (0, 1))]),  # behind the end of the audio
        ([at(2.0), 65, at(1.0), END], [(2.0, 2.0, (0, 1))]),  # backwards
        ([at(0.0), at(1.0), END], []),
        ([END], []),
    ],
)
def test_segments_are_the_text_between_timestamps(
    tokens: TranscriptionTokens, output: list[int], expected: list[tuple[float, float, tuple[int, int]]]
) -> None:
    spans = spans_of(output, tokens, 5.0)
    assert [(round(span.start, 2), round(span.end, 2), (span.first, span.last)) for span in spans] == expected
