"""Evaluates quire-nano-hear on held-out utterances at a server: ``python -m training.hear.evaluate``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx

from training.hear.heldout import Utterance, utterances, with_noise
from training.hear.sentences import normalized

COUNT, SEED = 300, 7
NOISE = 10.0  # dB
MODEL = "quire-nano-hear"
_TIMEOUT = 120.0  # seconds


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server has understood.

    Attributes:
        times: start of the first and end of the last segment in seconds; None: there is no segment.
    """

    text: str
    language: str
    times: tuple[float, float] | None


def word_errors(right: str, heard: str) -> tuple[int, int]:
    """Substituted, missing and additional words, and the number of right words."""
    right_words, heard_words = normalized(right).split(), normalized(heard).split()
    row = list(range(len(heard_words) + 1))
    for at, word in enumerate(right_words, 1):
        before, row[0] = row[0], at
        for column, other in enumerate(heard_words, 1):
            before, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, before + (word != other))
    return row[-1], len(right_words)


def transcribe(client: httpx.Client, utterance: Utterance) -> Answer:
    """Ask the server, without telling it the language."""
    files = {"file": ("utterance.wav", utterance.wav())}
    answer = client.post("/audio/transcriptions", files=files, data={"model": MODEL, "response_format": "verbose_json"})
    answer.raise_for_status()
    body = answer.json()
    segments = body["segments"]
    times = (segments[0]["start"], segments[-1]["end"]) if segments else None
    return Answer(body["text"], body["language"], times)


def figures(pairs: Sequence[tuple[Utterance, Answer]]) -> dict[str, Any]:
    """Word error rate and right languages in percent, and the mean error of start and end in milliseconds."""
    errors = [word_errors(utterance.text, answer.text) for utterance, answer in pairs]
    right = sum(utterance.language == answer.language for utterance, answer in pairs)
    gaps = [
        abs(spoken - heard) for utterance, answer in pairs if answer.times
        for spoken, heard in zip(utterance.speech, answer.times, strict=True)
    ]  # fmt: skip
    return {
        "utterances": len(pairs),
        "word_error_rate": round(100 * sum(wrong for wrong, _ in errors) / sum(total for _, total in errors), 2),
        "language": round(100 * right / len(pairs), 2),
        "time_error_ms": round(1000 * sum(gaps) / len(gaps)) if gaps else None,
    }


def groups(pairs: Sequence[tuple[Utterance, Answer]]) -> dict[str, Any]:
    """The figures of all, and by language, kind and noise."""
    result = figures(pairs)
    for name in ("language", "kind", "noise"):
        values = sorted({getattr(utterance, name) for utterance, _ in pairs})
        if len(values) > 1:
            result[f"by_{name}"] = {
                value: figures([pair for pair in pairs if getattr(pair[0], name) == value]) for value in values
            }
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run the evaluation."""
    parser = argparse.ArgumentParser(prog="python -m training.hear.evaluate", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="a server with the model")
    parser.add_argument("--count", type=int, default=COUNT, help="utterances")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--wrong", type=int, default=0, help="print this many wrong answers")
    parser.add_argument("--json", type=Path, help="output file for the results")
    chosen = parser.parse_args(arguments)
    clean = utterances(chosen.count, chosen.seed)
    sets = {"clean": clean, f"{NOISE:.0f} dB": with_noise(clean, NOISE, chosen.seed)}
    results: dict[str, Any] = {}
    with httpx.Client(base_url=chosen.url, timeout=_TIMEOUT) as client, ThreadPoolExecutor(4) as pool:
        for name, spoken in sets.items():
            answers = list(pool.map(lambda utterance: transcribe(client, utterance), spoken))
            pairs = list(zip(spoken, answers, strict=True))
            results[name] = groups(pairs)
            print(name, json.dumps(results[name], indent=1))
            _show_wrong(pairs, chosen.wrong)
    if chosen.json:
        written = {"date": date.today().isoformat(), "seed": chosen.seed, "results": results}
        chosen.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _show_wrong(pairs: Sequence[tuple[Utterance, Answer]], count: int) -> None:
    wrong = [
        (utterance, answer) for utterance, answer in pairs
        if utterance.language != answer.language or word_errors(utterance.text, answer.text)[0]
    ]  # fmt: skip
    for utterance, answer in wrong[:count]:
        print(f"{utterance.voice} {utterance.noise}")
        print(f"  {utterance.language} {utterance.text!r}\n  {answer.language} {answer.text!r}")


if __name__ == "__main__":
    main()
