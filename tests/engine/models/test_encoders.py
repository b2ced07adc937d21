"""Hidden states of encoders equal transformers', for every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.options import ModelOptions
from tests.support.encoders import (
    ENCODERS,
    assert_close,
    engine_of,
    hidden_states,
    make_encoder,
    output,
    random_text,
)
from tests.support.engine import Engine


@pytest.mark.parametrize("device", ["cpu", "torch"])
@pytest.mark.parametrize("case", ENCODERS)
def test_hidden_states_equal_transformers(case: str, device: Any, tmp_path: Path) -> None:
    """Of texts from one token to the whole context, together and alone."""
    model = make_encoder(case)
    engine = engine_of(model, tmp_path, model=ModelOptions(device=device))
    assert engine.info.tasks == ("embed", "token_embed")
    texts = [random_text(i, length) for i, length in enumerate((1, 2, 17, engine.info.max_model_len, 40))]
    expected = [output(model, text).last_hidden_state[0] for text in texts]
    for got, hidden in zip(hidden_states(engine, texts), expected, strict=True):
        assert_close(got, hidden)
    assert_close(hidden_states(engine, texts[4:])[0], expected[4])
