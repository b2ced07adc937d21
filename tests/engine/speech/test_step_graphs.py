"""Steps with cross-attention are captured, and replays give the same tokens as eager steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.options import ModelOptions
from quire.engine.execution.step_graphs import StepGraphs
from quire.kernels import native
from tests.support.engine import Engine, greedy
from tests.support.whisper import ENGLISH, PREVIOUS, START, TRANSCRIBE, item, make_whisper, save_whisper

pytestmark = pytest.mark.skipif(
    native.instructions() is None, reason="only calls of the compiled kernels can be captured"
)


def tokens(folder: Path, quantization: str) -> tuple[list[list[int]], StepGraphs]:
    """Tokens of requests that start and finish at different steps; some share an item."""
    engine = Engine(folder, model=ModelOptions(dtype="bfloat16", quantization=quantization), block_size=8)
    for index in range(8):
        prompt = [PREVIOUS, *range(10, 10 + index), START, ENGLISH, TRANSCRIBE]
        engine.add(str(index), prompt, greedy(10 + 3 * (index % 3)), items=(item(index % 5),))
        engine.step()
    engine.run()
    return [engine.results[str(index)].tokens for index in range(8)], engine.runner.steps


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_replayed_steps_give_the_same_tokens(
    tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads are as wide as the kernels want them, so nothing is padded by torch."""
    folder = save_whisper(make_whisper(decoder_attention_heads=2, encoder_attention_heads=2).bfloat16(), tmp_path)
    replayed, graphs = tokens(folder, quantization)
    assert len(graphs.graphs) == 2  # one of each kind
    monkeypatch.setattr(StepGraphs, "logits", lambda self, *args: self._eager.logits(*args))
    assert tokens(folder, quantization)[0] == replayed
