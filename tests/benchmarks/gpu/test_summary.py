"""The table of goals says what reports of all parts say, and what they lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import summary

QUIRE: list[dict[str, Any]] = [
    {"batch": 1, "context": 512, "weights_share": 0.81, "gap_us": 12.0, "tokens_per_s_with_prefill": 160.0},
    {"batch": 64, "context": 2048, "decode_floor_share": 0.69, "prefill_floor_share": 0.55, "gap_us": 50.0},
    {"batch": 64, "context": 512, "gap_us": -1.0, "tokens_per_s_with_prefill": 6000.0},
]
PEER: list[dict[str, Any]] = [
    {"batch": 64, "context": 512, "static_tokens_per_s_with_prefill": 1500.0,
     "continuous_tokens_per_s_with_prefill": 2000.0},
]  # fmt: skip


def write(folder: Path, engine: str, results: list[dict[str, Any]], **facts: str) -> None:
    folder.mkdir(exist_ok=True)
    report = {"shape": "llama-3-8b", "engine": engine, **facts, "results": results}
    (folder / f"{engine}{len(facts)}.json").write_text(json.dumps(report))


def lines(*folders: Path) -> dict[str, list[str]]:
    """The words behind each goal of the table, by its first ones."""
    table = [*summary.table(summary.read(folders))][1:]
    return {line.split(":")[0].split(",")[0]: line.split()[-4:] for line in table}


def test_targets_beside_values(tmp_path: Path) -> None:
    write(tmp_path / "one", "quire", QUIRE)
    write(tmp_path / "two", "transformers", PEER)
    assert lines(tmp_path / "one", tmp_path / "two") == {
        "decode": [">=", "0.7", "0.69", "MISSED"],  # of batch 64; that of batch 1 is below
        "prefill of 64 x 2": [">=", "0.55", "0.55", "reached"],
        "largest gap between two decode steps": ["<", "50", "50.0", "MISSED"],
        "64 requests": [">=", "3", "3.00", "reached"],
    }
    first = next(line for line in summary.table(summary.read([tmp_path])) if "batch 1" in line)
    assert first.split()[-4:] == [">=", "0.8", "0.81", "reached"]


def test_what_was_not_measured(tmp_path: Path) -> None:
    """Of quantized weights, with an error, or not at all."""
    write(tmp_path, "quire", QUIRE, quantization="int8")
    write(tmp_path, "transformers", [{"batch": 64, "context": 512, "static_error": "RuntimeError: no"}])
    assert {tuple(words[-3:]) for words in lines(tmp_path).values()} == {("-", "not", "measured")}
    write(tmp_path, "quire", [{"batch": 1, "context": 512, "error": "RuntimeError: no"}])
    assert {tuple(words[-3:]) for words in lines(tmp_path).values()} == {("-", "not", "measured")}


def test_cases_are_listed_above_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "transformers", PEER)
    summary.main([str(tmp_path)])
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("llama-3-8b transformers 64 x 512: static_tokens_per_s_with_prefill=1500.0")
    assert last.startswith("64 requests: tokens/s relative to transformers' best")
