"""Builds an engine core around a model folder, and runs it in a thread or process."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, cast

import psutil
from msgspec import structs
from tqdm import tqdm

from quire.allocator import keep_freed_memory, return_freed_memory
from quire.config.options import EngineOptions
from quire.engine.build.attention_checks import with_attention_backend
from quire.engine.build.cache import (
    CachePlan,
    SlotCounts,
    cache_memory,
    host_memory,
    plan_cache,
    snapshot_bytes,
    snapshot_store,
    with_cache_dtype,
)
from quire.engine.build.core_config import CoreConfig
from quire.engine.build.delayed_streams import delayed_streams_of
from quire.engine.build.encoder_memory import (
    bidirectional_tokens,
    cached_embeddings,
    embedding_bytes,
    fitting_tokens,
    marks_audio,
    max_item_tokens,
    pixel_cost,
)
from quire.engine.build.executor import ExecutorBuild, closing_after_errors, encoder_executor
from quire.engine.build.kv_events import event_publisher, event_recorder
from quire.engine.build.nodes import wait_for_nodes
from quire.engine.build.ranks import Ranks, set_threads, step_profiler, weight_source
from quire.engine.build.tier import OpenedTier, open_tier
from quire.engine.build.transducer import build_transducer
from quire.engine.build.transfer import OpenedTransfer, open_transfer
from quire.engine.build.warm_up import decoder_limits, decoder_plans, warm_up, warm_up_encoder, warm_up_vision
from quire.engine.client.errors import FrontEndClosed
from quire.engine.client.kv_transfer import KVTransferInfo
from quire.engine.client.model_info import Generates, KVEventSource, ModelInfo, ModelKind, Pools, Transcribes
from quire.engine.client.protocol import CoreDied, Ping, Pong, Ready, Shutdown
from quire.engine.client.shared_channel import SharedCoreChannel
from quire.engine.client.step_observer import StepObserver
from quire.engine.client.transport import CoreChannel
from quire.engine.core.loop import EngineCore
from quire.engine.core.profiling import Profiling
from quire.engine.core.sleep import Cache, EngineParts, Sleeper
from quire.engine.core.update import WeightUpdate
from quire.engine.execution.cache import CacheMemory, OutOfCacheMemory, count_blocks
from quire.engine.execution.devices.device import Device
from quire.engine.execution.devices.select import find_device
from quire.engine.execution.executor import Executor
from quire.engine.execution.ranks.errors import NodesMissing, RankDied
from quire.engine.execution.ranks.workers import Launcher, rank_process
from quire.engine.execution.sampling.compiler import GrammarCompiler
from quire.engine.kv_events.endpoints import EndpointUnavailable
from quire.engine.models.checkpoint.checkpoint import Progress
from quire.engine.models.config.quantization import chosen_quantization
from quire.engine.models.errors import ModelError, UnsupportedModel
from quire.engine.models.loader import LoadedModel
from quire.engine.models.networks.audio_encoder import CTCModel
from quire.engine.models.networks.decoder import LanguageModel
from quire.engine.models.networks.dual_encoder import DualEncoder
from quire.engine.models.networks.encoder import TextEncoder
from quire.engine.models.networks.transducer import TransducerModel
from quire.engine.models.source import WeightSource
from quire.engine.scheduling.block_observer import BlockObserver
from quire.engine.scheduling.block_tables import BlockGroups
from quire.engine.scheduling.blocks import BlockPool, hasher_named
from quire.engine.scheduling.encoder_scheduler import EncoderScheduler
from quire.engine.scheduling.limits import SchedulerLimits
from quire.engine.scheduling.residency import BlockResidency
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.scheduling.state_snapshots import SnapshotStore
from quire.engine.scheduling.tier_blocks import LoadRule
from quire.engine.transfer.block_server import AddressUnavailable
from quire.kernels import gpu

logger = logging.getLogger(__name__)
tqdm.set_lock(threading.RLock())  # its own is a semaphore for several processes, which a killed process leaves behind


# Errors whose messages say enough.
_EXPECTED = (ModelError, OutOfCacheMemory, NodesMissing, RankDied, EndpointUnavailable, AddressUnavailable)


class LoadingStopped(Exception):
    """The front end asked the core to stop before the model was loaded."""


def serve_core(config: CoreConfig, address: str, observer: StepObserver | None = None) -> None:
    """Body of a core's thread or process: load the model, serve, and report if either fails.

    `observer`: watches the steps; None: nobody does.
    """
    with SharedCoreChannel(address) if config.front_ends > 1 else CoreChannel(address) as channel:
        try:
            _build_and_run(config, channel, observer)
        except LoadingStopped:
            logger.info("loading was cancelled")
        except FrontEndClosed:
            logger.debug("the engine ended with its server")
        except _EXPECTED as error:
            _report(channel, str(error))
        except Exception as error:  # the edge of the thread: every error must reach the front end
            logger.exception("the engine ended with an error")
            _report(channel, f"{type(error).__name__}: {error}")


def _build_and_run(config: CoreConfig, channel: CoreChannel, observer: StepObserver | None) -> None:
    core, info = build_core(config, channel)
    core.step_observer = observer
    gc.freeze()  # a full collection would search all modules, for 150 ms in which no step can start
    try:
        channel.send(Ready(info))
        core.run()
    finally:
        core.close()


def _report(channel: CoreChannel, error: str) -> None:
    with suppress(FrontEndClosed):
        channel.send(CoreDied(error))


def build_core(
    config: CoreConfig, channel: CoreChannel, device: Device | None = None, launch: Launcher = rank_process
) -> tuple[EngineCore, ModelInfo]:
    """Load a model and build an engine around it.

    `device`: what runs the model; None for the device that the options name. `launch`: starts the other ranks.

    Raises:
        ModelError: the model cannot be loaded, or the device has no kernels for the KV cache's data type, or the
            attention backend does not support the model.
        OutOfCacheMemory: the KV cache does not fit, or holds too little.
        RankDied: another rank could not load its part of the model.
        NodesMissing: another node has not come, or does not fit.
        EndpointUnavailable: a socket for events of the KV cache cannot be bound.
        LoadingStopped: the front end asked to stop.
    """
    set_threads(config)
    _check_sleep(config)
    requested = config
    device = device or find_device(config.model.device)
    config = with_attention_backend(config, device)
    with device.activate():
        config = with_cache_dtype(config, device)
        config = _with_quantization(config, device)
    if config.parallel.ranks == 1:
        return _build_core(config, channel, device, None)
    wait = partial(wait_for_nodes, requested, config, partial(_stop_if_asked, channel))
    ranks = Ranks(config, device, launch, wait if config.parallel.nnodes > 1 else None)
    try:
        with ranks.noticing_death():
            return _build_core(config, channel, device, ranks)
    except LoadingStopped:
        ranks.close()
        raise
    except BaseException as error:
        ranks.close(str(error) or type(error).__name__)
        raise


def _with_quantization(config: CoreConfig, device: Device) -> CoreConfig:
    """The configuration with the quantization that weights get while they are loaded. The device is active.

    Raises:
        UnsupportedModel: --quantization names a format that the checkpoint does not have.
    """
    section, has_float8 = config.model_config.quantization, gpu.computes_float8(device.torch_device)
    return replace(config, model=chosen_quantization(config.model, section, has_float8=has_float8))


def _check_sleep(config: CoreConfig) -> None:
    """Raise UnsupportedModel for --enable-sleep-mode where the engine cannot sleep."""
    if not config.engine.enable_sleep_mode:
        return
    if config.parallel.ranks > 1:
        raise UnsupportedModel(
            "--enable-sleep-mode works with one rank: --tensor-parallel-size and --pipeline-parallel-size must be 1"
        )
    if config.model_config.facts.streaming is not None:
        raise UnsupportedModel(
            "--enable-sleep-mode does not work with models that transcribe audio while it arrives, such as "
            f"{config.folder.name}"
        )


@dataclass(frozen=True, slots=True)
class _Built:
    """A core, and its memory on all ranks. `step_bytes` and what follows it: see `ModelInfo`."""

    core: EngineCore
    num_blocks: int = 0
    cache_bytes: int = 0
    step_bytes: int = 0
    cache_dtype: str = ""
    cache_limit: str = ""
    kv_events: KVEventSource | None = None
    kv_transfer: KVTransferInfo | None = None
    saves_states: bool = False


def _build_core(
    config: CoreConfig, channel: CoreChannel, device: Device, ranks: Ranks | None
) -> tuple[EngineCore, ModelInfo]:
    options = config.engine
    with device.activate():
        groups, bar = None if ranks is None else ranks.groups, partial(_progress_bar, channel)
        source = weight_source(config, device, groups)
        loaded = source.load(bar)
        if isinstance(loaded.model, TextEncoder | CTCModel | DualEncoder):
            built = _Built(_build_encoder(loaded, config, device, channel, source))
        elif isinstance(loaded.model, TransducerModel):
            parts = build_transducer(loaded, loaded.model, options, device)
            vocab, kind = loaded.vocab_size, loaded.config.kind(loaded.context_len, options.max_num_batched_tokens)
            operation = _operation(config, loaded, device, source)
            core = EngineCore(parts.scheduler, parts.executor, channel, vocab_size=vocab, kind=kind, **operation)
            built = _Built(core, parts.num_blocks, parts.cache_bytes)
        else:
            built = _build_decoder(loaded, loaded.model, config, device, channel, ranks, source)
    if options.kv_events.publishes and built.kv_events is None:
        logger.warning(
            "--kv-events-config has no effect: there is no prefix cache whose blocks alone can be used again"
        )
    if options.kv_transfer is not None and built.kv_transfer is None:
        built.core.close()
        raise UnsupportedModel("--kv-transfer-config is not supported: the model does not answer completions or chats")
    return_freed_memory()  # of loading, which is not needed again
    keep_freed_memory()
    info = ModelInfo(
        architecture=loaded.config.model_type,
        implementation=loaded.config.implementation,
        device=device.name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        vocab_size=loaded.vocab_size,
        max_model_len=built.core.scheduler.limits.max_model_len,
        num_blocks=built.num_blocks,
        block_size=options.block_size,
        weight_bytes=loaded.weight_bytes + (0 if ranks is None else ranks.weight_bytes),
        cache_bytes=built.cache_bytes,
        step_bytes=built.step_bytes,
        kind=built.core.kind,
        kernels=device.description,
        attention_backend=options.attention_backend if built.cache_dtype else "",
        weight_format=_weight_format(config),
        cache_dtype=built.cache_dtype,
        cache_limit=built.cache_limit,
        saves_states=built.saves_states,
        kv_events=built.kv_events,
        kv_transfer=built.kv_transfer,
    )
    return built.core, info


def _weight_format(config: CoreConfig) -> str:
    """See `ModelInfo`."""
    if config.model.quantization != "none":
        return f"{config.model.quantization} (--quantization)"
    if config.model.load_format == "dummy":
        return "random numbers (--load-format dummy)"
    section = config.model_config.quantization
    return "" if section is None else f"{section['quant_method']} (checkpoint)"


def _with_room_for_items(
    kind: ModelKind, loaded: LoadedModel, context_len: int, config: CoreConfig, left: int | None
) -> ModelKind:
    """What the model does. An item of a picture must fit into the context, the encoder cache and the memory.

    `left`: bytes of the host's memory beside weights and caches; None: the device has memory of its own.
    """
    if not isinstance(kind, Generates | Pools) or kind.pictures is None:
        return kind
    token_limit = min(context_len, cached_embeddings(loaded, config.engine))
    if bidirectional_tokens(loaded) is not None:
        token_limit = min(token_limit, config.engine.max_num_batched_tokens)
    tokens = max_item_tokens(kind.pictures, token_limit)
    if left is not None:
        tokens = fitting_tokens(loaded, tokens, left)
    return structs.replace(kind, pictures=structs.replace(kind.pictures, item_tokens=tokens))


def _build_encoder(
    loaded: LoadedModel, config: CoreConfig, device: Device, channel: CoreChannel, source: WeightSource
) -> EngineCore:
    """The core around an encoder, of text, pictures or audio."""
    options = config.engine
    kind = loaded.config.kind(loaded.context_len, options.max_num_batched_tokens)
    limits = SchedulerLimits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=loaded.context_len,
        convolutions=kind.convolutions if isinstance(kind, Transcribes) else (),
    )
    build = partial(encoder_executor, device)

    def schedule(_: LoadedModel) -> EncoderScheduler:
        return EncoderScheduler(limits, by_priority=options.scheduling_policy == "priority")

    executor = build(loaded, None)
    if device.compiles_kernels:
        with closing_after_errors(executor):
            warm_up_encoder(executor, kind, options, loaded.context_len, partial(_stop_if_asked, channel))
    sleeper = _sleeper(config, loaded, device, channel, source, _no_cache, schedule, build)
    return EngineCore(
        schedule(loaded),
        executor,
        channel,
        vocab_size=loaded.vocab_size,
        kind=kind,
        sleeper=sleeper,
        **_operation(config, loaded, device, source, sleeper),
    )


def _nothing() -> None:
    """Nothing is to be closed."""


def _no_cache() -> None:
    """The KV cache of an encoder."""


def _sleeper(
    config: CoreConfig,
    loaded: LoadedModel,
    device: Device,
    channel: CoreChannel,
    source: WeightSource,
    allocate: Callable[[], Cache],
    schedule: Callable[[LoadedModel], Scheduler | EncoderScheduler],
    execute: Callable[[LoadedModel, Cache], Executor],
) -> Sleeper[Cache] | None:
    """What lets the engine sleep, with --enable-sleep-mode."""
    if not config.engine.enable_sleep_mode:
        return None
    load = partial(source.load, partial(_progress_bar, channel))
    return Sleeper(EngineParts(load, allocate, schedule, execute), loaded, device)


class _Operation(TypedDict):
    """What an operator's commands need; see `EngineCore`."""

    update: WeightUpdate | None
    profiling: Profiling


