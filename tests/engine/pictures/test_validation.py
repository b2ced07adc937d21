"""Pictures that cannot be read are refused by the core, and say why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire.engine.build.warm_up import smallest_picture
from quire.engine.client.protocol import AudioItem, PictureItem
from quire.engine.models.model_config import read_model_config
from tests.support.engine import Engine, greedy
from tests.support.pictures import drawn
from tests.support.vision_models import SEES, prompt_with_pictures, save_composite


@pytest.fixture(scope="module")
def engine(seeing_folders: dict[str, Path]) -> Engine:
    return Engine(seeing_folders["mistral3"])


def changed(**fields: Any) -> Callable[[PictureItem], PictureItem]:
    return lambda item: msgspec.structs.replace(item, **fields)


def offsets(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


# A picture of six tokens, of which the third and the sixth are text.
CASES: dict[str, tuple[Callable[[PictureItem], PictureItem], str]] = {
    "no tokens": (changed(length=0), "0 tokens; it needs at least one"),
    "behind the prompt": (changed(length=60), "the prompt has 9 tokens"),
    "no hash": (changed(hash=b""), "must not be empty"),
    "floats": (changed(pixels=np.zeros((1, 28, 28, 3), np.float32)), "float32 1x28x28x3, not uint8"),
    "one image": (changed(pixels=np.zeros((28, 28, 3), np.uint8)), "uint8 28x28x3, not uint8 of images"),
    "gray": (changed(pixels=np.zeros((1, 28, 28, 1), np.uint8)), "uint8 1x28x28x1"),
    "no images": (changed(pixels=np.zeros((0, 28, 28, 3), np.uint8)), "uint8 0x28x28x3"),
    "another size": (
        changed(hash=b"1", pixels=np.zeros((1, 28, 56, 3), np.uint8)),
        "2 embeddings, but its item has 4 tokens",
    ),
    "text at other places": (changed(hash=b"2", text_offsets=offsets(5)), "4 embeddings, but its item has 5 tokens"),
    "text twice": (changed(text_offsets=offsets(2, 2)), "must ascend from 0 or more to less than its 6 tokens"),
    "text before": (changed(text_offsets=offsets(-1, 2)), "must ascend from 0"),
    "text behind": (changed(text_offsets=offsets(2, 6)), "must ascend from 0"),
    "text only": (changed(text_offsets=offsets(0, 1, 2, 3, 4, 5)), "text tokens only"),
    "text of another type": (changed(text_offsets=np.array([2, 5])), "1-D array of int32"),
    "positions of another shape": (changed(positions=np.zeros((3, 5), np.int32)), "int32 of shape 3x6"),
    "negative positions": (changed(positions=np.full((3, 6), -1, np.int32)), "must not be negative"),
    "positions behind the picture": (changed(positions=np.full((3, 6), 6, np.int32)), "less than its 6 tokens"),
    "positions for a model without them": (
        changed(positions=np.zeros((3, 6), np.int32)),
        "no rotary positions of time, height and width",
    ),
    "no advance": (changed(advance=0), "must be at least 1, and at most its 6 tokens, not 0"),
    "a long advance": (changed(advance=7), "at most its 6 tokens, not 7"),
}


@pytest.mark.parametrize("name", CASES)
def test_pictures(engine: Engine, name: str) -> None:
    change, text = CASES[name]
    prompt, (item,) = prompt_with_pictures(engine.pictures, [1, 2], drawn(56, 56), [3])
    assert item.length == 6
    assert text in (engine.generate(prompt, greedy(2), items=(change(item),)).error or "")
    assert engine.blocks_used == 0
    assert engine.generate(prompt, greedy(2), items=(item,)).error is None


@pytest.mark.parametrize("case", SEES)
def test_the_smallest_picture(seeing_folders: dict[str, Path], case: str) -> None:
    engine = Engine(seeing_folders[case])
    prompt, items = prompt_with_pictures(engine.pictures, [1, 2], drawn(1, 1), [3])
    assert engine.generate(prompt, greedy(2), items=items).error is None


@pytest.mark.parametrize("case", SEES)
def test_the_picture_of_the_warm_up(seeing_folders: dict[str, Path], case: str) -> None:
    """The encoder reads it."""
    engine = Engine(seeing_folders[case])
    with torch.inference_mode():
        encoded = engine.model.vision.encode(smallest_picture(engine.pictures.geometry))
    assert encoded.shape[1] == (3 * 64 if case.startswith("qwen3_vl") else 64)  # with two levels


def test_a_picture_for_which_there_is_no_room(engine: Engine) -> None:
    most = engine.pictures.item_tokens
    prompt, (item,) = prompt_with_pictures(engine.pictures, [1], drawn(56, 56), [3] * most)
    long = msgspec.structs.replace(item, length=most + 1)
    assert "at most" in (engine.generate(prompt, greedy(1), items=(long,)).error or "")


def test_the_encoder_cache_takes_memory_of_pictures(
    seeing_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it takes is not there to encode them. Pictures that all have one size are not refused; a warning says so."""
    monkeypatch.setattr("quire.engine.build.encoder_memory._SMALL_PICTURE", 1)
    folder, fixed = seeing_folders["qwen2_5_vl"], seeing_folders["llava"]
    free = Engine(folder, encoder_cache_memory="1MiB")
    host = free.info.cache_bytes + (3 << 20)
    monkeypatch.setattr("quire.engine.build.engine.host_memory", lambda _: host)
    fitting = [Engine(folder, encoder_cache_memory=size).pictures.item_tokens for size in ("1MiB", "2MiB")]
    assert free.pictures.item_tokens > fitting[0] > fitting[1]
    caplog.clear()
    one = Engine(fixed, encoder_cache_memory="6MiB")
    assert "a picture may take" in caplog.text
    prompt, items = prompt_with_pictures(one.pictures, [1], drawn(20, 20), [2])
    assert one.generate(prompt, greedy(1), items=items).error is None


def test_audio_is_refused(engine: Engine) -> None:
    audio = AudioItem(hash=b"1", length=1, features=np.zeros((16, 8), np.float32))
    error = engine.generate([1, 2], greedy(2), items=(audio,)).error
    assert error == "the model does not accept audio, only pictures and text"


def test_without_an_image_processor_the_language_model_is_loaded(tmp_path: Path) -> None:
    config = read_model_config(save_composite("llava", tmp_path))
    assert config.facts.pictures is None
    assert config.text_only is not None
    assert "there is no preprocessor_config.json" in config.text_only
    assert Engine(tmp_path).generate([1, 2], greedy(2)).error is None
