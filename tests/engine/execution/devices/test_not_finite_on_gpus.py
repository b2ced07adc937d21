"""NaN that a model computes for one request ends that request only, where the device samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import make_model, save_model
from tests.support.not_finite import GOOD, SAMPLING, alone, check_one_fails, sampling, start
from tests.support.triton_device import gpu_device
from tests.support.variants import slow_but


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # in the interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered")
# test_not_finite.py has them all, on the CPU.
@pytest.mark.parametrize("kind", slow_but(SAMPLING, "greedy", "top_p", "logprobs", "prompt_logprobs", "penalties"))
def test_every_way_of_sampling(kind: str, tmp_path: Path) -> None:
    folder, params = save_model(make_model("llama", num_hidden_layers=1), tmp_path), sampling(3, kind)
    [good] = alone(folder, [GOOD], params)
    engine = start(folder, device=gpu_device(), kv_cache_memory_bytes=1 << 20, max_num_seqs=2)
    check_one_fails(engine, params, good)
