"""Real weights in 8 and 4 bits: what they cost. The whole tables: benchmarks.bits and `quire bench accuracy`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.bits import FORMATS, embedded, heard, sentences, similarity
from benchmarks.texts import write_texts
from tests.support.process import serving as running
from tests.support.real import real_files

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

_CHARACTERS = 3000  # of each text: standard errors are below half a percent with 8 bits, and below one with 4


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_perplexity(name: str, tmp_path: Path) -> None:
    model = str(real_files(name))
    most = {"--quantization int8": 0.5, "--quantization int4": 3.0, "--kv-cache-dtype int8": 0.3}
    compare(tmp_path, model, {f"{model} {flags}": percent for flags, percent in most.items()})


@pytest.mark.parametrize("name", ["smollm2.gguf", "gemma3.gguf"])
def test_inputs_that_are_rounded(name: str, tmp_path: Path) -> None:
    """Beside weights of a checkpoint."""
    model = str(real_files(name))
    compare(tmp_path, f"{model} --activation-quantization none", {model: 0.5})


def compare(folder: Path, baseline: str, most: Mapping[str, float]) -> None:
    """Check that the perplexity of runs is above that of the first by a percentage, but for two standard errors."""
    texts = [str(path) for path in write_texts(folder, _CHARACTERS)]
    runs = [argument for run in (baseline, *most) for argument in ("--run", run)]
    result = folder / "result.json"
    command = [sys.executable, "-m", "quire", "bench", "accuracy", *texts, *runs, "--result", str(result)]
    subprocess.run(command, check=True)
    for row, (run, percent) in zip(json.loads(result.read_text())["runs"][1:], most.items(), strict=True):
        assert row["difference_percent"] - 2 * row["standard_error_percent"] < percent, run


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
