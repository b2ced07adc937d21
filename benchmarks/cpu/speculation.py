"""Tokens a second of one stream with and without n-gram speculation, in alternation.

quire-nano extracts names, ages and cities from texts.

python -m benchmarks.cpu.speculation --out benchmarks/results/FILE.json
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

from benchmarks.quantization import serving
from training.generators.extract import extract_turn
from training.generators.turn import Turn
from training.heldout import SPLIT, VALUES

ROUNDS = 3
KINDS = {"plain": [], "ngram": ["--speculative-method", "ngram"]}


def answers(url: str, turns: Sequence[Turn]) -> tuple[list[str], float]:
    """Return the answers, and tokens a second."""
    texts, tokens, seconds = [], 0, 0.0
    with httpx.Client(base_url=url, timeout=60) as client:
        for turn in turns:
            asked = [message for message in turn.messages() if message["role"] in ("system", "user")]
            started = time.perf_counter()
            body = {"messages": asked, "temperature": 0}
            answer = client.post("/chat/completions", json=body).raise_for_status().json()
            seconds += time.perf_counter() - started
            tokens += answer["usage"]["completion_tokens"]
            texts.append(answer["choices"][0]["message"]["content"])
    return texts, tokens / seconds


def draft_token_counts(url: str) -> dict[str, float]:
    """Return the numbers of draft and accepted tokens so far."""
    page = httpx.get(url.removesuffix("/v1") + "/metrics").text
    counts = re.findall(r"^quire:spec_decode_num_(draft|accepted)_tokens_total\S* (\S+)", page, re.MULTILINE)
    return {name: float(value) for name, value in counts}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="questions per round")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    rng = Random(0)
    turns = [extract_turn(rng, VALUES, SPLIT) for _ in range(options.count)]
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    texts_by_kind: dict[str, list[str]] = {}
    counts: dict[str, float] = {}
    for _ in range(ROUNDS):
        for kind, flags in KINDS.items():
            with serving([*flags, "--no-enable-prefix-caching"]) as url:
                answers(url, turns[:4])
                texts_by_kind[kind], rate = answers(url, turns)
                rates[kind].append(rate)
                counts = draft_token_counts(url) or counts
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "model": "quire-nano",
        "questions": options.count,
        "same_answers": texts_by_kind["plain"] == texts_by_kind["ngram"],
        **{f"{kind}_tokens_per_s": round(median(rate), 1) for kind, rate in rates.items()},
        "ratio": round(median(rates["ngram"]) / median(rates["plain"]), 3),
        "tokens": counts,
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
