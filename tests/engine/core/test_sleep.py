"""Engines that sleep: their memory is freed, and afterwards they give the same results."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from quire.config.options import ParallelOptions
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import MemoryTag, Ping, Pong, Sleep, SleepLevel, SleepState, Wake
from quire.engine.core.sleep import OffloadedWeights
from quire.engine.execution.devices.device import Device
from quire.engine.execution.devices.host import CpuDevice, ReferenceDevice
from quire.engine.models.errors import UnsupportedModel
from tests.support.audio_models import make_audio_model, noise, prompt_with, save_audio_model
from tests.support.encoders import tiny_embedder
from tests.support.engine import Engine, greedy, random_prompt
from tests.support.models import make_model, save_model
from tests.support.sleep import ALL, AWAKE, answer, sleep
from tests.support.streaming_models import make_streaming_model, save_streaming_model
from tests.support.variants import covering
from tests.support.whisper import ENGLISH, START, TRANSCRIBE, item, make_whisper, save_whisper

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama", num_hidden_layers=1), tmp_path_factory.mktemp("model"))


def resident() -> float:
    """Memory of this process, in MiB."""
    return psutil.Process().memory_info().rss / MIB


@pytest.mark.parametrize(("level", "device"), covering([1, 2], [CpuDevice, ReferenceDevice]))
def test_tokens_are_the_same_afterwards(folder: Path, level: SleepLevel, device: Callable[[], Device]) -> None:
    engine = Engine(folder, device=device(), enable_sleep_mode=True, max_num_seqs=2)
    prompt = random_prompt(1, 40)
    before = engine.generate(prompt, greedy(8))
    assert engine.generate(prompt, greedy(8)).outputs[0].cached_tokens == 32
    for _ in range(2):
        sleep(engine, level)
        assert answer(engine, Wake(ALL)) == AWAKE
        after = engine.generate(prompt, greedy(8))
        assert after.tokens == before.tokens
        assert after.outputs[0].cached_tokens == 0  # the prefix cache was emptied
        assert engine.generate(prompt, greedy(8)).outputs[0].cached_tokens == 32


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_returned_to_the_system(tmp_path: Path, level: SleepLevel) -> None:
    """64 MiB of pages; and on level 2 about as much of weights, which level 1 keeps where those of a CPU are."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 1024, "intermediate_size": 4096, "head_dim": 16}
    folder = save_model(make_model("llama", **sizes), tmp_path)
    gc.collect()
    engine = Engine(folder, enable_sleep_mode=True, kv_cache_memory_bytes=64 * MIB)
    executor: Any = engine.core.executor
    executor.cache.ensure_mapped(engine.info.num_blocks - 1)
    parameter, pages = weakref.ref(next(engine.model.parameters())), weakref.ref(executor.cache)
    weights = engine.info.weight_bytes / MIB
    assert weights > 40
    del executor, engine.runner
    before = resident()
    sleep(engine, level)
    freed = before - resident()
    assert pages() is None
    assert (parameter() is None) == (level == 2)
    assert freed > 60 + (0.9 * weights if level == 2 else 0)


@pytest.mark.parametrize("level", [1, 2])
def test_embeddings_are_the_same_afterwards(tmp_path: Path, level: SleepLevel) -> None:
    engine = Engine(tiny_embedder(tmp_path), enable_sleep_mode=True)
    before = engine.generate([5, 6, 7], PoolingParams(task="embed")).pooled
    sleep(engine, level)
    assert answer(engine, Wake(ALL)) == AWAKE
    after = engine.generate([5, 6, 7], PoolingParams(task="embed")).pooled
    assert before is not None
    assert after is not None
    assert np.array_equal(before.data, after.data)


@pytest.mark.parametrize("level", [1, 2])
def test_transcriptions_are_the_same_afterwards(tmp_path: Path, level: SleepLevel) -> None:
    engine = Engine(save_whisper(make_whisper(), tmp_path), enable_sleep_mode=True)
    prompt = [START, ENGLISH, TRANSCRIBE]
    before = engine.generate(prompt, greedy(8), items=(item(1),)).tokens
    sleep(engine, level)
    assert answer(engine, Wake(ALL)) == AWAKE
    assert engine.generate(prompt, greedy(8), items=(item(1),)).tokens == before


@pytest.mark.parametrize("level", [1, 2])
def test_the_encoder_cache_is_emptied(tmp_path: Path, level: SleepLevel) -> None:
    engine = Engine(save_audio_model(make_audio_model("voxtral"), tmp_path), enable_sleep_mode=True)
    prompt, items = prompt_with(engine.audio, [5], noise(1, 0.4), [9])
    before = engine.generate(prompt, greedy(8), items=items).tokens
    sleep(engine, level)
    assert answer(engine, Wake(ALL)) == AWAKE
    assert engine.generate(prompt, greedy(8), items=items).tokens == before
    assert (engine.items_encoded, engine.items_cached) == (2, 0)