def _operation(
    config: CoreConfig,
    loaded: LoadedModel,
    device: Device,
    source: WeightSource,
    sleeper: Sleeper[Any] | None = None,
    ranks: Ranks | None = None,
) -> _Operation:
    """What an operator's commands need. `sleeper`: holds the model, if there is one."""
    commands = None if ranks is None else ranks.commands
    update = None
    if config.engine.weight_update_path is not None:
        current: Callable[[], LoadedModel] = (lambda: loaded) if sleeper is None else (lambda: sleeper.loaded)
        update = WeightUpdate(source, current, device, commands)
    return _Operation(update=update, profiling=Profiling(step_profiler(config), commands))


def _build_decoder(
    loaded: LoadedModel,
    model: LanguageModel,
    config: CoreConfig,
    device: Device,
    channel: CoreChannel,
    ranks: Ranks | None,
    source: WeightSource,
) -> _Built:
    """The core around a decoder."""
    options = config.engine
    poll = partial(_stop_if_asked, channel)
    plan = plan_cache(loaded, config, device)
    if ranks is not None:
        ranks.connect(device, loaded.dtype, poll)
    reserved = 0
    streaming = delayed_streams_of(loaded, options, device)
    if streaming is not None:
        reserved += streaming.nbytes
        options = options.model_copy(update={"max_num_seqs": streaming.streams})
        config = replace(config, engine=options)
    reserved += device.sampler_bytes(options.max_num_seqs, loaded.vocab_size)
    cross_len = 0 if loaded.speech is None else loaded.speech.info.num_positions
    cross_blocks = -(-cross_len // options.block_size)
    step = options.max_num_batched_tokens if streaming is None else streaming.largest_piece(options)
    available = cache_memory(loaded, config, device, reserved)
    is_host = device.torch_device.type == "cpu"
    saved_bytes = 0 if streaming is not None else snapshot_bytes(options, plan, available)
    if available is not None and is_host:
        available = replace(available, nbytes=max(0, available.nbytes - saved_bytes))
    needed = plan.most_blocks(loaded.context_len, step) + cross_blocks
    slots = plan.count_slots(options, loaded.context_len, step, available)
    num_blocks = count_blocks(options, plan.block_bytes, needed, available, slots.total * plan.slot_bytes)
    if ranks is not None:
        num_blocks, slots = ranks.least(num_blocks, slots, poll)
    if slots.sequences < options.max_num_seqs:
        logger.info(
            "%d sequences run at the same time: there is no memory for the states of more, which take %d KiB each",
            slots.sequences,
            plan.slot_bytes >> 10,
        )
        options = options.model_copy(update={"max_num_seqs": slots.sequences})
        streaming = None if streaming is None else replace(streaming, streams=slots.sequences)
    options = _with_drafts(options, plan, slots, config.parallel.pipeline_parallel_size)
    config = replace(config, engine=options)
    context_len = loaded.config.within_step(
        _fitting_context(loaded, config, plan, num_blocks - cross_blocks, step),
        config.model.max_model_len,
        options.max_num_batched_tokens,
    )
    if streaming is not None:
        streaming.check_context(context_len)
    cache_bytes = num_blocks * plan.block_bytes + slots.total * plan.slot_bytes
    taken = cache_bytes + saved_bytes + reserved + cached_embeddings(loaded, options) * embedding_bytes(loaded)
    left = host_memory(config) - taken if is_host else None
    kind = loaded.config.kind(context_len, options.max_num_batched_tokens)
    kind = _with_room_for_items(kind, loaded, context_len, config, left)
    state_bytes = max(plan.slot_bytes, 0 if ranks is None else ranks.slot_bytes)
    snapshots = snapshot_store(options, saved_bytes, state_bytes, is_host=is_host)
    num_snapshots = 0 if snapshots is None else snapshots.places
    if snapshots is not None:
        logger.info(
            "the prefix cache saves up to %d states of sequences, %d KiB each", num_snapshots, state_bytes >> 10
        )
    if plan.groups.has_states and options.enable_prefix_caching and snapshots is None and streaming is None:
        logger.warning(
            "the prefix cache is not read: --state-snapshot-memory has no room for the %d bytes of a sequence's states",
            state_bytes,
        )
    if ranks is not None:
        ranks.allocate(num_blocks, context_len, slots, num_snapshots)
    allocate = plan.allocator(device, num_blocks, slots, loaded.weight_bytes)
    grammars = GrammarCompiler(config.folder, loaded.vocab_size)
    build = ExecutorBuild(config, device, context_len, grammars, plan.groups, num_snapshots, channel.inbox)
    executor = build.executor(loaded, allocate(), streaming, None if ranks is None else ranks.runner_type)
    with closing_after_errors(executor, grammars):  # the caller closes `ranks`
        if ranks is not None:
            ranks.wait_until_ready(poll)
            executor = ranks.executor(executor)
        if device.compiles_kernels and streaming is None:
            warm_up_limits = decoder_limits(loaded, kind, options, context_len, num_blocks, slots.spare, plan.groups)
            plans = decoder_plans(warm_up_limits)
            warm_up(executor, plans, poll, executor.max_steps_in_flight if ranks is None else 1)
            warm_up_vision(loaded)
        events = None if streaming is not None else event_publisher(options, plan, config.replica)
        transfer, tier = None, None
        with closing_after_errors(*(() if events is None else (events,))):
            if streaming is None:
                transfer = open_transfer(config, loaded, plan, device, channel)
        with closing_after_errors(*(owner for owner in (events, transfer) if owner is not None)):
            if streaming is None:
                tier = open_tier(config, loaded, plan, device, tracks_changes=events is not None)
    recorder = None if events is None else event_recorder(events, plan, config.replica)
    observers = () if recorder is None else (recorder,)
    stages = config.parallel.pipeline_parallel_size
    schedule = partial(
        _scheduler,
        options,
        plan.groups,
        context_len,
        num_blocks,
        slots,
        stages,
        # Other devices plan ahead instead, and ranks receive every step.
        options.num_scheduler_steps - 1 if ranks is None and executor.max_steps_in_flight == 1 else 0,
        observers,
        tier,
        transfer,
        snapshots,
    )
    sleeper = _sleeper(config, loaded, device, channel, source, allocate, schedule, build.executor)
    core = EngineCore(
        schedule(loaded) if streaming is None else streaming.scheduler(options, plan.groups, context_len, num_blocks),
        executor,
        channel,
        vocab_size=loaded.vocab_size,
        seed=options.seed + config.replica,
        grammars=grammars,
        kind=kind,
        sleeper=sleeper,
        on_close=_nothing if events is None else events.close,
        offload=None if tier is None else tier.offload(recorder),
        transfer=None if transfer is None else transfer.core,
        **_operation(config, loaded, device, source, sleeper, ranks),
    )
    cache_bytes += 0 if ranks is None else ranks.cache_bytes
    return _Built(
        core,
        num_blocks,
        cache_bytes,
        0 if available is None else available.step_bytes,
        str(plan.dtype).removeprefix("torch."),
        _cache_limit(options, num_blocks, needed, available),
        None if events is None else events.source,
        None if transfer is None else transfer.info,
        saves_states=snapshots is not None,
    )


def _with_drafts(options: EngineOptions, plan: CachePlan, slots: SlotCounts, stages: int) -> EngineOptions:
    """The options without drafts where they would have no effect. `stages`: of the pipeline."""
    if not plan.groups.has_states or options.speculative_method != "ngram" or (slots.spare and stages == 1):
        return options
    reason = "there is no memory for a second state"
    if stages > 1:
        reason = "a model with states has no drafts with --pipeline-parallel-size"
    logger.warning("--speculative-method has no effect: %s", reason)
    return options.model_copy(update={"speculative_method": "none"})


def _cache_limit(options: EngineOptions, num_blocks: int, needed: int, available: CacheMemory | None) -> str:
    """What limits the KV cache, of which a sequence needs at most `needed` blocks."""
    if available is None:
        return "--kv-cache-memory-bytes"
    return "all that --max-num-seqs can use" if num_blocks >= options.max_num_seqs * needed else available.setting


def _scheduler(
    options: EngineOptions,
    groups: BlockGroups,
    context_len: int,
    num_blocks: int,
    slots: SlotCounts,
    stages: int,
    further_steps: int,
    observers: Sequence[BlockObserver],
    tier: OpenedTier | None,
    transfer: OpenedTransfer | None,
    snapshots: SnapshotStore | None,
    loaded: LoadedModel,
) -> Scheduler:
    max_draft = options.num_speculative_tokens if options.speculative_method == "ngram" else 0
    speech = None if loaded.speech is None else loaded.speech.info
    limits = SchedulerLimits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=context_len,
        max_draft=max_draft,
        max_drafting=slots.spare if groups.has_states else None,
        rope_switch=cast("LanguageModel", loaded.model).rope_switch,
        convolutions=() if speech is None else speech.convolutions,
        encoder_compute_budget=options.max_num_batched_tokens,
        encoder_cache_size=cached_embeddings(loaded, options),
        pixel_cost=pixel_cost(loaded),
        lora_digests={lora_id: adapter.digest for lora_id, adapter in loaded.adapters.items()},
        item_lora_id=loaded.item_lora_id,
        marks_audio=marks_audio(loaded),
        bidirectional=bidirectional_tokens(loaded),
        picture_lora_id=loaded.picture_lora_id,
        max_further_steps=0 if max_draft else further_steps,  # a draft is made after every token
        stages=stages,
    )
    pool = BlockPool(
        num_blocks,
        options.block_size,
        _residency(options),
        observers if tier is None else (*observers, tier.unsaved),
    )
    return Scheduler(
        limits,
        pool,
        groups,
        hasher=hasher_named(options.prefix_caching_hash_algo) if options.enable_prefix_caching else None,
        by_priority=options.scheduling_policy == "priority",
        fair=loaded.pooler is not None,
        tier=None if tier is None else tier.tier,
        load_rule=None if tier is None else LoadRule(tier.block_bytes),
        remote=None if transfer is None else transfer.loading,
        held=None if transfer is None else transfer.held_blocks(pool),
        snapshots=snapshots,
    )


