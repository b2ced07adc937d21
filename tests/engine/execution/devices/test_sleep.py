"""Engines on GPUs that sleep: weights and captured graphs are made again, and give the same tokens."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.client.protocol import Sleep, SleepLevel, Wake
from quire.engine.core.sleep import AsleepExecutor
from quire.engine.execution.cuda_graphs import GraphSteps
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.sleep import ALL, AWAKE, answer, sleep
from tests.support.triton_device import InterpretedDevice, gpu_device, interpreted_only


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama", num_hidden_layers=1), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("level", [1, 2])
def test_tokens_are_the_same_afterwards(folder: Path, level: SleepLevel) -> None:
    engine = Engine(folder, device=gpu_device(), enable_sleep_mode=True, max_num_seqs=2)
    prompt = random_prompt(1, 20)
    before = engine.generate(prompt, greedy(4)).tokens
    allocated = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    del engine.runner
    sleep(engine, level)
    if torch.cuda.is_available():
        assert torch.cuda.memory_allocated() < allocated - (7 << 20)  # the KV cache has 8 MiB
    assert answer(engine, Wake(ALL)) == AWAKE
    after = engine.generate(prompt, greedy(4))
    assert after.tokens == before
    assert after.outputs[0].cached_tokens == 0


@interpreted_only
def test_graphs_are_captured_again(folder: Path) -> None:
    device = InterpretedDevice()
    engine = Engine(folder, device=device, enable_sleep_mode=True, cudagraph_capture_sizes=(1,))
    old = weakref.ref(engine.runner.steps.graphs[1])
    del engine.runner
    sleep(engine, 1)
    assert old() is None
    assert answer(engine, Wake(ALL)) == AWAKE
    executor: Any = engine.core.executor
    assert isinstance(executor._runner.steps, GraphSteps)
    device.replayed.clear()
    engine.generate(random_prompt(1, 5), greedy(4))
    assert len(device.replayed) == 3  # the step of the prompt samples the first token


def test_steps_in_flight_of_aborted_requests_end_first(folder: Path) -> None:
    engine = Engine(folder, device=gpu_device(), enable_sleep_mode=True, max_num_seqs=2)
    engine.add("aborted", [1, 2, 3], greedy(50))
    engine.core.step()
    engine.core.step()
    assert engine.core._in_flight
    engine.abort("aborted")
    engine.core._handle(Sleep(1))
    assert isinstance(engine.core.executor, AsleepExecutor)
    assert not engine.core.has_work
    engine.core.check()
