"""Builds an engine core around a model folder, and runs it in a thread or process."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import psutil
import torch
from msgspec import structs
from tqdm import tqdm

from quire.allocator import keep_freed_memory
from quire.config.options import EngineOptions, ModelOptions
from quire.engine.core import EngineCore
from quire.engine.execution.alignment import Aligner
from quire.engine.execution.cache import KVCache, OutOfCacheMemory, block_bytes, count_blocks
from quire.engine.execution.devices.device import Device
from quire.engine.execution.devices.select import find_device
from quire.engine.execution.encoder_runner import CTCRunner, EncoderRunner, PackedRunner
from quire.engine.execution.executor import LocalExecutor, ParallelExecutor
from quire.engine.execution.item_encoder import CrossAttentionEncoder, ItemEncoder, NoItemEncoder, PlaceholderEncoder
from quire.engine.execution.pooling import Pooler, hidden_states, pooling_info
from quire.engine.execution.request_table import RequestTable
from quire.engine.execution.runner import ModelRunner
from quire.engine.execution.sampling.compiler import GrammarCompiler
from quire.engine.execution.sampling.sampler import Sampler
from quire.engine.models.audio_encoder import CTCModel
from quire.engine.models.checkpoint import Progress
from quire.engine.models.decoder import Decoder, LanguageModel
from quire.engine.models.encoder import Encoder
from quire.engine.models.errors import ModelError
from quire.engine.models.loader import LoadedModel, load_model
from quire.engine.models.model_config import ModelConfig
from quire.engine.models.spec import DecoderSpec
from quire.engine.models.transducer import TransducerModel
from quire.engine.scheduling.blocks import BlockPool, hasher_named
from quire.engine.scheduling.encoder_scheduler import EncoderScheduler
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.streaming_build import streaming_of
from quire.engine.transducer_build import build_transducer
from quire.engine.wire.errors import FrontEndClosed
from quire.engine.wire.model_info import ModelInfo, SpeechToTextInfo
from quire.engine.wire.protocol import CoreDied, Ready, Shutdown
from quire.engine.wire.transport import CoreChannel
from quire.kernels import native

logger = logging.getLogger(__name__)
tqdm.set_lock(threading.RLock())  # its own is a semaphore for several processes, which a killed process leaves behind


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Configuration of a core. `memory_share`: bytes for its KV cache, if several engines share the memory."""

    folder: Path
    model_config: ModelConfig
    model: ModelOptions
    engine: EngineOptions
    memory_share: int | None = None


class LoadingStopped(Exception):
    """The front end asked the core to stop before the model was loaded."""


def serve_core(config: CoreConfig, address: str) -> None:
    """Body of a core's thread or process: load the model, serve, and report if either fails."""
    with CoreChannel(address) as channel:
        try:
            _build_and_run(config, channel)
        except LoadingStopped:
            logger.info("loading was cancelled")
        except FrontEndClosed:
            logger.debug("the engine ended with its server")
        except (ModelError, OutOfCacheMemory) as error:
            _report(channel, str(error))
        except Exception as error:  # the edge of the thread: every error must reach the front end
            logger.exception("the engine ended with an error")
            _report(channel, f"{type(error).__name__}: {error}")


def _build_and_run(config: CoreConfig, channel: CoreChannel) -> None:
    core, info = build_core(config, channel)
    gc.freeze()  # a full collection would search all modules, for 150 ms in which no step can start
    try:
        channel.send(Ready(info))
        core.run()
    finally:
        core.close()


def _report(channel: CoreChannel, error: str) -> None:
    with suppress(FrontEndClosed):
        channel.send(CoreDied(error))


