"""Quality of quantized weights and int8 pages: quire-nano's tasks and perplexity by data type.

    python -m benchmarks.quantization --out benchmarks/results/FILE.json

Answers come from `quire serve` with the bundled model. Perplexity is that of the right answers to held-out requests.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import httpx
from tokenizers import Tokenizer

from training.answering import ServerAnswerer
from training.chat import Encoded, encode
from training.evaluate import SEED, TARGETS, measure
from training.generators.arithmetic import arithmetic_turn
from training.generators.extract import extract_turn
from training.generators.knowledge import fallback_turn, quire_turn
from training.generators.turn import Conversation
from training.heldout import SPLIT, VALUES
from training.run import EXPORT

FORMATS = {
    "float32": ["--dtype", "float32"],
    "bfloat16": [],
    "int8": ["--quantization", "int8"],
    "int4": ["--quantization", "int4"],
    "bfloat16, int8 pages": ["--kv-cache-dtype", "int8"],
    "int8, int8 pages": ["--quantization", "int8", "--kv-cache-dtype", "int8"],
}
_ADDRESS = re.compile(r"at (http://\S+)")


@contextmanager
def serving(flags: Sequence[str]) -> Iterator[str]:
    """Start a server with the bundled model and yield its base URL."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(match[1] for line in process.stderr if (match := _ADDRESS.search(line)))
            yield f"{url}/v1"
        finally:
            process.terminate()
            process.communicate()


def right_answers(count: int) -> list[Encoded]:
    """Return conversations of one held-out request and its right answer, as tokens."""
    tokenizer = Tokenizer.from_file(str(EXPORT / "tokenizer.json"))
    rng = Random(SEED)
    makers = (
        lambda: arithmetic_turn(rng, SPLIT),
        lambda: quire_turn(rng, SPLIT),
        lambda: extract_turn(rng, VALUES, SPLIT),
        lambda: fallback_turn(rng, SPLIT),
    )
    encoded = []
    for number in range(count):
        turn = makers[number % len(makers)]()
        conversation = Conversation(turn.kind, think=turn.think)
        conversation.add(turn.messages(), trained=True)
        encoded.append(encode(conversation, tokenizer))
    return encoded


def perplexity(url: str, answers: Sequence[Encoded]) -> float:
    """Return the perplexity of the answers' tokens."""
    total, tokens = 0.0, 0
    with httpx.Client(base_url=url, timeout=60) as client:
        for answer in answers:
            body = {"model": "quire-nano", "prompt": answer.ids, "max_tokens": 1, "prompt_logprobs": 0}
            response = client.post("/completions", json=body).raise_for_status().json()
            reported = response["choices"][0]["prompt_logprobs"]
            for token, loss_mask, entry in zip(answer.ids, answer.loss_mask, reported, strict=True):
                if loss_mask and entry:
                    total -= entry[str(token)]["logprob"]
                    tokens += 1
    return math.exp(total / tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="prompts per kind")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    answers = right_answers(2 * options.count)
    rows: list[dict[str, Any]] = []
    for name, flags in FORMATS.items():
        with serving(flags) as url:
            answerer = ServerAnswerer(url, "quire-nano")
            row = {kind: measure(answerer, kind, options.count, SEED, 0)["percent"] for kind in TARGETS}
            rows.append({"format": name, "perplexity": round(perplexity(url, answers), 4), **row})
            print(rows[-1], flush=True)
    if options.out:
        report = {"date": date.today().isoformat(), "model": "quire-nano", "prompts": options.count, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
