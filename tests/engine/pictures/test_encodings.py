"""Encodings that clients have computed stand for pictures as those of the model's own tower do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.support.engine import Engine, greedy
from tests.support.pictures import drawn
from tests.support.vision_models import make_composite, prompt_with_pictures, save_seeing


@pytest.mark.parametrize("case", ["llava", "qwen3_vl"])
def test_the_tokens_are_those_of_the_picture(tmp_path: Path, case: str) -> None:
    """With rotary positions and deep features, where the model has them."""
    engine = Engine(save_seeing(make_composite(case), case, tmp_path))
    prompt, (item,) = prompt_with_pictures(engine.pictures, [1, 2], drawn(56, 84), [3])
    expected = engine.generate(prompt, greedy(6), items=(item,)).tokens
    encoding = engine.model.vision.encode(item).detach().float().numpy()
    assert encoding.shape == (item.length, engine.pictures.embedding_size)
    nothing = np.empty((0, 0, 0, 3), np.uint8)
    sent = msgspec.structs.replace(item, hash=b"sent", pixels=nothing, encoding=encoding)
    assert engine.generate(prompt, greedy(6), items=(sent,)).tokens == expected
    other = msgspec.structs.replace(sent, hash=b"other", encoding=encoding[::-1].copy())
    assert engine.generate(prompt, greedy(6), items=(other,)).error is None
    for wrong, reason in (
        (encoding[:-1], "not float32"),
        (encoding[:, :-1], "not float32"),
        (encoding.astype(np.float64), "is float64"),
        (np.full_like(encoding, np.nan), "NaN or infinite"),
    ):
        broken = msgspec.structs.replace(sent, hash=b"broken", encoding=wrong)
        assert reason in (engine.generate(prompt, greedy(2), items=(broken,)).error or "")
