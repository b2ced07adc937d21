"""Tables of kernel configurations: the first rule that fits, GPU before default."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.kernels.triton import tuning

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
TABLE = {
    "default": {"dot": [{"shape": {"dim": [1, 64]}, "config": {"BLOCK": 16}}, {"shape": {}, "config": {"BLOCK": 32}}]},
    "nvidia-h100": {"dot": [{"shape": {"dim": 128, "dtype": "bf16"}, "config": {"BLOCK": 64}}]},
}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tuning, "_TABLES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    tuning.config.cache_clear()
    file = tmp_path / "invented.json"
    file.write_text(json.dumps(TABLE), encoding="utf-8")
    yield file
    tuning.config.cache_clear()
    tuning._table.cache_clear()


def block(device: torch.device, **shape: int | str) -> int:
    return tuning.config("invented", "dot", device, **shape)["BLOCK"]


def test_rules_of_the_gpu_come_before_the_defaults(table: Path) -> None:
    assert block(GPU, dim=128, dtype="bf16") == 64
    assert block(GPU, dim=128, dtype="fp32") == 32
    assert block(CPU, dim=128, dtype="bf16") == 32
    assert block(CPU, dim=64) == 16
    assert block(CPU) == 32


def test_a_stored_measurement_is_used_at_once_and_the_defaults_stay(table: Path) -> None:
    assert block(GPU, dim=64) == 16
    measured = {"date": "2026-11-25"}
    assert tuning.store("invented", "dot", GPU, [{"shape": {"dim": 64}, "config": {"BLOCK": 128}}], measured) == table
    assert block(GPU, dim=64) == 128
    assert block(CPU, dim=64) == 16
    stored = json.loads(table.read_text(encoding="utf-8"))
    assert stored["nvidia-h100"]["measured"] == measured
    assert stored["default"] == TABLE["default"]


def test_a_kernel_without_a_rule_is_refused(table: Path) -> None:
    with pytest.raises(LookupError, match=r"invented\.json has no configuration of absent for"):
        tuning.config("invented", "absent", CPU, dim=3)


def test_every_table_has_defaults() -> None:
    files = sorted((Path(tuning.__file__).parent / "tuned").glob("*.json"))
    assert files
    for file in files:
        table = json.loads(file.read_text(encoding="utf-8"))
        assert all(rules[-1]["shape"] == {} for rules in table["default"].values()), file
