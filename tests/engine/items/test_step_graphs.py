"""Steps that read items run layer by layer beside replayed ones, and give the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.options import ModelOptions
from quire.engine.execution.step_graphs import StepGraphs
from quire.kernels import native
from tests.support.audio_models import make_audio_model, noise, prompt_with, save_audio_model
from tests.support.engine import Engine, greedy

pytestmark = pytest.mark.skipif(
    native.instructions() is None, reason="only calls of the compiled kernels can be captured"
)


def tokens(folder: Path) -> tuple[list[list[int]], StepGraphs]:
    """Tokens of requests that start at different steps; each second one has audio."""
    engine = Engine(folder, model=ModelOptions(dtype="bfloat16"), block_size=8)
    for index in range(8):
        audio = [noise(index, 0.4)] if index % 2 else []
        prompt, items = prompt_with(engine.audio, [5, index], *audio, [9])
        engine.add(str(index), prompt, greedy(10 + index % 3), items=items)
        engine.step()
    engine.run()
    return [engine.results[str(index)].tokens for index in range(8)], engine.runner.steps


def test_replayed_steps_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are as wide as the kernels want them, so nothing is padded by torch."""
    wide = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    folder = save_audio_model(make_audio_model("voxtral", text=wide).bfloat16(), tmp_path)
    replayed, graphs = tokens(folder)
    assert graphs.graphs
    monkeypatch.setattr(StepGraphs, "logits", lambda self, *args: self._eager.logits(*args))
    assert tokens(folder)[0] == replayed
