"""Builds executors around loaded models: when an engine starts, and whenever it wakes up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from quire.engine.build.core_config import CoreConfig
from quire.engine.build.delayed_streams import DelayedStreams
from quire.engine.build.ranks import input_builder, request_table, state_caches
from quire.engine.build.transfer import OpenedTransfer
from quire.engine.execution.alignment import Aligner
from quire.engine.execution.cache import KVCache
from quire.engine.execution.devices.device import Device
from quire.engine.execution.encoder_runner import CTCRunner, DualEncoderRunner, EncoderRunner, PackedRunner
from quire.engine.execution.executor import Executor
from quire.engine.execution.item_encoder import item_encoder
from quire.engine.execution.pooling import Pooler, hidden_states
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.runner import ModelRunner
from quire.engine.execution.sampling.compiler import GrammarCompiler
from quire.engine.kv_events.publisher import KVEventPublisher
from quire.engine.models.loader import LoadedModel
from quire.engine.models.networks.audio_encoder import CTCModel
from quire.engine.models.networks.decoder import Decoder, LanguageModel
from quire.engine.models.networks.dual_encoder import DualEncoder
from quire.engine.models.networks.encoder import Encoder, TextEncoder
from quire.engine.scheduling.block_tables import BlockGroups


@dataclass(frozen=True, slots=True)
class ExecutorBuild:
    """What the executor of a decoder is built from, beside the model and its KV cache.

    Attributes:
        context_len: tokens of the longest sequence.
        groups: the groups of layers that take blocks.
        snapshots: the most states that are saved.
        inbox: see `ModelRunner`.
    """

    config: CoreConfig
    device: Device
    context_len: int
    grammars: GrammarCompiler
    groups: BlockGroups
    snapshots: int = 0
    inbox: int | None = None

    def executor(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        streaming: DelayedStreams | None = None,
        runner_type: type[ModelRunner] | None = None,
    ) -> Executor:
        """The executor of a decoder.

        Args:
            loaded: the model.
            cache: its KV cache, which nothing else uses.
            streaming: see `delayed_streams_of`.
            runner_type: the class of its runner; None for models that are not divided among ranks.
        """
        config, device, options = self.config, self.device, self.config.engine
        model = cast("LanguageModel", loaded.model)
        model.set_context(self.context_len)
        cross_len = 0 if loaded.speech is None else loaded.speech.info.num_positions
        table = request_table(config, model, self.groups, self.context_len, cross_len)
        inputs = input_builder(config, device, table)
        attention = device.attention(cache, table, model, loaded.dtype, options)
        sampler = device.sampler(table, loaded.vocab_size, self.grammars.initial_state, inputs)
        states = state_caches(cache, table, self.snapshots if streaming is None else 0)
        if streaming is None:
            items = item_encoder(model, cache, options.block_size)
        else:
            assert states is not None
            items = streaming.encoder(device, table, states)
        of_layers = states if streaming is None else None  # those of a streaming encoder are read by it alone
        runner = (runner_type or ModelRunner)(
            model,
            inputs,
            attention,
            device.step_runner(model, inputs, attention, of_layers),
            table,
            sampler,
            hidden_states() if loaded.pooler is None else Pooler(cast("Decoder", model).pooler_heads),
            items,
            _aligner(loaded, table, cache),
            of_layers,
            self.inbox,
        )
        return device.executor(runner, cache, sampler.max_steps_in_flight)


def _aligner(loaded: LoadedModel, table: RequestTable, cache: KVCache) -> Aligner | None:
    if loaded.speech is None or not loaded.speech.info.aligns_words:
        return None
    return Aligner(loaded.speech, table, cache.layers)


def encoder_executor(device: Device, loaded: LoadedModel, _: None) -> Executor:
    """The executor of an encoder, of text, pictures or audio, which has no KV cache."""
    return device.encoder_executor(_encoder_runner(loaded, device))


def _encoder_runner(loaded: LoadedModel, device: Device) -> PackedRunner:
    model = cast("TextEncoder | CTCModel | DualEncoder", loaded.model)
    if isinstance(model, CTCModel):
        return CTCRunner(model)
    if isinstance(model, DualEncoder):
        return DualEncoderRunner(model, Pooler(model.pooler_heads), device.torch_device)
    model.set_context(loaded.context_len)
    pooler = Pooler(model.pooler_heads, model if isinstance(model, Encoder) else None)
    return EncoderRunner(model, pooler, device.torch_device)


@contextmanager
def closing_after_errors(*owners: Executor | GrammarCompiler | KVEventPublisher | OpenedTransfer) -> Iterator[None]:
    """Close owners of threads if an exception is raised within."""
    try:
        yield
    except BaseException:
        for owner in owners:
            owner.close()
        raise
