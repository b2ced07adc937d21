"""The process that reads configs."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from quire.engine.models.config.pooling import PoolingOptions
from quire.engine.models.config_reader import ConfigReader, ReadingOptions
from quire.engine.models.errors import BrokenFolder


@pytest.mark.parametrize("has_folders", [False, True])
def test_the_end_of_the_process_is_told(tmp_path: Path, *, has_folders: bool) -> None:
    """It ends, as by a lack of memory, before the folders are sent to it, or before it has read which they are."""
    others = set(multiprocessing.active_children())
    configs = ConfigReader()
    configs.begin()
    (process,) = set(multiprocessing.active_children()) - others
    options = ReadingOptions("quire", {}, PoolingOptions())
    if has_folders:
        configs.start([tmp_path], options)
    process.kill()
    process.join()
    if not has_folders:
        configs.start([tmp_path], options)
    with pytest.raises(BrokenFolder, match="the process that reads model configs ended unexpectedly"):
        configs.next()