def build_core(config: CoreConfig, channel: CoreChannel) -> tuple[EngineCore, ModelInfo]:
    """Load a model and build an engine around it.

    Raises:
        ModelError: the model cannot be loaded.
        OutOfCacheMemory: the KV cache does not fit, or holds too little.
        LoadingStopped: the front end asked to stop.
    """
    options = config.engine
    if options.num_threads is not None:
        native.set_threads(options.num_threads)
    device = find_device(config.model.device)
    logger.info("%s", device.description)
    with device.activate():
        loaded = load_model(config.folder, config.model_config, config.model, device, partial(_progress_bar, channel))
        if isinstance(loaded.model, Encoder | CTCModel):
            core, num_blocks, cache_bytes = _build_encoder(loaded, loaded.model, config, device, channel), 0, 0
        elif isinstance(loaded.model, TransducerModel):
            scheduler, executor, cache_bytes = build_transducer(loaded, loaded.model, options, device)
            vocab, num_blocks = loaded.vocab_size, 0
            core = EngineCore(scheduler, executor, channel, vocab_size=vocab, streaming=loaded.streaming)
        else:
            core, num_blocks, cache_bytes = _build_decoder(loaded, loaded.model, config, device, channel)
    keep_freed_memory()  # after loading: memory that loading frees is not needed again
    info = ModelInfo(
        architecture=loaded.architecture,
        implementation=loaded.implementation,
        device=config.model.device,
        dtype=str(loaded.dtype).removeprefix("torch."),
        vocab_size=loaded.vocab_size,
        max_model_len=core.scheduler.limits.max_model_len,
        num_blocks=num_blocks,
        block_size=options.block_size,
        weight_bytes=loaded.weight_bytes,
        cache_bytes=cache_bytes,
        tasks=_tasks(loaded),
        pooling=None if loaded.pooler is None else pooling_info(loaded.pooler, loaded.model),
        speech=_speech_info(loaded, core.scheduler.limits.max_model_len),
        audio=loaded.audio,
        streaming=loaded.streaming,
    )
    return core, info


def _speech_info(loaded: LoadedModel, context_len: int) -> SpeechToTextInfo | None:
    return None if loaded.speech is None else structs.replace(loaded.speech.info, max_output_tokens=context_len)


def _tasks(loaded: LoadedModel) -> tuple[str, ...]:
    if loaded.speech is not None or loaded.streaming is not None:
        return ("transcribe",)
    if loaded.audio is not None:
        return ("generate", "transcribe")
    return ("generate",) if loaded.pooler is None else loaded.pooler.tasks


def _build_encoder(
    loaded: LoadedModel, model: Encoder | CTCModel, config: CoreConfig, device: Device, channel: CoreChannel
) -> EngineCore:
    """The core around an encoder, of text or audio."""
    options = config.engine
    speech = None if loaded.speech is None else loaded.speech.info
    limits = SchedulerLimits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=loaded.context_len,
        convolutions=() if speech is None else speech.convolutions,
    )
    runner = _encoder_runner(model, loaded.context_len)
    return EngineCore(
        EncoderScheduler(limits, by_priority=options.scheduling_policy == "priority"),
        ParallelExecutor(device, runner),
        channel,
        vocab_size=loaded.vocab_size,
        pooler=loaded.pooler,
        speech=speech,
    )


def _encoder_runner(model: Encoder | CTCModel, context_len: int) -> PackedRunner:
    if isinstance(model, CTCModel):
        return CTCRunner(model)
    model.set_context(context_len)
    return EncoderRunner(model, Pooler(model.pooler_heads, model))


