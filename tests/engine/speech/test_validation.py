"""Requests on items that cannot be run are refused, and say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.config.options import ModelOptions
from quire.engine.client.model_info import Generates
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import MediaItem
from quire.engine.client.sampling_params import TimestampRule, TokenProbs
from quire.engine.models.errors import ModelError
from tests.support.engine import Engine, greedy
from tests.support.models import make_model, save_model
from tests.support.whisper import MELS, POSITIONS, START, item


@pytest.fixture(scope="module")
def engine(whisper_folder: Path) -> Engine:
    return Engine(whisper_folder)


def changed(**fields: Any) -> MediaItem:
    return msgspec.structs.replace(item(0), **fields)


NAN = np.full((MELS, 2 * POSITIONS), np.nan, np.float32)


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ((), "exactly one audio item, not 0"),
        ((item(0), item(1)), "exactly one audio item, not 2"),
        ((changed(features=item(0).features[:, :-1]),), f"float32 {MELS}x79, not float32 {MELS}x80"),
        ((changed(features=item(0).features[:, :0]),), f"float32 {MELS}x0, not"),
        ((changed(features=np.zeros((MELS, 82), np.float32)),), f"float32 {MELS}x82, not"),
        ((changed(features=item(0).features[1:]),), f"float32 {MELS - 1}x80, not"),
        ((changed(features=item(0).features.astype(np.float64)),), "float64"),
        ((changed(features=item(0).features[0]),), "features are float32 80"),
        ((changed(features=NAN),), "NaN"),
        ((changed(encoded_columns=40),), "all columns of features are encoded, not 40 of 80"),
        ((changed(length=1),), "start 0 and length 0"),
        ((changed(hash=b""),), "must not be empty"),
    ],
)
def test_items(engine: Engine, items: tuple[MediaItem, ...], text: str) -> None:
    error = engine.generate([START], greedy(2), items=items).error
    assert error is not None
    assert text in error


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (greedy(2, token_probs=TokenProbs(1, (3,))), "position 1"),
        (greedy(2, token_probs=TokenProbs(0, (3000,))), "token id 3000"),
        (greedy(2, begin_suppress_tokens=(-1,)), "begin_suppress_tokens has token id -1"),
        (greedy(2, timestamp_rule=TimestampRule(begin=89, no_timestamps=88, end=999)), "token id 999"),
        (greedy(2, timestamp_rule=TimestampRule(begin=89, no_timestamps=88, end=8, max_initial=-1)), "max_initial"),
        (PoolingParams(task="embed"), "its pooling tasks are align"),
        (PoolingParams(task="align", num_positions=41), "num_positions must be from 1 to 40"),
        (PoolingParams(task="align", skip_tokens=1), "skip_tokens"),
    ],
)
def test_tasks(engine: Engine, task: Any, text: str) -> None:
    error = engine.generate([START], task, items=(item(0),)).error
    assert error is not None
    assert text in error


def test_models_without_items(tmp_path: Path) -> None:
    engine = Engine(save_model(make_model("llama"), tmp_path))
    assert engine.info.kind == Generates()
    assert "does not accept audio" in (engine.generate([1], greedy(2), items=(item(0),)).error or "")
    assert "no task 'align'" in (engine.generate([1], PoolingParams(task="align")).error or "")


def test_an_open_request_gets_no_second_item(engine: Engine) -> None:
    engine.add("a", [START], greedy(2), items=(item(0),), open=True)
    engine.extend("a", [1], items=(item(1),))
    assert "one audio item per request" in (engine.results["a"].error or "")
    engine.core.check()


def test_whisper_runs_as_specs_only(whisper_folder: Path) -> None:
    with pytest.raises(ModelError, match="only Quire's own implementation"):
        Engine(whisper_folder, model=ModelOptions(model_impl="transformers"))


def test_a_cache_that_does_not_hold_an_item(whisper_folder: Path) -> None:
    info = Engine(whisper_folder).info
    with pytest.raises(Exception, match="too small for the audio of one request"):
        Engine(whisper_folder, kv_cache_memory_bytes=2 * info.cache_bytes // info.num_blocks)
