"""Configs that earlier starts have read."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.models import config_cache
from quire.engine.models.config.pooling import PoolingOptions
from quire.engine.models.config_cache import ConfigCache
from quire.engine.models.config_reader import ConfigReader, ReadingOptions
from quire.engine.models.errors import UnknownArchitecture
from quire.engine.models.model_config import ModelConfig, read_model_config

BUNDLED = Path(config_cache.__file__).parents[2] / "bundled"
OPTIONS = ReadingOptions("quire", {}, PoolingOptions())


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_bytes((BUNDLED / "nano" / "config.json").read_bytes())
    return made


def kept(cache_home: Path) -> list[Path]:
    return list((cache_home / "quire" / "configs").glob("*.config"))


def add(folder: Path) -> ModelConfig:
    cache, config = ConfigCache(), read_model_config(folder)
    cache.add(cache.key_of(folder, OPTIONS), config)
    return config


def get(folder: Path, options: ReadingOptions = OPTIONS) -> ModelConfig | None:
    cache = ConfigCache()
    return cache.get(cache.key_of(folder, options))


@pytest.mark.parametrize("model", sorted(path.name for path in BUNDLED.iterdir() if (path / "config.json").exists()))
def test_a_kept_config_equals_the_one_that_was_read(model: str) -> None:
    config = add(BUNDLED / model)
    assert get(BUNDLED / model) == config
    assert ConfigCache().has_any()


def test_a_second_start_needs_no_process(folder: Path, cache_home: Path) -> None:
    read = []
    for _ in range(2):
        processes = set(multiprocessing.active_children())
        configs = ConfigReader()
        configs.start([folder, folder], OPTIONS)
        started = set(multiprocessing.active_children()) - processes
        read.append((len(started), configs.next(), configs.next()))
        for process in started:
            process.join()
    config = read_model_config(folder)
    assert read == [(1, config, config), (0, config, config)]
    assert len(kept(cache_home)) == 1


def test_a_process_that_has_begun_reads_what_is_not_kept(folder: Path) -> None:
    config = add(folder)
    configs = ConfigReader()
    configs.begin()
    configs.start([folder, BUNDLED / "nano_embed", folder], OPTIONS)
    assert [configs.next() for _ in range(3)] == [config, read_model_config(BUNDLED / "nano_embed"), config]


def test_what_cannot_be_read_is_not_kept(folder: Path, cache_home: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "unknown"}')
    configs = ConfigReader()
    configs.start([folder], OPTIONS)
    with pytest.raises(UnknownArchitecture):
        configs.next()
    assert not kept(cache_home)


def _change_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_bytes(path.read_bytes() + b" ")


def _touch_config(folder: Path) -> None:
    os.utime(folder / "config.json", ns=(1, 1))


def _add_file(folder: Path) -> None:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")


@pytest.mark.parametrize("change", [_change_config, _touch_config, _add_file])
def test_a_changed_folder_is_read_again(folder: Path, change: Callable[[Path], None]) -> None:
    add(folder)
    change(folder)
    assert get(folder) is None


def test_options_have_configs_of_their_own(folder: Path) -> None:
    add(folder)
    assert get(folder, OPTIONS._replace(overrides={"num_hidden_layers": 1})) is None


def test_other_packages_have_configs_of_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of transformers, or a package with families of models."""
    add(folder)
    (tmp_path / "site" / "transformers-99.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    assert get(folder) is None
    assert not ConfigCache().has_any()


class _Harmful:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps(_Harmful()), pickle.dumps({})])
def test_a_damaged_file_is_passed_over(
    folder: Path, cache_home: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It calls nothing, even if its digest is right."""
    monkeypatch.setattr(os, "system", pytest.fail)
    config = add(folder)
    (path,) = kept(cache_home)
    path.write_bytes(config_cache.hashlib.sha256(data).digest() + data)
    assert get(folder) is None
    path.write_bytes(data)
    assert get(folder) is None
    assert add(folder) == config
    assert get(folder) == config


def test_the_oldest_are_removed(folder: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_cache, "_MOST_CONFIGS", 2)
    cache, config = ConfigCache(), read_model_config(folder)
    for index, key in enumerate(["a", "b", "c"]):
        cache.add(key, config)
        for path in kept(cache_home):
            if path.name.endswith(f"{key}.config"):
                os.utime(path, (index, index))
    assert sorted(path.name[-8:] for path in kept(cache_home)) == ["b.config", "c.config"]


def test_without_a_cache_configs_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.models.user_cache.os.access", lambda *_: False)
    add(folder)
    assert get(folder) is None
    assert not ConfigCache().has_any()
