"""Sleeper: frees the memory of an engine's weights and KV cache, and restores it."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar, cast

import psutil
import torch
from torch import nn
from typing_extensions import override

from quire.engine.client.protocol import MemoryTag, SleepLevel
from quire.engine.execution.cache import KVCache
from quire.engine.execution.devices.device import Device
from quire.engine.execution.executor import Executor
from quire.engine.models.loader import LoadedModel
from quire.engine.models.source import tensors_in
from quire.engine.scheduling.encoder_scheduler import EncoderScheduler
from quire.engine.scheduling.plan import StepPlan
from quire.engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)
_ALL: frozenset[MemoryTag] = frozenset(("weights", "kv_cache"))
Cache = TypeVar("Cache", bound="KVCache | None")


class AsleepExecutor(Executor):
    """In place of an executor whose memory was freed."""

    max_steps_in_flight = 1

    @override
    def submit(self, plan: StepPlan) -> NoReturn:
        raise AssertionError("a step was submitted to an engine that is asleep")

    @override
    def prefault(self) -> bool:
        return False

    @override
    def check(self) -> None:
        pass

    @override
    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class EngineParts(Generic[Cache]):
    """How the parts of an engine are made, as often as it wakes up. They hold no part of the model.

    Attributes:
        load: loads the model.
        allocate: allocates the KV cache; for models without one it returns None.
        schedule: makes a scheduler without requests and without cached prefixes.
        execute: makes the executor.
    """

    load: Callable[[], LoadedModel]
    allocate: Callable[[], Cache]
    schedule: Callable[[LoadedModel], Scheduler | EncoderScheduler]
    execute: Callable[[LoadedModel, Cache], Executor]


class Sleeper(Generic[Cache]):
    """Own the model of an engine that can sleep.

    Everything that holds addresses of weights or pages, such as captured steps, belongs to the executor, which is made
    again at each wake-up.

    Attributes:
        asleep: what has no memory.
    """

    def __init__(self, parts: EngineParts[Cache], loaded: LoadedModel, device: Device) -> None:
        """`loaded`: the model, which `parts` makes again."""
        self._parts = parts
        self._device = device
        self._loaded: LoadedModel | None = loaded
        self._away: OffloadedWeights | None = None
        self._cache: list[Cache] = []  # allocated while the weights sleep
        self.asleep: frozenset[MemoryTag] = frozenset()

    @property
    def loaded(self) -> LoadedModel:
        """The model, which is in memory."""
        assert self._loaded is not None
        return self._loaded

    def sleep(self, level: SleepLevel) -> None:
        """Free the memory of the engine, whose executor the caller has closed and dropped.

        With level 1 the weights are moved to the memory of the host, where those of a CPU already are.
        """
        before, started = psutil.Process().memory_info().rss, time.monotonic()
        self._cache.clear()
        if level == 2:
            self._loaded = self._away = None
        elif self._loaded is not None and self._away is None and self._device.torch_device.type != "cpu":
            self._away = OffloadedWeights(self._model(), self._device.torch_device)
        self.asleep = _ALL
        # The core froze its objects; those of the executor may be in cycles.
        gc.unfreeze()
        gc.collect()
        self._device.release_memory()
        after = psutil.Process().memory_info().rss
        logger.info(
            "asleep at level %d after %.1f s; memory of the process: %.2f GiB, before: %.2f GiB",
            level,
            time.monotonic() - started,
            after / 2**30,
            before / 2**30,
        )

    def scheduler(self) -> Scheduler | EncoderScheduler:
        """An empty scheduler for an engine that falls asleep. Called before `sleep`."""
        return self._parts.schedule(self.loaded)

    def wake(self, tags: frozenset[MemoryTag]) -> Executor | None:
        """Restore what sleeps of `tags`.

        Returns:
            The executor; None while something sleeps.

        Raises:
            ModelError: the checkpoint cannot be read any more.
            OutOfCacheMemory: there is not enough memory for the KV cache.
            torch.OutOfMemoryError: there is not enough memory of a GPU. Whatever could not be restored still sleeps.
        """
        started = time.monotonic()
        with self._device.activate():
            if "weights" in tags & self.asleep:
                self._restore_weights()
                self.asleep -= {"weights"}
            if "kv_cache" in tags & self.asleep:
                self._cache.append(self._parts.allocate())
            executor = None
            if self._cache and "weights" not in self.asleep:
                executor = self._executor()
        if self._cache:
            self.asleep -= {"kv_cache"}
        if executor is not None:
            self._cache.clear()  # it is the executor's
            gc.freeze()
            logger.info("awake after %.1f s", time.monotonic() - started)
        return executor

    def _executor(self) -> Executor:
        try:
            return self._parts.execute(self.loaded, self._cache[0])
        except BaseException:
            self._cache.clear()
            self.asleep |= {"kv_cache"}
            raise

    def _restore_weights(self) -> None:
        if self._away is not None:
            self._away.restore()
            self._away = None
        elif self._loaded is None:
            self._loaded = self._parts.load()
            self._device.release_memory()  # what loading needed

    def _model(self) -> nn.Module:
        return cast("nn.Module", self.loaded.model)


class OffloadedWeights:
    """The tensors of a model, moved from their device to the memory of the host.

    The storages are emptied, so that all tensors of the model stay what they are, views of each other included.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in _storages(model, device):
            copy = torch.UntypedStorage(storage.nbytes())
            self._copies.append((storage, copy.copy_(storage)))
            storage.resize_(0)

    def restore(self) -> None:
        """Move the tensors back.

        Raises:
            torch.OutOfMemoryError: the device has not enough memory; the tensors are then away as before.
        """
        try:
            for storage, copy in self._copies:
                storage.resize_(copy.nbytes())
                storage.copy_(copy)
        except torch.OutOfMemoryError:
            for storage, _ in self._copies:
                storage.resize_(0)
            raise


def _storages(model: nn.Module, device: torch.device) -> list[torch.UntypedStorage]:
    """The storages on a device of all tensors of a model: parameters, buffers, packed weights and tables."""
    storages: dict[int, torch.UntypedStorage] = {}
    for _, tensor in tensors_in(model):
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.nbytes():
            storages[storage.data_ptr()] = storage
    return list(storages.values())
