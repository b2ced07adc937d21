"""What 8 and 4 bits cost models that do not write text: whisper's word errors, an embedder's similarities.

    python -m benchmarks.bits --whisper FOLDER --speech FOLDER --embedder FOLDER --out benchmarks/results/FILE.json

Whisper transcribes recordings that are joined to two files, without pauses and with pauses of up to 8 s. The embedder
embeds the sentences of the prose in `benchmarks.texts`. Similarities are cosines of each embedding with that of 16 bits.
The neighbour of a sentence is the closest other one.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from benchmarks.texts import english_texts
from benchmarks.transcripts.client import post, serving
from benchmarks.transcripts.recordings import join, read_recordings
from benchmarks.transcripts.scores import word_errors

FORMATS: Mapping[int, tuple[str, ...]] = {16: (), 8: ("--quantization", "int8"), 4: ("--quantization", "int4")}
_PAUSES = {"none": (0.0,), "mixed": (0.0, 8.0, 1.0, 5.0, 2.0, 3.0, 0.5)}
_SECONDS = 120.0  # of audio in a file
_PATIENCE = 300


def sentences() -> list[str]:
    """Those of the benchmark's prose."""
    text = " ".join(english_texts()["prose"].split())
    return [sentence for sentence in re.split(r"(?<=[.?!]) ", text) if len(sentence) > 20]


def heard(url: str, speech: Path) -> dict[str, Any]:
    """Count a server's errors in recorded words."""
    wrong = said = 0
    for pauses in _PAUSES.values():
        joined = join(read_recordings(speech), pauses, _SECONDS, lead=max(pauses))
        errors, words = word_errors(joined.sentences, post(url, joined.wav, "json").text)
        wrong, said = wrong + errors, said + words
    return {"word_errors": wrong, "words": said, "percent": round(100 * wrong / said, 2)}


def embedded(url: str, texts: Sequence[str]) -> NDArray[np.float64]:
    """The embeddings of texts, of length 1: (texts, size)."""
    body = {"model": "model", "input": list(texts)}
    answer = httpx.post(f"{url}/v1/embeddings", json=body, timeout=_PATIENCE).raise_for_status().json()
    vectors = np.array([entry["embedding"] for entry in answer["data"]])
    lengths: NDArray[np.float64] = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / lengths


def similarity(vectors: NDArray[np.float64], exact: NDArray[np.float64]) -> dict[str, Any]:
    """How close embeddings are to exact ones, and to the same neighbours."""
    cosines = (vectors * exact).sum(1)
    same = _neighbours(vectors) == _neighbours(exact)
    return {
        "cosine": round(float(cosines.mean()), 5),
        "least_cosine": round(float(cosines.min()), 5),
        "same_neighbour_percent": round(100 * float(same.mean()), 1),
        "texts": len(vectors),
    }


def _neighbours(vectors: NDArray[np.float64]) -> NDArray[np.int64]:
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -1)
    closest: NDArray[np.int64] = cosines.argmax(1)
    return closest


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure each model in each format."""
    texts = sentences()
    exact: NDArray[np.float64] | None = None
    for bits, flags in FORMATS.items():
        common = ("--dtype", "bfloat16", "--served-model-name", "model", *flags)
        if options.whisper:
            with serving(str(options.whisper), *common) as url:
                yield {"model": options.whisper.name, "bits": bits, **heard(url, options.speech)}
        if options.embedder:
            with serving(str(options.embedder), *common) as url:
                vectors = embedded(url, texts)
            exact = vectors if exact is None else exact
            yield {"model": options.embedder.name, "bits": bits, **similarity(vectors, exact)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print a line for each model and format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whisper", type=Path, help="a folder of whisper")
    parser.add_argument("--speech", type=Path, help="recordings and transcripts.json")
    parser.add_argument("--embedder", type=Path, help="a folder of an embedder")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    measured = []
    for row in rows(options):
        print(row, flush=True)
        measured.append(row)
    if options.out:
        report = {"date": date.today().isoformat(), "rows": measured}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
