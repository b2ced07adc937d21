"""Rerank of many documents by a causal reranker, with and without prefix caching: ``python -m benchmarks.rerank``.

The prompts of a request begin with the same instruction and query, which prefix caching computes once. Each request has
a query of its own, so that it finds no prefix of an earlier one but the instruction. MODEL is the directory of a causal
language model; the score is the difference of two tokens' logits (--convert classify).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import httpx

from benchmarks.embeddings import quire

Answer = tuple[float, dict[int, float], int]  # seconds, scores by document, tokens
_TOLERANCE = 0.02  # of scores in bfloat16


def words(rng: random.Random, count: int) -> str:
    """Random words of lower-case letters."""
    return " ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(count))


def rerank(client: httpx.Client, query: str, documents: list[str]) -> Answer:
    """One request."""
    started = time.perf_counter()
    answer = client.post("/rerank", json={"query": query, "documents": documents, "return_documents": False})
    seconds = time.perf_counter() - started
    answer.raise_for_status()
    body = answer.json()
    return seconds, {one["index"]: one["relevance_score"] for one in body["results"]}, body["usage"]["total_tokens"]


def measure(args: argparse.Namespace, lengths: tuple[int, int], *options: str) -> list[Answer]:
    """Some requests to a server with these options; the first of them is not counted."""
    chosen = ("--convert", "classify", "--hf-overrides", json.dumps({"classifier_from_token": args.tokens}))
    rng = random.Random(sum(lengths))
    with quire(sys.executable, 8377, args.model, *chosen, *options) as client:
        rerank(client, words(rng, 4), [words(rng, 4)])
        requests = []
        for _ in range(args.repeats):
            query = words(rng, lengths[0])
            requests.append(rerank(client, query, [words(rng, lengths[1]) for _ in range(args.documents)]))
        return requests


def row(args: argparse.Namespace, lengths: tuple[int, int]) -> dict[str, Any]:
    """Both servers on the same requests. Their scores must agree."""
    cached, plain = measure(args, lengths), measure(args, lengths, "--no-prefix-caching")
    differences = [
        abs(score - other[1][index])
        for one, other in zip(cached, plain, strict=True)
        for index, score in one[1].items()
    ]
    if max(differences) > _TOLERANCE:
        sys.exit(f"scores differ by {max(differences)}")
    seconds = {name: [one[0] for one in found] for name, found in (("cached", cached), ("plain", plain))}
    return {
        "query_words": lengths[0],
        "document_words": lengths[1],
        "tokens_per_pair": cached[0][2] / args.documents,
        **{f"seconds_{name}": [round(value, 3) for value in values] for name, values in seconds.items()},
        "ratio": round(statistics.median(seconds["plain"]) / statistics.median(seconds["cached"]), 2),
        "largest_difference_of_scores": max(differences),
    }


def main() -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", default=["12:32", "12:64", "48:64"], help="words of query:document")
    parser.add_argument("--tokens", nargs=2, default=["no", "yes"], help="tokens whose logits are compared")
    parser.add_argument("--json", type=Path, help="output file")
    args = parser.parse_args()
    rows = []
    for entry in args.lengths:
        query, _, document = entry.partition(":")
        rows.append(row(args, (int(query), int(document))))
        print(rows[-1], flush=True)
    report = {"date": date.today().isoformat(), "model": args.model.name, "documents": args.documents, "rows": rows}
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