def _residency(options: EngineOptions) -> BlockResidency | None:
    watches = options.kv_cache_metrics and options.enable_prefix_caching
    return BlockResidency(options.kv_cache_metrics_sample) if watches else None


def _fitting_context(loaded: LoadedModel, config: CoreConfig, plan: CachePlan, num_blocks: int, step: int) -> int:
    """The context length that the KV cache can hold, so that one sequence alone always fits.

    `step`: most tokens of a sequence in a step.
    """
    held = plan.groups.longest(num_blocks, loaded.context_len, step, config.engine.block_size)
    if held == loaded.context_len:
        return held
    if held < 1:
        what = "the audio" if loaded.speech is not None else "a token"
        raise OutOfCacheMemory(f"the KV cache is too small for {what} of one request: raise --kv-cache-memory-bytes")
    if config.model.max_model_len is not None:
        raise OutOfCacheMemory(
            f"the KV cache holds {held} tokens, fewer than --max-model-len {config.model.max_model_len}: "
            "lower --max-model-len, or raise --kv-cache-memory-bytes"
        )
    logger.warning("max_model_len is %d instead of %d: the KV cache holds no more tokens", held, loaded.context_len)
    return held


def _stop_if_asked(channel: CoreChannel) -> None:
    match channel.receive_arrived(Shutdown, Ping):
        case Shutdown():
            raise LoadingStopped
        case Ping(serial=serial):  # while the model is loaded again
            channel.send(Pong(serial))


@contextmanager
def _progress_bar(channel: CoreChannel, total: int) -> Iterator[Progress]:
    """Shows the bytes loaded, and stops between two tensors if the front end asks for it."""
    # disable=None: no bar in pipes and files, where a reader that stops reading would block the engine
    with tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, leave=False, disable=None) as bar:

        def advance(count: int) -> None:
            bar.update(count)
            _stop_if_asked(channel)

        yield advance
    logger.debug("resident after loading: %.2f GiB", psutil.Process().memory_info().rss / 2**30)
