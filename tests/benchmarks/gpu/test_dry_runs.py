"""Each benchmark of a GPU runs from its arguments to its report: what fails here would fail on a machine that is lent
for minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import attention, engine, matmul, models, peer, small_ops
from benchmarks.gpu.engine import Case, RecordingChannel
from quire.engine.client.protocol import ErrorOutput, StepOutput, StepStats
from quire.engine.models.networks.decoder import LMHead
from quire.kernels import gpu
from quire.kernels.triton import tuning
from quire.kernels.write_pages import page_dim
from tests.benchmarks.gpu.conftest import HYBRIDS

pytestmark = pytest.mark.usefixtures("small")
LIMITS = {"device", "copy_gb_per_s", "bf16_tflops", "fp32_tflops"}


def results_of(file: Path) -> list[dict[str, Any]]:
    """The results of a report, of which none failed."""
    report = json.loads(file.read_text())
    assert report["limits"].keys() == LIMITS
    assert not [row for row in report["results"] if any("error" in name for name in row)]
    results: list[dict[str, Any]] = report["results"]
    return results


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_STEPS": 3,
        "_DEVICE_STEPS": 2,
        "_WARMUP_STEPS": 1,
        "_PREFILL_TOKENS": 8,
        "_MAX_TOKENS": 9,
    }.items():
        monkeypatch.setattr(engine, name, value)
    monkeypatch.setattr(engine, "GENERATED", 2)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        pytest.param("llama-3-8b", ["1x3", "2x4"], marks=pytest.mark.slow),
        ("qwen3-30b-a3b", ["1x2", "2x2"]),
        ("granite-4-h-350m", ["1x2", "2x2"]),
        pytest.param("qwen3.5-0.8b", ["1x2", "2x2"], marks=pytest.mark.slow),
    ],
)
def test_the_engine(shape: str, cases: list[str], tmp_path: Path) -> None:
    engine.main([shape, "--cases", *cases, "--out", str(tmp_path / "report.json")])
    rows = results_of(tmp_path / "report.json")
    assert [f"{row['batch']}x{row['context']}" for row in rows] == cases
    for row in rows:
        assert row["gap_us"] == pytest.approx((row["step_ms"] - row["device_ms"]) * 1e3, abs=2)
        assert min(row[name] for name in ("tokens_per_s", "prefill_tokens_per_s", "tokens_per_s_with_prefill")) > 0
        assert {"weights_share", "decode_floor_share", "prefill_floor_share"} < row.keys()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["graphs"] == len(cases)
    assert (report["state_bytes"] > 0) == (shape in HYBRIDS)


@pytest.mark.slow
@pytest.mark.usefixtures("few_steps")
def test_a_case_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, calls = LMHead.logits, []

    def fail_once(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 12:  # after the steps of the start
            raise ValueError("no such product")
        return logits(*args, **kwargs)

    monkeypatch.setattr(LMHead, "logits", fail_once)
    engine.main(["llama-3-8b", "--cases", "1x2", "1x3", "--out", str(tmp_path / "report.json")])
    failed, measured = json.loads((tmp_path / "report.json").read_text())["results"]
    assert failed == {"batch": 1, "context": 2, "error": "RuntimeError: a step failed; the log says why"}
    assert measured["tokens_per_s"] > 0


def test_failed_requests_are_not_timed() -> None:
    with pytest.raises(RuntimeError, match="request r failed: no kernel"):
        RecordingChannel().send(StepOutput([ErrorOutput("r", "no kernel")], StepStats()))


def test_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (models, peer):
        monkeypatch.setattr(module, "GENERATED", 3)
    monkeypatch.setattr(peer, "CONTINUOUS", {**peer.CONTINUOUS, "num_blocks": 8, "max_batch_tokens": 16})
    engine.main(["qwen3-0.6b", "--peer", "--cases", "2x5", "--out", str(tmp_path / "report.json")])
    (row,) = results_of(tmp_path / "report.json")
    assert row["static_tokens_per_s_with_prefill"] > 0
    assert row["continuous_tokens_per_s_with_prefill"] > 0


@pytest.fixture
def small_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = attention.Shape("grouped", 4, 2, 16, 16), attention.Shape("latent", 2, 1, 32, 16, latent=True)
    monkeypatch.setattr(attention, "SHAPES", shapes)
    monkeypatch.setattr(attention, "CACHE_BYTES", 1)
    monkeypatch.setattr(attention, "CALLS", 2)
    monkeypatch.setattr(attention, "DECODE", ((1, 20), (2, 17)))
    monkeypatch.setattr(attention, "PREFILL", ((1, 5), (2, 3)))
    monkeypatch.setattr(attention, "VARLEN", ((2, 3),))


@pytest.mark.usefixtures("small_attention")
def test_attention(tmp_path: Path) -> None:
    with gpu.interpreted():
        attention.main(["--out", str(tmp_path / "report.json")])
    rows = results_of(tmp_path / "report.json")
    assert {row["kernel"] for row in rows} == {"decode", "prefill", "varlen"}
    assert len(rows) == 2 * 3 * 2 + 2 * 3 * 2 + 2


@pytest.mark.usefixtures("small_attention")
def test_rows_of_pages_have_the_elements_of_heads() -> None:
    for dtype in attention.PAGES.values():
        shapes = attention.Shape("wide", 2, 1, 256, 256), attention.Shape("latent", 2, 1, 96, 64, latent=True)
        for shape in shapes:
            for keys, values in attention.Cache(shape, dtype, 1, 16).layers:
                assert page_dim(keys) == shape.dim
                assert page_dim(values) == shape.value_dim


@pytest.mark.slow
@pytest.mark.usefixtures("small_attention")
def test_tuning_of_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "PAGES", {"bfloat16": torch.bfloat16})
    (tmp_path / "attention.json").write_bytes((tuning._TABLES / "attention.json").read_bytes())
    monkeypatch.setattr(tuning, "_TABLES", tmp_path)
    monkeypatch.setattr(attention, "BLOCKS_N", (16, 32))
    monkeypatch.setattr(attention, "WARPS", (4,))
    monkeypatch.setattr(attention, "STAGES", (2,))
    try:
        with gpu.interpreted():
            attention.main(["tune", "--widths", "16", "32"])
    finally:
        tuning._table.cache_clear()
        tuning.config.cache_clear()
    stored = json.loads((tmp_path / "attention.json").read_text())["no-gpu"]
    assert {"decode", "prefill", "varlen"} < stored.keys()


@pytest.fixture
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "LINEARS", (matmul.Shape("tiny", "qkv", 128, 96),))
    monkeypatch.setattr(matmul, "MOES", (matmul.MoEShape("tiny", 64, 32, 4, 2),))
    monkeypatch.setattr(matmul, "WEIGHT_BYTES", 1)
    monkeypatch.setattr(matmul, "SIZE", 32)
    monkeypatch.setattr(matmul.Rates, "measured", lambda bf16: matmul.Rates(bf16, bf16, bf16, bf16))


@pytest.mark.usefixtures("small_products")
def test_products(tmp_path: Path) -> None:
    with gpu.interpreted():
        matmul.main(["--out", str(tmp_path / "report.json"), "--rows", "1", "3"])
    rows = results_of(tmp_path / "report.json")
    assert len(rows) == 2 * (5 + 1 + 5)


@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize(
    "names",
    [pytest.param(("Q4_K",), id="one"), pytest.param(tuple(matmul.GROUP_FORMATS), id="all", marks=pytest.mark.slow)],
)
def test_products_with_groups(names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "GROUP_FORMATS", {name: matmul.GROUP_FORMATS[name] for name in names})
    monkeypatch.setattr(matmul, "MOES", (matmul.MoEShape("tiny", 128, 128, 2, 1),))
    with gpu.interpreted():
        matmul.main(["--groups", "--models", "tiny", "--out", str(tmp_path / "report.json"), "--rows", "1"])
    rows = results_of(tmp_path / "report.json")
    assert len(rows) == 2 + 2 * len(names)


def test_small_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TOKENS": 3, "HIDDEN": 32, "INNER": 48, "HEADS": 2, "KV_HEADS": 1, "HEAD_DIM": 16}.items():
        monkeypatch.setattr(small_ops, name, value)
    monkeypatch.setattr(small_ops, "ROWS", 2)
    monkeypatch.setattr(small_ops, "VOCAB", 300)
    with gpu.interpreted():
        small_ops.main(["--out", str(tmp_path / "report.json")])
    assert len(results_of(tmp_path / "report.json")) >= 18


def test_cases_are_read() -> None:
    assert Case.parse("64x2048") == Case(64, 2048)
