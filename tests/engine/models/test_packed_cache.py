"""Packed weights are cached: a model that starts again has the same weights, which are read from a file."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from quire.config.options import ModelOptions, ParallelOptions
from quire.engine.client.protocol import UpdateWeights
from quire.engine.models.checkpoint import model_cache
from quire.engine.models.checkpoint.packed_cache import PackedCache
from quire.kernels import native
from quire.kernels.linear import SAVED_KINDS, SavableWeight, pack_weight
from tests.support.commands import do
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="nothing is packed without compiled kernels")
PROMPT = random_prompt(1, 40)
INT8 = ModelOptions(dtype="bfloat16", quantization="int8")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of cached weights, of models of any size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_cache, "_LEAST", 0)
    return tmp_path / "cache" / "quire" / "packed"


def wait_until_written() -> None:
    for thread in threading.enumerate():
        if thread.name == "quire-packed-cache":
            thread.join()


def llama(folder: Path, seed: int = 0) -> Path:
    return save_model(make_model("llama", seed=seed, num_hidden_layers=2), folder)


def tokens(folder: Path, model: ModelOptions = INT8) -> list[int]:
    """The tokens of a new engine, whose packed weights are cached then."""
    generated = Engine(folder, model=model).generate(PROMPT, greedy(16)).tokens
    wait_until_written()
    return generated


def files(cache: Path) -> list[Path]:
    return sorted(cache.iterdir()) if cache.is_dir() else []


def was_used(path: Path) -> bool:
    """Whether the weights in a file were used since the last call, or since it was written."""
    last = path.stat().st_mtime
    os.utime(path, (0, 0))
    return last != 0


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_model_that_starts_again_reads_its_file(tmp_path: Path, cache: Path, quantization: str) -> None:
    folder, model = llama(tmp_path / "model"), INT8.model_copy(update={"quantization": quantization})
    expected = tokens(folder, model.model_copy(update={"packed_weight_cache_size": 0}))
    assert files(cache) == []
    assert tokens(folder, model) == expected
    (file,) = files(cache)
    written = file.stat().st_ino
    assert was_used(file)
    engine = Engine(folder, model=model)
    assert was_used(file)
    assert engine.generate(PROMPT, greedy(16)).tokens == expected
    wait_until_written()
    assert [path.stat().st_ino for path in files(cache)] == [written]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "llama-biased-tied", "mixtral"])
def test_each_rank_has_a_file(tmp_path: Path, cache: Path, case: str) -> None:
    folder = save_model(make_model(case, num_hidden_layers=2), tmp_path / "model")
    parallel = ParallelOptions(tensor_parallel_size=2)
    generated = []
    for _ in range(2):
        engine = Engine(folder, model=INT8, parallel=parallel)
        generated.append(engine.generate(PROMPT, greedy(16)).tokens)
        engine.core.close()
        wait_until_written()
    assert generated[0] == generated[1]
    assert len(files(cache)) == 2


def test_other_weights_in_the_same_folder_are_not_mistaken_for_cached_ones(tmp_path: Path, cache: Path) -> None:
    folder = llama(tmp_path / "model")
    before = tokens(folder)
    other = llama(tmp_path / "other", 1)
    os.replace(other / "model.safetensors", folder / "model.safetensors")
    after = tokens(folder)
    assert after != before
    assert after == tokens(folder, INT8.model_copy(update={"packed_weight_cache_size": 0}))
    assert len(files(cache)) == 2


def test_a_server_keeps_its_weights_whatever_becomes_of_the_file(tmp_path: Path, cache: Path) -> None:
    folder = llama(tmp_path / "model")
    expected = tokens(folder)
    (file,) = files(cache)
    engine = Engine(folder, model=INT8)
    os.truncate(file, 0)
    file.unlink()
    assert engine.generate(PROMPT, greedy(16)).tokens == expected


@pytest.mark.parametrize(
    "damage",
    ["index", *(pytest.param(damage, marks=pytest.mark.slow) for damage in ("truncated", "length", "empty"))],
)
def test_a_damaged_file_is_replaced(tmp_path: Path, cache: Path, damage: str) -> None:
    folder = llama(tmp_path / "model")
    expected = tokens(folder)
    (file,) = files(cache)
    content = file.read_bytes()
    changed = {
        "truncated": content[: len(content) // 2],
        "index": content[:-60] + b"?" + content[-59:],
        "length": content[:-16] + b"\xff" * 8 + content[-8:],
        "empty": b"",
    }
    file.write_bytes(changed[damage])
    assert tokens(folder) == expected
    assert tokens(folder) == expected
    assert files(cache)[0].stat().st_size == len(content)


def test_an_update_of_weights_leaves_the_file_as_it_is(tmp_path: Path, cache: Path) -> None:
    old, new = llama(tmp_path / "old"), llama(tmp_path / "new", 1)
    before, expected = tokens(old), tokens(new, INT8.model_copy(update={"packed_weight_cache_size": 0}))
    (file,) = files(cache)
    content = file.read_bytes()
    assert was_used(file)
    engine = Engine(old, model=INT8, weight_update_path=tmp_path)
    assert was_used(file)
    assert engine.generate(PROMPT, greedy(16)).tokens == before
    do(engine, UpdateWeights(str(new)))
    assert engine.generate(PROMPT, greedy(16)).tokens == expected
    assert files(cache) == [file]
    assert file.read_bytes() == content
    assert tokens(old) == before


def packed(quantization: str = "int8") -> SavableWeight:
    weight = pack_weight(torch.randn(64, 128).bfloat16(), quantization)  # type: ignore[arg-type]
    assert isinstance(weight, SavableWeight)
    return weight


def write(cache: PackedCache, key: str) -> int:
    """Write a weight under a key; returns the size of its file."""
    written = cache.create(key, 0)
    assert written is not None
    written.add("weight", packed())
    written.finish()
    wait_until_written()
    return (cache._folder / f"{key}.weights").stat().st_size


def test_the_weights_used_last_are_kept(tmp_path: Path) -> None:
    size = write(PackedCache(tmp_path, 1 << 30), "a")
    cache = PackedCache(tmp_path, 2 * size)
    write(cache, "b")
    for used, key in enumerate("ba"):
        os.utime(tmp_path / f"{key}.weights", (used, used))
    write(cache, "c")
    assert [path.name for path in files(tmp_path)] == ["a.weights", "c.weights"]
    assert cache.open("a") is not None


def test_weights_of_more_than_the_limit_are_not_cached(tmp_path: Path) -> None:
    cache = PackedCache(tmp_path, 1 << 10)
    assert cache.create("large", 1 << 20) is None
    written = cache.create("larger-than-expected", 0)
    assert written is not None
    written.add("weight", packed())
    written.finish()
    assert files(tmp_path) == []


def test_processes_that_start_at_once_write_one_file(tmp_path: Path) -> None:
    cache = PackedCache(tmp_path, 1 << 30)
    both = [cache.create("key", 0), cache.create("key", 0)]
    for written in both:
        assert written is not None
        written.add("weight", packed())
        assert cache.open("key") is None  # nobody sees half of a file
    for written in both:
        assert written is not None
        written.finish()
        wait_until_written()
    assert [path.name for path in files(tmp_path)] == ["key.weights"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    cache = PackedCache(tmp_path, 1 << 30)
    abandoned, begun = tmp_path / "old.1-1.unfinished", tmp_path / "new.2-2.unfinished"
    abandoned.write_bytes(b"half")
    begun.write_bytes(b"half")
    minute_ago = time.time() - 60
    os.utime(abandoned, (minute_ago, minute_ago))
    write(cache, "key")
    assert files(tmp_path) == [tmp_path / "key.weights", begun]


def test_a_file_whose_writer_takes_long_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PackedCache(tmp_path, 1 << 30)
    slow = cache.create("slow", 0)
    assert slow is not None
    slow.add("weight", packed())
    (unfinished,) = files(tmp_path)
    os.utime(unfinished, (0, 0))
    write(cache, "fast")
    monkeypatch.setattr(os, "fsync", lambda _: os.utime(unfinished, (0, 0)))  # the disk takes long
    slow.finish()
    wait_until_written()
    assert [path.name for path in files(tmp_path)] == ["fast.weights", "slow.weights"]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_restored_weight_computes_the_same(quantization: str) -> None:
    weight, x = packed(quantization), torch.randn(3, 128).bfloat16()
    saved = weight.saved()
    restored = SAVED_KINDS[saved.kind].restored(saved)
    assert torch.equal(restored(x, None), weight(x, None))
    assert restored.nbytes == weight.nbytes
