"""Evaluates quire-nano on held-out prompts: ``python -m training.evaluate`` (a folder) or ``--url`` (a server)."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from training.answering import Answerer, FolderAnswerer, ServerAnswerer
from training.heldout import KINDS, Case, cases
from training.run import EXPORT
from training.scoring import answer_of, is_right, parsed, right_values

SEED = 7
COUNT = 200
TARGETS = {
    "arithmetic": 95,
    "quire": 95,
    "recall": 92,
    "extract": 88,
    "tool_call": 80,
    "tool_answer": 90,
    "fallback": 95,
    "schema": 80,
}


def measure(answerer: Answerer, kind: str, count: int, seed: int, wrong: int) -> dict[str, Any]:
    """Score one kind; the result contains up to ``wrong`` wrong answers."""
    prompts = cases(kind, count, seed)
    started = time.monotonic()
    answers = answerer.answer(prompts)
    right = [is_right(kind, case.expect, text) for case, text in zip(prompts, answers, strict=True)]
    result: dict[str, Any] = {"prompts": len(prompts), "right": sum(right), "percent": _percent(right),
                              "seconds": round(time.monotonic() - started, 1)}  # fmt: skip
    if kind == "schema":
        result |= _schema_shares(prompts, answers)
    for name, part in _subsets(kind, prompts, right).items():
        result[name] = _percent(part)
    result["wrong"] = [
        {"prompt": case.messages[-1]["content"], "expect": case.expect, "answer": text}
        for case, text, is_correct in zip(prompts, answers, right, strict=True)
        if not is_correct
    ][:wrong]
    return result


def _schema_shares(prompts: list[Case], answers: list[str]) -> dict[str, float]:
    """Return the shares of valid answers, of right values, and of answers with all values right by kind of schema."""
    texts = [(case, answer_of(text)) for case, text in zip(prompts, answers, strict=True)]
    counts = [right_values(case.expect, text) for case, text in texts]
    return {
        "valid": _percent([parsed(case.expect, text) is not None for case, text in texts]),
        "values": round(100 * sum(right for right, _ in counts) / sum(count for _, count in counts), 1),
    }


def _subsets(kind: str, prompts: list[Case], right: list[bool]) -> dict[str, list[bool]]:
    """Return scores of subsets of a kind."""
    parts: dict[str, list[bool]] = {}
    for case, is_correct in zip(prompts, right, strict=True):
        if "minus" in case.expect:
            parts.setdefault("sub" if case.expect["minus"] else "add", []).append(is_correct)
        elif kind == "recall":
            parts.setdefault("untold" if case.expect.get("untold") else "told", []).append(is_correct)
        elif kind.endswith("tool_call"):
            parts.setdefault(f"{len(case.tools or [])} tools", []).append(is_correct)
    return parts


def _percent(right: list[bool]) -> float:
    return round(100 * sum(right) / max(1, len(right)), 1)


def table(results: dict[str, dict[str, Any]]) -> str:
    """Format the results as a text table."""
    lines = [f"{'kind':<24}{'right':>10}{'percent':>10}{'target':>8}  parts"]
    for kind, result in results.items():
        skipped = ("prompts", "right", "percent", "seconds", "wrong")
        parts = ", ".join(f"{name} {value}" for name, value in result.items() if name not in skipped)
        counts = f"{result['right']:>6}/{result['prompts']:<4}{result['percent']:>9}"
        lines.append(f"{kind:<24}{counts}{TARGETS.get(kind, ''):>8}  {parts}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the evaluation."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    parser.add_argument("--folder", type=Path, default=EXPORT, help="model folder to run with transformers")
    parser.add_argument("--url", help="base URL of a server to use instead, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="quire-nano", help="model name on the server")
    parser.add_argument("--api-key", help="API key of the server")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--count", type=int, default=COUNT, help="prompts per kind")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--wrong", type=int, default=20, help="maximum number of wrong answers per kind in the JSON")
    parser.add_argument("--json", type=Path, help="output file for the results")
    chosen = parser.parse_args(arguments)
    answerer: Answerer
    answerer = ServerAnswerer(chosen.url, chosen.model, chosen.api_key) if chosen.url else FolderAnswerer(chosen.folder)
    results = {kind: measure(answerer, kind, chosen.count, chosen.seed, chosen.wrong) for kind in chosen.kinds}
    print(table(results))
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
