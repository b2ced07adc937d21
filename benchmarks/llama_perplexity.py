"""The perplexity of GGUF files at Quire and at llama.cpp, of the same tokens behind the same ones.

    python -m benchmarks.llama_perplexity FILE.gguf ... --llama PATH/llama-perplexity --out benchmarks/results/FILE.json

The texts of `benchmarks.texts` are joined and cut into whole windows, of which the second half counts, as
llama-perplexity does. A token that the tokenizer puts in front of texts replaces the first one of each window.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import httpx

from benchmarks.texts import english_texts
from benchmarks.transcripts.client import serving

_WINDOW = 1024
_PATIENCE = 900.0  # seconds
_RESULT = re.compile(r"Final estimate: PPL = ([\d.]+)")


def of_llama(program: Path, model: Path, text: str) -> float:
    """Return the perplexity that llama-perplexity gives."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        command = [str(program), "-m", str(model), "-f", file.name, "-c", str(_WINDOW), "-b", str(_WINDOW), "-t", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    match = _RESULT.search(done.stdout + done.stderr)
    assert match is not None, done.stderr
    return float(match[1])


class Quire:
    """A server of a model."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=_PATIENCE)

    def post(self, path: str, **body: Any) -> Any:
        """Return the answer to a request."""
        return self._client.post(path, json={"model": "model", **body}).raise_for_status().json()

    def tokens(self, text: str) -> list[int]:
        """Return the ids of a text's tokens."""
        ids: list[int] = self.post("/tokenize", prompt=text)["tokens"]
        return ids

    def log_probabilities(self, window: Sequence[int]) -> list[float]:
        """Return the log probability of each token of the second half of a window, but for its first one."""
        answer = self.post("/v1/completions", prompt=window, max_tokens=1, temperature=0, prompt_logprobs=0)
        entries = answer["choices"][0]["prompt_logprobs"]
        positions = range(len(window) // 2 + 1, len(window))
        return [entries[position][str(window[position])]["logprob"] for position in positions]


def of_quire(model: Path, text: str) -> tuple[float, int]:
    """Return the perplexity at a server, and how many tokens count."""
    with serving(str(model), "--served-model-name", "model", "--no-enable-prefix-caching") as url:
        server = Quire(url)
        first = next(iter(server.tokens("")), None)
        ids, logprobs = server.tokens(text), list[float]()
        for begin in range(0, len(ids) - _WINDOW + 1, _WINDOW):
            window = ids[begin : begin + _WINDOW]
            logprobs += server.log_probabilities(window if first is None else [first, *window[1:]])
    return math.exp(-sum(logprobs) / len(logprobs)), len(logprobs)


def main() -> None:
    """Print and save the perplexities of each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--llama", required=True, type=Path, help="the program llama-perplexity")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    text, rows = "\n".join(english_texts().values()), list[dict[str, Any]]()
    for model in arguments.models:
        llama = of_llama(arguments.llama, model, text)
        quire, count = of_quire(model, text)
        difference = round(100 * (quire / llama - 1), 2)
        rows.append(
            {"model": model.name, "tokens": count, "llama": llama, "quire": round(quire, 4), "percent": difference}
        )
        print(rows[-1])
    if arguments.out is not None:
        facts = {"date": date.today().isoformat(), "window": _WINDOW, "rows": rows}
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
