"""Perplexity of texts under one model in several formats, as it is served.

    python -m benchmarks.perplexity TEXT... --run "FOLDER" --run "FOLDER --quantization int8" --run "FILE.gguf"

Each run is the arguments of one `quire serve`. The first tokens of each text are one prompt, whose log probabilities
the server returns. Differences to the first run are in percent.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import httpx

_ADDRESS = re.compile(r"at (http://\S+)")
_SECONDS = 600
_NAME = "model"


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator[httpx.Client]:
    """Start a server, and yield a client of it."""
    command = [sys.executable, "-m", "quire", "serve", *arguments, "--port", "0", "--served-model-name", _NAME]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(match[1] for line in process.stderr if (match := _ADDRESS.search(line)))
            with httpx.Client(base_url=url, timeout=_SECONDS) as client:
                yield client
        finally:
            process.terminate()
            process.communicate()


def perplexity(client: httpx.Client, texts: Sequence[str], most_tokens: int) -> tuple[float, int]:
    """Return the perplexity of the first tokens of all texts, and the number of tokens that it is of."""
    total, count = 0.0, 0
    for text in texts:
        tokens = _post(client, "/tokenize", {"model": _NAME, "prompt": text})["tokens"][:most_tokens]
        body = {"model": _NAME, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
        (choice,) = _post(client, "/v1/completions", body)["choices"]
        for token, entry in zip(tokens, choice["prompt_logprobs"], strict=True):
            if entry:  # the first token has none
                total -= entry[str(token)]["logprob"]
                count += 1
    return math.exp(total / count), count


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = client.post(path, json=body).raise_for_status().json()
    return answer


def main() -> None:
    """Run the benchmark and print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--run", action="append", required=True, help="arguments of quire serve")
    parser.add_argument("--tokens", type=int, default=900, help="of each text, at most")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in options.texts]
    rows: list[dict[str, Any]] = []
    for run in options.run:
        with serving(shlex.split(run)) as client:
            value, count = perplexity(client, texts, options.tokens)
        first = rows[0]["perplexity"] if rows else value
        rows.append(
            {"run": run, "perplexity": round(value, 3), "tokens": count, "percent": round(100 * (value / first - 1), 2)}
        )
        print(rows[-1], flush=True)
    if options.out:
        report = {"date": date.today().isoformat(), "texts": [path.name for path in options.texts], "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
