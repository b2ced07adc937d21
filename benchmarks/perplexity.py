"""Perplexity of texts under one model in several formats, as it is served.

    python -m benchmarks.perplexity --run "FOLDER" --run "FOLDER --quantization int8" --run "FILE.gguf"

Each run is the arguments of one `quire serve`. The first tokens of each text are one prompt, whose log probabilities
the server returns. Differences to the first run are in percent, with their standard error: both runs see the same
tokens, so that it is that of a mean of differences. Bits are those of all weights in memory for each weight of the
first folder.

Without other texts there are three: prose of benchmarks/texts, chapters of the Python reference (pydoc_data, which
comes with Python), and two documents of decisions.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
from safetensors import safe_open

_ADDRESS = re.compile(r"at (http://\S+)")
_WEIGHTS = re.compile(r"weights[ =:]+([\d.]+) (MiB|GiB)")
_SECONDS = 600
_NAME = "model"
_ROOT = Path(__file__).parent.parent
_DECISIONS = ("006-training-quire-nano.md", "043-parallelism.md")
_CHAPTERS = ("objects", "execmodel", "types")


class Server:
    """A server that runs.

    Attributes:
        client: of its HTTP API.
        weight_bytes: as it says at its start; None if it does not.
    """

    def __init__(self, lines: Iterator[str]) -> None:
        """`lines`: of its log."""
        self.weight_bytes: float | None = None
        for line in lines:
            if match := _WEIGHTS.search(line):
                self.weight_bytes = float(match[1]) * (1 << (20 if match[2] == "MiB" else 30))
            if match := _ADDRESS.search(line):
                self.client = httpx.Client(base_url=match[1], timeout=_SECONDS)
                return
        raise RuntimeError("the server did not start")

    def log_probabilities(self, text: str, most_tokens: int) -> list[float]:
        """Those of the first tokens of a text, without that of the first."""
        tokens = self._post("/tokenize", {"model": _NAME, "prompt": text})["tokens"][:most_tokens]
        body = {"model": _NAME, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
        (choice,) = self._post("/v1/completions", body)["choices"]
        pairs = list(zip(tokens, choice["prompt_logprobs"], strict=True))[1:]
        return [entry[str(token)]["logprob"] for token, entry in pairs]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.post(path, json=body).raise_for_status().json()
        return answer


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator[Server]:
    """Start a server, and end it."""
    command = [sys.executable, "-m", "quire", "serve", *arguments, "--port", "0", "--served-model-name", _NAME]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            server = Server(process.stderr)
            with server.client:
                yield server
        finally:
            process.terminate()
            process.communicate()


def difference(run: Sequence[float], first: Sequence[float]) -> tuple[float, float]:
    """How much higher the perplexity of a run is than that of the first, and the standard error, both in percent."""
    losses = [before - after for before, after in zip(first, run, strict=True)]
    error = statistics.stdev(losses) / math.sqrt(len(losses))
    return 100 * math.expm1(statistics.fmean(losses)), 100 * error


def default_texts() -> dict[str, str]:
    """Three texts by their names."""
    return {
        "prose": (_ROOT / "benchmarks/texts/harbour.txt").read_text(encoding="utf-8"),
        "reference": "\n".join(topics[chapter] for chapter in _CHAPTERS),
        "decisions": "\n".join((_ROOT / "docs/decisions" / name).read_text(encoding="utf-8") for name in _DECISIONS),
    }


def parameters_of(folder: Path) -> int:
    """The number of weights in the safetensors files of a folder; 0 if there are none."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def main() -> None:
    """Run the benchmark and print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="*")
    parser.add_argument("--run", action="append", required=True, help="arguments of quire serve")
    parser.add_argument("--tokens", type=int, default=4000, help="of each text, at most")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    texts = {path.name: path.read_text(encoding="utf-8") for path in options.texts} or default_texts()
    parameters = parameters_of(Path(shlex.split(options.run[0])[0]))
    first: list[float] = []
    rows: list[dict[str, Any]] = []
    for run in options.run:
        with serving(shlex.split(run)) as server:
            by_text = {name: server.log_probabilities(text, options.tokens) for name, text in texts.items()}
        values = [value for some in by_text.values() for value in some]
        first = first or values
        row: dict[str, Any] = {"run": run, "perplexity": round(_perplexity(values), 3), "tokens": len(values)}
        if len(values) == len(first):
            percent, error = difference(values, first)
            row |= {"percent": round(percent, 2), "standard_error": round(error, 2)}
        if parameters and server.weight_bytes:
            row["bits_per_weight"] = round(8 * server.weight_bytes / parameters, 2)
        rows.append(row | {"texts": {name: round(_perplexity(some), 3) for name, some in by_text.items()}})
        print(rows[-1], flush=True)
    if options.out:
        report = {"date": date.today().isoformat(), "python": sys.version.split()[0], "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _perplexity(log_probabilities: Sequence[float]) -> float:
    return math.exp(-statistics.fmean(log_probabilities))


if __name__ == "__main__":
    main()
