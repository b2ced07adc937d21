"""Real weights in 8 and 4 bits: what they cost. The whole tables: benchmarks.bits and `quire bench accuracy`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bits import FORMATS, embedded, heard, sentences, similarity
from benchmarks.texts import write_texts
from quire.app import cli
from tests.support.process import serving as running
from tests.support.real import real_files

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

_CHARACTERS = 3000  # of each text: standard errors are below half a percent with 8 bits, and below one with 4


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_perplexity(name: str, tmp_path: Path) -> None:
    model = str(real_files(name))
    texts = [str(path) for path in write_texts(tmp_path, _CHARACTERS)]
    most = {"--quantization int8": 2.0, "--quantization int4": 5.0, "--kv-cache-dtype int8": 2.0}
    runs = [argument for flags in ("", *most) for argument in ("--run", f"{model} {flags}")]
    result = tmp_path / "result.json"
    assert cli.main(["bench", "accuracy", *texts, *runs, "--result", str(result)]) == 0
    for row, (flags, percent) in zip(json.loads(result.read_text())["runs"][1:], most.items(), strict=True):
        assert row["difference_percent"] - 2 * row["standard_error_percent"] < percent, flags


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
