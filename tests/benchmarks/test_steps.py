"""benchmarks.cpu.steps: the floor of a step's time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cpu.steps import unread_table_bytes
from quire.kernels import native
from tests.support.engine import load
from tests.support.models import make_model, save_model
from tests.support.tokenizer import VOCAB_SIZE


@pytest.mark.skipif(native.instructions() is None, reason="weights are packed by the compiled kernels")
@pytest.mark.parametrize(("tied", "quantization"), [(True, "none"), (True, "int8"), (False, "none"), (False, "int8")])
def test_a_table_that_the_head_multiplies_with_is_read(tied: bool, quantization: str, tmp_path: Path) -> None:
    folder = save_model(make_model("llama", tie_word_embeddings=tied).bfloat16(), tmp_path)
    model = load(folder, dtype="bfloat16", quantization=quantization).model
    assert unread_table_bytes(model) == (0 if tied else 2 * VOCAB_SIZE * model.spec.hidden)
