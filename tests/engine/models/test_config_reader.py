"""The process that reads configs."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from quire.engine.models.config.pooling import PoolingOptions
from quire.engine.models.config_reader import ConfigReader, ReadingOptions
from quire.engine.models.errors import BrokenFolder


@pytest.mark.parametrize("has_folders", [False, True])
def test_an_end_of_the_process_is_an_error_of_the_model(has_folders: bool, tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    configs = ConfigReader()
    (process,) = set(multiprocessing.active_children()) - before
    if has_folders:
        configs.start([tmp_path], ReadingOptions("auto", {}, PoolingOptions()))
    process.kill()
    process.join()
    if not has_folders:
        configs.start([tmp_path], ReadingOptions("auto", {}, PoolingOptions()))
    with pytest.raises(BrokenFolder, match="ended unexpectedly"):
        configs.next()
