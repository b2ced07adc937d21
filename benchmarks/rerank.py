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
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import httpx

from benchmarks.embeddings import make_texts, model_folder, quire

Answer = tuple[float, dict[int, float], int]  # seconds, scores by document, tokens
Row = dict[str, Any]
_TOLERANCE = 0.02  # of scores in bfloat16


def rerank(client: httpx.Client, query: str, documents: list[str]) -> Answer:
    """One request."""
    started = time.perf_counter()
    answer = client.post("/rerank", json={"query": query, "documents": documents, "return_documents": False})
    seconds = time.perf_counter() - started
    answer.raise_for_status()
    body = answer.json()
    return (
        seconds,
        {result["index"]: result["relevance_score"] for result in body["results"]},
        body["usage"]["total_tokens"],
    )


def row(
    args: argparse.Namespace, clients: Mapping[str, httpx.Client], words: Callable[[int], str], lengths: str
) -> Row:
    """Both servers get the same requests in turns. Their scores must agree."""
    query_words, _, document_words = lengths.partition(":")
    answers: dict[str, list[Answer]] = {name: [] for name in clients}
    for _ in range(args.repeats):
        query, documents = words(int(query_words)), [words(int(document_words)) for _ in range(args.documents)]
        for name, client in clients.items():
            answers[name].append(rerank(client, query, documents))
    pairs = list(zip(answers["cached"], answers["plain"], strict=True))
    difference = max(abs(first[1][index] - second[1][index]) for first, second in pairs for index in first[1])
    if difference > _TOLERANCE:
        sys.exit(f"scores differ by {difference}")
    return {
        "query_words": int(query_words),
        "document_words": int(document_words),
        "tokens_per_pair": pairs[0][0][2] / args.documents,
        **{
            f"seconds_{name}": [round(seconds, 3) for seconds, *_ in answers_of] for name, answers_of in answers.items()
        },
        "ratio": round(statistics.median(second[0] / first[0] for first, second in pairs), 2),
        "largest_difference_of_scores": difference,
    }


def main() -> None:
    """Run the benchmark and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", default=["8:16", "8:32", "32:32"], help="words of query:document")
    parser.add_argument("--tokens", nargs=2, default=["no", "yes"], help="tokens whose logits are compared")
    parser.add_argument("--kv-cache-memory-bytes", default="2GiB")
    parser.add_argument("--json", type=Path, help="output file")
    args = parser.parse_args()
    rng, vocabulary = random.Random(3), make_texts(model_folder(), 200)
    chosen = [word for text in vocabulary for word in text.split()]
    overrides = json.dumps({"classifier_from_token": args.tokens})
    common = (
        "--convert",
        "classify",
        "--hf-overrides",
        overrides,
        "--kv-cache-memory-bytes",
        args.kv_cache_memory_bytes,
    )
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(quire(sys.executable, port, args.model, *common, caching))
            for name, port, caching in (
                ("cached", 8377, "--enable-prefix-caching"),
                ("plain", 8378, "--no-enable-prefix-caching"),
            )
        }
        for client in clients.values():
            rerank(client, "warm", ["up"] * 4)
        rows = []
        for lengths in args.lengths:
            rows.append(row(args, clients, lambda count: " ".join(rng.choices(chosen, k=count)), lengths))
            print(rows[-1], flush=True)
    report = {"date": date.today().isoformat(), "model": args.model.name, "documents": args.documents, "rows": rows}
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