def _build_decoder(
    loaded: LoadedModel, model: LanguageModel, config: CoreConfig, device: Device, channel: CoreChannel
) -> tuple[EngineCore, int, int]:
    """The core around a decoder, the number of blocks of its KV cache, and their bytes."""
    options = config.engine
    cache_dtype = torch.int8 if options.kv_cache_dtype == "int8" else loaded.dtype
    shapes = [replace(shape, alignment=device.cache_alignment) for shape in model.caches]
    per_block = block_bytes(shapes, options.block_size, cache_dtype)
    available = device.free_memory() if config.memory_share is None else config.memory_share
    if encoder_cache_size := _cached_embeddings(loaded, options):
        available -= encoder_cache_size * _embedding_bytes(loaded)
    streaming = streaming_of(loaded, options, device)
    if streaming is not None:
        available -= streaming.nbytes
        options = options.model_copy(update={"max_num_seqs": streaming.streams})
    cross_len = 0 if loaded.speech is None else loaded.speech.info.num_positions
    cross_blocks = -(-cross_len // options.block_size)
    needed = loaded.context_len if streaming is None else streaming.longest(options, loaded.context_len)
    num_blocks = count_blocks(options, per_block, needed + cross_blocks * options.block_size, available)
    context_len = _fitting_context(loaded, config, num_blocks - cross_blocks, needed)
    if streaming is not None:
        streaming.check_context(context_len)
    model.set_context(context_len)
    prefault = min(4 * loaded.weight_bytes, num_blocks * per_block // 4)
    cache = device.allocate_cache(shapes, num_blocks, options.block_size, cache_dtype, prefault)
    try:
        table = RequestTable(options.max_num_seqs, context_len, options.block_size, model.rope_switch, cross_len)
    except MemoryError as error:
        rows = f"{options.max_num_seqs} sequences of {context_len} tokens"
        raise OutOfCacheMemory(f"no memory for a table of {rows}: lower --max-num-seqs or --max-model-len") from error
    grammars = GrammarCompiler(config.folder, loaded.vocab_size)
    runner = ModelRunner(
        model,
        device.input_builder(table),
        device.attention(cache, table, loaded.dtype),
        device.step_runner(model),
        table,
        Sampler(table, loaded.vocab_size, grammars.initial_state),
        hidden_states() if loaded.pooler is None else Pooler(cast("Decoder", model).pooler_heads),
        _item_encoder(model, cache, options.block_size) if streaming is None else streaming.encoder(device),
        _aligner(loaded, table, cache),
    )
    core = EngineCore(
        _scheduler(options, context_len, num_blocks, model.rope_switch, loaded)
        if streaming is None
        else streaming.scheduler(options, context_len, num_blocks),
        LocalExecutor(device, runner, cache),
        channel,
        vocab_size=loaded.vocab_size,
        seed=options.seed,
        grammars=grammars,
        pooler=loaded.pooler,
        speech=None if loaded.speech is None else loaded.speech.info,
        audio=loaded.audio,
        streaming=loaded.streaming,
    )
    return core, num_blocks, num_blocks * per_block


def _aligner(loaded: LoadedModel, table: RequestTable, cache: KVCache) -> Aligner | None:
    if loaded.speech is None or not loaded.speech.info.aligns_words:
        return None
    return Aligner(loaded.speech, table, cache.layers)


def _item_encoder(model: LanguageModel, cache: KVCache, block_size: int) -> ItemEncoder:
    if not isinstance(model, Decoder) or model.encoder is None:
        return NoItemEncoder()
    assert isinstance(model.spec, DecoderSpec)
    crosses = model.spec.has_cross_attention
    return (
        CrossAttentionEncoder(model, model.encoder, cache, block_size) if crosses else PlaceholderEncoder(model.encoder)
    )


def _cached_embeddings(loaded: LoadedModel, options: EngineOptions) -> int:
    """Embeddings of items that are kept: as many as --encoder-cache-memory has room for, at least those of one item."""
    audio = loaded.audio
    if audio is None:
        return 0
    return max(int(options.encoder_cache_memory) // _embedding_bytes(loaded), audio.lengths.tokens(audio.item_columns))


def _embedding_bytes(loaded: LoadedModel) -> int:
    return cast("Decoder", loaded.model).spec.hidden * loaded.dtype.itemsize


def _scheduler(
    options: EngineOptions, context_len: int, num_blocks: int, rope_switch: int | None, loaded: LoadedModel
) -> Scheduler:
    speech = None if loaded.speech is None else loaded.speech.info
    limits = SchedulerLimits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=context_len,
        max_draft=options.num_speculative_tokens if options.speculative_method == "ngram" else 0,
        rope_switch=rope_switch,
        convolutions=() if speech is None else speech.convolutions,
        encoder_compute_budget=options.max_num_batched_tokens,
        encoder_cache_size=_cached_embeddings(loaded, options),
        lora_for_items=loaded.is_adapted,
    )
    return Scheduler(
        limits,
        BlockPool(num_blocks, options.block_size),
        hasher=hasher_named(options.prefix_caching_hash_algo) if options.enable_prefix_caching else None,
        by_priority=options.scheduling_policy == "priority",
        fair=loaded.pooler is not None,
    )


def _fitting_context(loaded: LoadedModel, config: CoreConfig, num_blocks: int, needed: int) -> int:
    """The context length that the KV cache can hold, so that one sequence alone always fits.

    `needed`: number of tokens in the blocks of the longest sequence.
    """
    held = num_blocks * config.engine.block_size
    if held >= needed:
        return loaded.context_len
    if held < 1:
        raise OutOfCacheMemory("the KV cache is too small for the audio of one request: raise --kv-cache-memory-bytes")
    if config.model.max_model_len is not None:
        raise OutOfCacheMemory(
            f"the KV cache holds {held} tokens, fewer than --max-model-len {config.model.max_model_len}: "
            "lower --max-model-len, or raise --kv-cache-memory-bytes"
        )
    logger.warning("max_model_len is %d instead of %d: the KV cache holds no more tokens", held, loaded.context_len)
    return held


@contextmanager
def _progress_bar(channel: CoreChannel, total: int) -> Iterator[Progress]:
    """Shows the bytes loaded, and stops between two tensors if the front end asks for it."""
    # disable=None: no bar in pipes and files, where a reader that stops reading would block the engine
    with tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, leave=False, disable=None) as bar:

        def advance(count: int) -> None:
            bar.update(count)
            if isinstance(channel.receive(0.0), Shutdown):  # nothing else is sent before `Ready`
                raise LoadingStopped

        yield advance
    logger.debug("resident after loading: %.2f GiB", psutil.Process().memory_info().rss / 2**30)
