"""Evaluates quire-nano-embed on held-out searches: ``python -m training.embedder.evaluate``."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from training.embedder.heldout import KINDS, Search, search
from training.embedder.retrievers import Bm25, Folder, Retriever
from training.embedder.run import EXPORT

SEED = 7
COUNT = 200
OWN = "quire-nano-embed"


def ranks(scores: torch.Tensor, right: list[int]) -> list[int]:
    """Return the rank of the right candidate for each query, from 1; of equal scores the first counts."""
    places = []
    for row, at in zip(scores, right, strict=True):
        ahead = (row > row[at]).sum() + (row[:at] == row[at]).sum()
        places.append(int(ahead) + 1)
    return places


def measure(retriever: Retriever, searched: Search) -> dict[str, float]:
    """Return recall@1 and recall@10 in percent."""
    started = time.monotonic()
    places = ranks(retriever.scores(searched.queries, searched.candidates), searched.right)
    return {f"recall@{top}": round(100 * sum(rank <= top for rank in places) / len(places), 1) for top in (1, 10)} | {
        "seconds": round(time.monotonic() - started, 2)
    }


def table(results: dict[str, dict[str, Any]], names: list[str]) -> str:
    """Format recall@1 / recall@10 as a text table, with the mean over the kinds."""
    lines = [f"{'kind':<18}{'queries':>8}{'texts':>7}" + "".join(f"{name:>22}" for name in names)]
    for kind, result in results.items():
        cells = "".join(f"{result[name]['recall@1']:>15} /{result[name]['recall@10']:>5}" for name in names)
        lines.append(f"{kind:<18}{result['queries']:>8}{result['candidates']:>7}{cells}")
    means = "".join(f"{mean(results, name, 1):>15} /{mean(results, name, 10):>5}" for name in names)
    return "\n".join([*lines, f"{'mean':<33}{means}"])


def mean(results: dict[str, dict[str, Any]], name: str, top: int) -> float:
    """Return the mean recall over all kinds."""
    recalls: list[float] = [result[name][f"recall@{top}"] for result in results.values()]
    return round(sum(recalls) / len(recalls), 1)


def main(arguments: list[str] | None = None) -> None:
    """Run the evaluation."""
    parser = argparse.ArgumentParser(prog="python -m training.embedder.evaluate", description=__doc__)
    parser.add_argument("--folder", type=Path, default=EXPORT, help="model folder to run with transformers")
    parser.add_argument("--beside", nargs="*", default=[], metavar="NAME=FOLDER", help="other models with mean pooling")
    parser.add_argument(
        "--dimensions", nargs="*", type=int, default=[], help="also measure these numbers of dimensions"
    )
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--count", type=int, default=COUNT, help="searches per kind, where there are as many")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: the default of torch")
    parser.add_argument("--wrong", type=int, default=0, help="print this many wrong answers per kind")
    parser.add_argument("--json", type=Path, help="output file for the results")
    chosen = parser.parse_args(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    retrievers: dict[str, Retriever] = {OWN: Folder(chosen.folder)}
    retrievers |= {f"{size} dimensions": Folder(chosen.folder, size) for size in chosen.dimensions}
    retrievers["BM25"] = Bm25()
    retrievers |= {text.partition("=")[0]: Folder(Path(text.partition("=")[2])) for text in chosen.beside}
    results: dict[str, dict[str, Any]] = {}
    for kind in chosen.kinds:
        searched = search(kind, chosen.count, chosen.seed)
        results[kind] = {"queries": len(searched.queries), "candidates": len(searched.candidates)}
        results[kind] |= {name: measure(retriever, searched) for name, retriever in retrievers.items()}
        _show_wrong(retrievers[OWN], searched, chosen.wrong)
    print(table(results, list(retrievers)))
    if chosen.json:
        written = {"seed": chosen.seed, "kinds": results}
        written["mean"] = {name: {f"recall@{top}": mean(results, name, top) for top in (1, 10)} for name in retrievers}
        chosen.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _show_wrong(retriever: Retriever, searched: Search, count: int) -> None:
    if not count:
        return
    best = retriever.scores(searched.queries, searched.candidates).argmax(-1).tolist()
    wrong = [at for at, place in enumerate(best) if place != searched.right[at]]
    for at in wrong[:count]:
        print(repr(searched.queries[at]))
        print(f"  found {searched.candidates[best[at]]!r}")
        print(f"  right {searched.candidates[searched.right[at]]!r}")


if __name__ == "__main__":
    main()
