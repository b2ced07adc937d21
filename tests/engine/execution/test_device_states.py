"""States on a device with Triton kernels: steps are in flight while others are planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.kernels import gpu
from tests.support import triton_interpreter
from tests.support.engine import greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.recurrent import recurrent_engine, tokens_of
from tests.support.triton_device import InterpretedDevice

triton_interpreter.prepare()

pytestmark = pytest.mark.skipif(not gpu.is_interpreted(), reason="the layer of the test computes on the host")


def test_tokens_do_not_depend_on_the_device(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor on drafts, for which the warm-up has as many spare slots as steps do."""
    folder, kind = save_model(make_model("llama", num_hidden_layers=2), tmp_path), "states and attention"
    plain = recurrent_engine(folder, kind)
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 20, "block_size": 8}
    engine = recurrent_engine(folder, kind, device=InterpretedDevice(), speculative_method="ngram", **options)
    assert "will fail" not in caplog.text
    prompts = [random_prompt(seed, 5 + seed) for seed in range(4)]
    for index, prompt in enumerate(prompts):
        engine.add(f"r{index}", prompt, greedy(4))
    engine.run()
    for index, prompt in enumerate(prompts):
        assert engine.results[f"r{index}"].tokens == tokens_of(plain, prompt, greedy(4))
