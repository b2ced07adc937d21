"""An engine without HTTP and background threads, stepped by the test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from quire.config.options import EngineOptions, ModelOptions, ParallelOptions
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.engine import build_core
from quire.engine.build.unloaded import info_of_unloaded
from quire.engine.client.audio import AudioInfo
from quire.engine.client.model_info import Generates, ModelInfo, Pools, Transcribes
from quire.engine.client.pictures import PictureInfo
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import (
    Abort,
    AddRequest,
    ErrorOutput,
    ExtendRequest,
    MediaItem,
    PooledOutput,
    RequestOutput,
    StepOutput,
    TokensOutput,
)
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.core.loop import EngineCore
from quire.engine.execution.devices.device import Device
from quire.engine.execution.devices.select import find_device
from quire.engine.execution.ranks.workers import Launcher
from quire.engine.models.config.pooling import PoolingOptions
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.loader import load_model
from quire.engine.models.model_config import read_model_config
from tests.support.deferred import DeferredExecutor
from tests.support.ranks import ThreadRank


@contextmanager
def no_progress(_: int) -> Iterator[Callable[[int], None]]:
    """A progress bar without output."""
    yield lambda _: None


def load(folder: Path, **options: Any) -> Any:
    """Load a model folder into a `LoadedModel`; `options` are those of `ModelOptions`, by default with float32."""
    chosen = ModelOptions(**{"dtype": "float32", **options})
    device = find_device(chosen.device)
    with device.activate():
        config = read_model_config(
            folder, chosen.model_impl, chosen.hf_overrides, language_model_only=chosen.language_model_only
        )
        return load_model(folder, config, chosen, device, no_progress)


def check_unloaded(config: CoreConfig, info: ModelInfo) -> None:
    """Check that a front end without an engine is told the same of the model, without its weights."""
    length = info.max_model_len
    if config.model_config.spec is None and config.model_config.facts.pooler is not None:
        with pytest.raises(UnsupportedModel, match="--max-model-len"):
            info_of_unloaded(config.model_config, ModelOptions(), config.engine, config.parallel)
    options = config.model.model_copy(update={"max_model_len": length})  # a small KV cache may have reduced it
    unloaded = info_of_unloaded(config.model_config, options, config.engine, config.parallel)
    assert unloaded.max_model_len == length
    assert (unloaded.vocab_size, unloaded.architecture) == (info.vocab_size, info.architecture)
    assert unloaded.implementation == info.implementation
    assert unloaded.media_tokens == info.media_tokens
    assert unloaded.tasks == info.tasks
    pictures = getattr(info.kind, "pictures", None)
    if pictures is None:
        assert unloaded.kind == info.kind
        return
    assert isinstance(unloaded.kind, Generates | Pools)
    assert unloaded.kind.pictures is not None
    assert unloaded.kind.pictures.item_tokens >= pictures.item_tokens  # which the engine's memory limits
    room = structs.replace(unloaded.kind.pictures, item_tokens=pictures.item_tokens)
    assert structs.replace(unloaded.kind, pictures=room) == info.kind


@dataclass
class Channel:
    """Stand in for the transport: record the messages that the core sends."""

    sent: list[Any] = field(default_factory=list)
    inbox: int | None = None

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self, _: float | None) -> None:
        return None

    def receive_arrived(self, *_: type) -> None:
        return None

    def waker(self) -> Callable[[], None]:
        return lambda: None


@dataclass
class Result:
    """All outputs of one request."""

    tokens: list[int] = field(default_factory=list)
    outputs: list[TokensOutput] = field(default_factory=list)
    pooled: PooledOutput | None = None
    error: str | None = None
    is_refused: bool = False  # the error is that of the request

    @property
    def finish_reason(self) -> str | None:
        if self.error is not None:
            return "error"
        return self.outputs[-1].finish_reason if self.outputs else None


class Engine:
    """An `EngineCore` with a model, stepped by the test; its state is checked after each step.

    By default every step is scheduled.

    Args:
        model: computes in float32 unless it sets another dtype, so that tokens can be compared.
        in_flight: maximum number of steps whose results are pending.
        parallel: ranks that run the model.
        launch: starts them; in threads of this process by default.
        device: runs the model instead of the device that `model` names.
        inbox: see `ModelRunner`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: ModelOptions | None = None,
        in_flight: int = 1,
        parallel: ParallelOptions | None = None,
        device: Device | None = None,
        launch: Launcher = ThreadRank,
        inbox: int | None = None,
        **options: Any,
    ) -> None:
        self.channel = Channel(inbox=inbox)
        defaults: dict[str, Any] = {
            "kv_cache_memory_bytes": 8 << 20,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 512,
            "num_scheduler_steps": 1,
        }
        model = model or ModelOptions()
        if model.dtype == "auto":
            model = model.model_copy(update={"dtype": "float32"})
        config = CoreConfig(
            folder=folder,
            model_config=read_model_config(
                folder,
                model.model_impl,
                model.hf_overrides,
                PoolingOptions(model.task, model.convert, model.pooler_config),
                language_model_only=model.language_model_only,
            ),
            model=model,
            engine=EngineOptions(**{**defaults, **options}),
            parallel=parallel or ParallelOptions(),
        )
        self.core: EngineCore
        self.info: ModelInfo
        self.core, self.info = build_core(config, self.channel, device, launch)  # type: ignore[arg-type]
        check_unloaded(config, self.info)
        executor: Any = getattr(self.core.executor, "_inner", self.core.executor)  # of the core's rank
        self.runner: Any = executor._runner
        if in_flight > 1:
            self.core.executor = DeferredExecutor(self.core.executor, in_flight)
        self.results: dict[str, Result] = {}
        self.preemptions = self.drafted = self.accepted = self.corrupted = 0
        self.items_encoded = self.items_cached = self.steps = 0
        self.waiting = 0  # requests, as metrics show them
        self.hits = Counter[str]()  # prompt tokens by the tier that had them

    def add(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams | PoolingParams, **fields: Any
    ) -> None:
        self.results[request_id] = Result()
        message = AddRequest(request_id, np.array(prompt, np.int32), params, **fields)
        self.core._handle(message)
        wait(prepared for _, prepared in self.core._preparing)
        self.core._add_prepared()
        self._collect()

    def extend(
        self, request_id: str, tokens: Sequence[int], *, last: bool = False, items: tuple[MediaItem, ...] = ()
    ) -> None:
        self.core._handle(ExtendRequest(request_id, np.array(tokens, np.int32), last, items))
        self._collect()

    def abort(self, request_id: str) -> None:
        self.core._handle(Abort([request_id]))
        self._collect()

    @property
    def audio(self) -> AudioInfo:
        """How the model reads audio among its tokens."""
        assert isinstance(self.info.kind, Generates)
        assert self.info.kind.audio is not None
        return self.info.kind.audio

    @property
    def pictures(self) -> PictureInfo:
        """How the model reads pictures."""
        assert isinstance(self.info.kind, Generates | Pools)
        assert self.info.kind.pictures is not None
        return self.info.kind.pictures

    @property
    def speech(self) -> Transcribes:
        assert isinstance(self.info.kind, Transcribes)
        return self.info.kind

    @property
    def pools(self) -> Pools:
        assert isinstance(self.info.kind, Pools)
        return self.info.kind

    @property
    def model(self) -> Any:
        return self.runner.model

    @property
    def busy(self) -> bool:
        return self.core.has_work or self.core.is_loading

    @property
    def blocks_used(self) -> int:
        pool = getattr(self.core.scheduler, "pool", None)  # the schedulers of encoders have none
        return 0 if pool is None else pool.num_used

    @property
    def rows_used(self) -> int:
        """Number of sequences in the runner's table."""
        return len(self.runner._table._rows)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of every group of layers."""
        scheduler: Any = self.core.scheduler
        groups = len(scheduler._tables._groups.windows)
        return (self.info.cache_bytes - self.state_bytes) // self.info.num_blocks * groups

    @property
    def state_bytes(self) -> int:
        """Bytes of the slots of states, where the host has them."""
        cache = self.core.executor.cache
        return 0 if cache is None or cache.states is None else cache.states.memory.numel()

    def step(self) -> None:
        while not self.core.has_work:  # all requests wait for a tier
            self.core.take_loaded()
        self.core.take_loaded()
        self.core.step()
        self.core.check()
        self._collect()

    def run(self) -> None:
        while self.busy:
            self.step()

    def generate(self, prompt: Sequence[int], params: SamplingParams | PoolingParams, **fields: Any) -> Result:
        """Run one request to its end."""
        name = f"request-{len(self.results)}"
        self.add(name, prompt, params, **fields)
        self.run()
        return self.results[name]

    def _collect(self) -> None:
        for message in self.channel.sent:
            if isinstance(message, StepOutput):
                self.steps += message.stats.step_tokens > 0
                self.preemptions += message.stats.preemptions
                self.drafted += message.stats.drafted_tokens
                self.accepted += message.stats.accepted_tokens
                self.corrupted += message.stats.corrupted
                self.hits.update(message.stats.hits_by_source)
                self.waiting = message.stats.waiting
                self.items_encoded += message.stats.item_queries - message.stats.item_hits
                self.items_cached += message.stats.item_hits
                for output in message.outputs:
                    self._take(self.results[output.request_id], output)
        self.channel.sent.clear()

    def _take(self, result: Result, output: RequestOutput) -> None:
        match output:
            case TokensOutput():
                result.tokens += output.token_ids
                result.outputs.append(output)
            case PooledOutput():
                result.pooled = output
            case ErrorOutput(error=error, invalid=invalid):
                result.error = error
                result.is_refused = invalid


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    """Parameters of greedy sampling."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)


def random_prompt(seed: int, length: int, vocab: int = 256) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()
