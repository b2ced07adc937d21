"""Which steps are captured and replayed as graphs; `devices/test_triton.py` tests the results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.config.options import EngineOptions
from quire.engine.execution.cache import OutOfCacheMemory
from quire.engine.execution.cuda_graphs import GraphSteps, capture_sizes
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.triton_device import FakeGraph, InterpretedDevice, interpreted_only


@pytest.mark.parametrize(
    ("max_num_seqs", "configured", "sizes"),
    [
        (1, (), (1,)),
        (20, (), (1, 2, 4, 8, 16, 20)),
        (300, (), (1, 2, 4, *range(8, 257, 8), 272, 288, 300)),
        (64, (16, 3, 16, 99), (3, 16)),
    ],
)
def test_sizes(max_num_seqs: int, configured: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    options = EngineOptions(max_num_seqs=max_num_seqs, cudagraph_capture_sizes=configured)
    assert capture_sizes(options) == sizes


def test_at_most_512_sequences_are_captured() -> None:
    assert capture_sizes(EngineOptions(max_num_seqs=4000))[-1] == 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama", num_hidden_layers=1), tmp_path_factory.mktemp("model"))


@interpreted_only
def test_decode_steps_are_replayed_and_others_are_not(folder: Path) -> None:
    device = InterpretedDevice()
    engine = Engine(folder, device=device, max_num_seqs=3, cudagraph_capture_sizes=(1, 2))
    steps = engine.runner.steps
    assert isinstance(steps, GraphSteps)
    assert sorted(steps.graphs) == [1, 2]
    engine.generate(random_prompt(1, 5), greedy(4))
    assert len(device.replayed) == 3  # the step of the prompt samples the first token
    for name in "abc":
        engine.add(name, random_prompt(2, 5), greedy(4))
    engine.run()
    assert len(device.replayed) == 3  # three sequences are more than the largest size
    engine.generate(random_prompt(3, 5), greedy(4, prompt_logprobs=1))
    assert len(device.replayed) == 6


@interpreted_only
def test_enforce_eager_captures_nothing(folder: Path) -> None:
    device = InterpretedDevice()
    engine = Engine(folder, device=device, enforce_eager=True)
    engine.generate(random_prompt(1, 5), greedy(4))
    assert not device.replayed


@interpreted_only
def test_a_model_that_waits_for_the_device_runs_without_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: FakeGraph, function: Callable[[], None]) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    expected = Engine(folder, device=InterpretedDevice()).generate(random_prompt(1, 5), greedy(4)).tokens
    monkeypatch.setattr(FakeGraph, "capture", refuse)
    device = InterpretedDevice()
    engine = Engine(folder, device=device, max_num_seqs=2)
    assert engine.generate(random_prompt(1, 5), greedy(4)).tokens == expected
    assert not device.replayed
    assert "without CUDA graphs: its steps cannot be captured (called a synchronizing" in caplog.text


@interpreted_only
def test_too_little_memory_for_a_step_is_no_reason_to_run_without_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: FakeGraph, function: Callable[[], None]) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(FakeGraph, "capture", refuse)
    with pytest.raises(OutOfCacheMemory, match="a decode step of 2 sequences does not fit into memory"):
        Engine(folder, device=InterpretedDevice(), max_num_seqs=2)
