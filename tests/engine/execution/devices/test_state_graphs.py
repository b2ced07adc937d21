"""Graphs of models with states: a row reads and writes the slot of its sequence, and padding changes none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.options import ModelOptions
from quire.engine.execution.cuda_graphs import GraphSteps
from quire.engine.execution.state_slots import StateSlots, slot_bytes
from quire.engine.execution.states import StateCaches
from quire.engine.models.specs.cache import StateArray, StateCache
from quire.kernels import gpu, native
from quire.kernels.causal_conv import causal_conv
from quire.kernels.state_parameters import HeadParameters
from quire.kernels.state_space_scan import state_space_scan
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.triton_device import InterpretedDevice, interpreted_only
from tests.support.variants import slow_but

LENGTHS = (7, 4, 2)  # answers, so that the steps have three, two and one sequences
LAYERS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 2},
    "granitemoehybrid-dense": {"num_hidden_layers": 2},
    "jamba": {"num_hidden_layers": 2},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "recurrent_gemma": {},
}


@interpreted_only
@pytest.mark.parametrize("case", slow_but([*LAYERS], "granitemoehybrid-dense", "qwen3_5"))
def test_decode_steps_are_replayed(tmp_path: Path, case: str) -> None:
    """Slots are taken again by later requests, and the largest size always has padding."""
    folder = save_model(make_model(case, **LAYERS[case]), tmp_path)
    reference = Engine(folder, model=ModelOptions(device="reference"), enable_prefix_caching=False)
    prompts = [random_prompt(seed, 3 + seed) for seed in range(5)]
    expected = [reference.generate(prompt, greedy(7)).tokens for prompt in prompts]
    device = InterpretedDevice()
    engine = Engine(folder, device=device, max_num_seqs=4, block_size=4, cudagraph_capture_sizes=(2, 4))
    steps = engine.runner.steps
    assert isinstance(steps, GraphSteps)
    assert sorted(steps.graphs) == [2, 4]
    for turn in range(2):
        for index, length in enumerate(LENGTHS):
            engine.add(f"{turn}-{index}", prompts[turn * 2 + index], greedy(length))
        engine.run()
        for index, length in enumerate(LENGTHS):
            assert engine.results[f"{turn}-{index}"].tokens == expected[turn * 2 + index][:length]
    assert len(device.replayed) == 2 * (max(LENGTHS) - 1)


def test_slots_of_padded_steps_are_at_the_same_address() -> None:
    kinds = {0: StateCache((StateArray((3,), "float32"),))}
    states = StateCaches(StateSlots(torch.zeros(4, slot_bytes(kinds), dtype=torch.uint8), kinds), 4)
    blank = states.of_step([], 4)
    assert (blank.slots.tolist(), blank.cu_seqlens.tolist()) == ([-1] * 4, [0, 1, 2, 3, 4])
    step = states.of_step([], 2)
    assert (step.slots.data_ptr(), step.cu_seqlens.data_ptr()) == (blank.slots.data_ptr(), blank.cu_seqlens.data_ptr())


@interpreted_only
@pytest.mark.parametrize("interpreted", [True, False])
def test_padding_has_no_state(interpreted: bool) -> None:
    """Results are finite, and no slot changes but that of the sequence."""
    slots, bounds = torch.tensor([1, -1, -1]), torch.arange(4)
    inputs, memory = torch.randn(3, 2, 32), torch.randn(2, 2, 8, 32)
    conv_state = torch.randn(2, 3, 64)
    before = memory.clone(), conv_state.clone()
    heads = HeadParameters(torch.randn(2), torch.randn(2), torch.randn(2))
    group, weight = torch.randn(3, 1, 8), torch.randn(64, 4)

    def compute() -> None:
        out = state_space_scan(inputs, torch.randn(3, 2), group, group, heads, memory, slots, bounds)
        assert out.isfinite().all()
        assert causal_conv(inputs.flatten(1), weight, None, conv_state, slots, bounds).isfinite().all()

    with native.disabled():
        if interpreted:
            with gpu.interpreted():
                compute()
        else:
            compute()
    for array, old in zip((memory, conv_state), before, strict=True):
        assert torch.equal(array[0], old[0])
        assert not torch.equal(array[1], old[1])
