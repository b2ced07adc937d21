"""How much memory the ranks of a pipeline leave for tensors that are on their way, and how many threads they have."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.config.options import EngineOptions, ModelOptions, ParallelOptions
from quire.engine.build import ranks
from quire.engine.build.cache import cache_memory
from quire.engine.build.core_config import CoreConfig
from quire.engine.models.distributed.group import RankGroups
from quire.engine.models.distributed.placement import Placement
from quire.engine.models.registry import spec_of
from quire.engine.models.sharding.decoder import ShardedDecoder
from quire.engine.models.specs.decoder import DecoderSpec
from quire.kernels import native
from tests.support.models import make_model


def reserved(placement: Placement, max_num_seqs: int) -> int:
    """The bytes that a rank of a bfloat16 model reserves, of steps of 100 tokens."""
    spec = spec_of(make_model("llama", num_hidden_layers=3, vocab_size=1000, hidden_size=64).config)
    assert isinstance(spec, DecoderSpec)
    with torch.device("meta"):
        model = ShardedDecoder(spec, RankGroups.of(placement), torch.bfloat16)
    options = EngineOptions(max_num_seqs=max_num_seqs, max_num_batched_tokens=100)
    parallel = ParallelOptions(tensor_parallel_size=placement.tensor_size, pipeline_parallel_size=placement.stages)
    nothing: Any = None
    config = CoreConfig(folder=Path(), model_config=nothing, model=ModelOptions(), engine=options, parallel=parallel)
    loaded: Any = SimpleNamespace(model=model, dtype=torch.bfloat16, context_len=64, audio=None, pictures=None)
    sizes: list[int] = []
    device: Any = SimpleNamespace(
        torch_device=torch.device("cuda"),
        attention_bytes=lambda *_: 0,
        cache_memory=lambda _, share, nbytes, step: sizes.append(nbytes),
    )
    cache_memory(loaded, config, device, 7)
    return sizes[0] - 7


@pytest.mark.parametrize(("max_num_seqs", "rows"), [(16, 256), (300, 300)])  # at least those of prompt_logprobs
def test_stages_have_room_for_what_steps_in_flight_send(max_num_seqs: int, rows: int) -> None:
    hidden, logits = 2 * 100 * 64 * 2, 3 * rows * 1000 * 4
    assert [reserved(Placement(stage, 1, 3), max_num_seqs) for stage in range(3)] == [hidden, hidden, hidden + logits]


def test_only_the_rank_that_gathers_logits_has_room_for_them() -> None:
    hidden, logits = 100 * 64 * 2, 2 * 256 * 1000 * 4
    sizes = [reserved(Placement(rank, 2, 2), 16) for rank in range(4)]
    assert sizes == [hidden, hidden, hidden + logits, hidden]


def test_ranks_of_one_stage_have_one_step_in_flight() -> None:
    assert [reserved(Placement(rank, 2, 1), 16) for rank in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "250000 100000\n"}, 2),  # with three, all would wait for the next period in each
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "50000\n"}, 3),
        ({}, 8),
    ],
)
def test_threads_respect_a_containers_limit(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert ranks.usable_cores(tmp_path) == cores


@pytest.mark.skipif(native.kernels is None, reason="torch's number of threads is that of the process")
@pytest.mark.parametrize(("options", "expected"), [({}, 3), ({"num_threads": 5}, 5)])
def test_ranks_divide_the_usable_cores(options: dict[str, int], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "usable_cores", lambda sharers: 6)
    nothing: Any = None
    config = CoreConfig(
        folder=Path(),
        model_config=nothing,
        model=ModelOptions(),
        engine=EngineOptions(**options),
        parallel=ParallelOptions(tensor_parallel_size=2),
    )
    with ThreadPoolExecutor(1) as thread:
        thread.submit(ranks.set_threads, config).result()
        assert thread.submit(torch.get_num_threads).result() == expected