@pytest.mark.parametrize(("level", "tags"), covering([1, 2], [("weights", "kv_cache"), ("kv_cache", "weights")]))
def test_weights_and_kv_cache_may_wake_up_one_after_the_other(
    folder: Path, level: SleepLevel, tags: tuple[MemoryTag, MemoryTag]
) -> None:
    engine = Engine(folder, enable_sleep_mode=True)
    before = engine.generate([1, 2, 3], greedy(5)).tokens
    sleep(engine, level)
    first, second = tags
    for _ in range(2):  # what is awake is left alone
        assert answer(engine, Wake(frozenset((first,)))) == SleepState(frozenset((second,)))
    assert "POST /wake_up" in str(engine.generate([1], greedy(1)).error)
    sleep(engine, level)
    assert answer(engine, Wake(frozenset((first,)))) == SleepState(frozenset((second,)))
    assert answer(engine, Wake(ALL)) == AWAKE
    assert engine.generate([1, 2, 3], greedy(5)).tokens == before


def test_of_two_levels_the_deeper_one_counts(folder: Path) -> None:
    engine = Engine(folder, enable_sleep_mode=True)
    before = engine.generate([1, 2, 3], greedy(5)).tokens
    parameter = weakref.ref(next(engine.model.parameters()))
    del engine.runner
    levels: tuple[tuple[SleepLevel, bool], ...] = ((1, True), (1, True), (2, False), (1, False))
    for level, in_memory in levels:
        sleep(engine, level)
        assert (parameter() is not None) == in_memory
    assert answer(engine, Wake(ALL)) == AWAKE
    assert engine.generate([1, 2, 3], greedy(5)).tokens == before


def test_wake_up_without_sleep_changes_nothing(folder: Path) -> None:
    engine = Engine(folder, enable_sleep_mode=True)
    engine.add("running", [1, 2, 3], greedy(5))
    engine.step()
    executor = engine.core.executor
    assert answer(engine, Wake(ALL)) == AWAKE
    assert engine.core.executor is executor
    engine.run()
    assert engine.results["running"].finish_reason == "length"


def test_an_engine_with_requests_stays_awake(folder: Path) -> None:
    engine = Engine(folder, enable_sleep_mode=True)
    expected = engine.generate([1, 2, 3], greedy(5)).tokens
    engine.add("running", [1, 2, 3], greedy(5))
    engine.step()
    assert answer(engine, Sleep(1)) == SleepState(frozenset(), "requests are running")
    engine.run()
    assert engine.results["running"].tokens == expected
    engine.add("open", [1, 2, 3], greedy(5), open=True)
    assert answer(engine, Sleep(1)).error == "requests are running"


def test_a_checkpoint_that_is_gone_is_named_and_the_engine_still_sleeps(tmp_path: Path) -> None:
    folder = save_model(make_model("llama", num_hidden_layers=1), tmp_path / "model")
    engine = Engine(folder, enable_sleep_mode=True)
    before = engine.generate([1, 2, 3], greedy(5)).tokens
    sleep(engine, 2)
    away = folder.rename(tmp_path / "away")
    state = answer(engine, Wake(ALL))
    assert state.asleep == ALL
    assert "could not be woken" in str(state.error)
    away.rename(folder)
    assert answer(engine, Wake(ALL)) == AWAKE
    assert engine.generate([1, 2, 3], greedy(5)).tokens == before


def test_pings_are_answered_while_weights_are_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(folder, enable_sleep_mode=True)
    sleep(engine, 2)
    arriving = [Ping(7)]
    monkeypatch.setattr(engine.channel, "receive_arrived", lambda *_: arriving.pop() if arriving else None)
    engine.core._handle(Wake(ALL))
    assert engine.channel.sent == [Pong(7), AWAKE]


def test_without_the_flag_the_engine_does_not_sleep(folder: Path) -> None:
    state = answer(Engine(folder), Sleep(1))
    assert state == SleepState(frozenset(), "the engine was started without --enable-sleep-mode")


@pytest.mark.parametrize("parallel", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_are_refused(folder: Path, parallel: dict[str, int]) -> None:
    with pytest.raises(UnsupportedModel, match="--enable-sleep-mode works with one rank"):
        Engine(folder, enable_sleep_mode=True, parallel=ParallelOptions(**parallel))


def test_models_that_transcribe_while_audio_arrives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="--enable-sleep-mode does not work with models that transcribe"):
        Engine(save_streaming_model(make_streaming_model(), tmp_path), enable_sleep_mode=True)


class Part(nn.Module):
    """Tensors of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4), requires_grad=False)
        self.tied = self.weight
        self.buffer: torch.Tensor
        self.register_buffer("buffer", torch.randn(3))
        self.packed = [{"values": torch.randn(5)}]
        self.view = self.packed[0]["values"][2:]


def test_offloaded_weights_come_back_as_they_were() -> None:
    parts = [Part(), Part()]
    model = nn.Sequential(*parts)
    tensors = [t for part in parts for t in (part.weight, part.buffer, part.packed[0]["values"], part.view)]
    before = [tensor.clone() for tensor in tensors]
    away = OffloadedWeights(model, torch.device("cpu"))
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    away.restore()
    assert all(map(torch.equal, tensors, before))
    part = parts[0]
    assert part.tied is part.weight
    part.packed[0]["values"][2] = 7.0
    assert part.view[0] == 7.0
