"""Real weights in 8 and 4 bits: what they cost. The whole tables: benchmarks.bits and benchmarks.perplexity."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.bits import FORMATS, embedded, heard, sentences, similarity
from benchmarks.perplexity import default_texts, difference, serving
from tests.support.process import serving as running
from tests.support.real import real_files

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

_TOKENS = 700  # of each text: standard errors are below half a percent with 8 bits, and below one with 4


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_perplexity(name: str) -> None:
    folder = str(real_files(name))
    exact = _log_probabilities(folder)
    for flags, most in (
        (("--quantization", "int8"), 2.0),
        (("--quantization", "int4"), 5.0),
        (("--kv-cache-dtype", "int8"), 2.0),
    ):
        percent, error = difference(_log_probabilities(folder, *flags), exact)
        assert percent - 2 * error < most, flags


def _log_probabilities(*arguments: str) -> Sequence[float]:
    with serving(arguments) as server:
        return [value for text in default_texts().values() for value in server.log_probabilities(text, _TOKENS)]


@pytest.mark.parametrize("bits", FORMATS)
def test_words_that_whisper_hears(bits: int) -> None:
    with running(str(real_files("whisper-base")), "--dtype", "bfloat16", *FORMATS[bits]) as server:
        assert heard(server.url, real_files("speech"))["percent"] < 5


def test_similarities_of_an_embedder() -> None:
    vectors = {}
    for bits, flags in FORMATS.items():
        options = ("--dtype", "bfloat16", "--served-model-name", "model", *flags)
        with running(str(real_files("minilm")), *options) as server:
            vectors[bits] = embedded(server.url, sentences())
    for bits, cosine, agreement in ((8, 0.995, 90), (4, 0.98, 80)):
        scores = similarity(vectors[bits], vectors[16])
        assert scores["least_cosine"] > cosine, bits
        assert scores["same_neighbour_percent"] > agreement, bits
