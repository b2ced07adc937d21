"""ModelMetrics: what is counted of one model, in the metrics of the server.

What happens in each step and for each request is noted here and counted in batches; the rest, which happens now and
then, is counted at once.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from itertools import product
from typing import Literal, Self, get_args

import msgspec
from prometheus_client import Counter
from typing_extensions import override

from quire.config.options import EngineOptions
from quire.engine.client.model_info import Generates, ModelInfo
from quire.engine.client.origin import Origin, current_origin
from quire.engine.client.protocol import FinishReason, LoadSource, LostReason, MemoryTag, SleepLevel, StepStats
from quire.engine.client.records import Observer, Rejection, RequestRecord, SleepOperation, ToolRequest
from quire.engine.client.timeline import RequestTimes
from quire.metrics.batches import Batch, BatchHistogram, Mark, exemplar_of, trace_of
from quire.metrics.prometheus import Metrics

_STEP_COUNTERS = {
    "prefix_queries": "prefix_queries",
    "prefix_hits": "prefix_hits",
    "external_queries": "external_queries",
    "external_hits": "external_hits",
    "snapshot_hits": "snapshot_hits",
    "snapshots_saved": "snapshots_saved",
    "snapshots_evicted": "snapshots_evicted",
    "load_bytes": "loaded_bytes",
    "load_seconds": "load_seconds",
    "store_bytes": "stored_bytes",
    "store_seconds": "store_seconds",
    "encoder_queries": "item_queries",
    "encoder_hits": "item_hits",
    "preemptions": "preemptions",
    "drafts": "drafts",
    "drafted": "drafted_tokens",
    "accepted": "accepted_tokens",
    "corrupted": "corrupted",
}
_FILE_COUNTERS = {
    "file_reads": "file_read_bytes",
    "file_read_seconds": "file_read_seconds",
    "file_writes": "file_written_bytes",
    "file_write_seconds": "file_write_seconds",
}
_COUNTERS = (
    *("prompt_tokens", "prompt_cached", "generation_tokens", "audio_seconds", "restarts"),
    *("mm_queries", "mm_hits"),
)
_HISTOGRAMS = (
    *("step_tokens", "step_seconds", "request_prompt", "request_output", "request_max", "request_n", "ttft"),
    *("itl", "tpot", "e2e", "queue", "inference", "prefill", "decode", "request_computed", "request_longest"),
    *("request_preemptions", "preprocess", "grammar"),
)
_REASONS = ("stop", "length", "abort", "error")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")  # of prompt tokens
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_NOTHING = StepStats()
_FrontWait = Literal["preprocessing", "grammar"]  # what a request waits for before the engine gets it


class _FirstToken(msgspec.Struct, frozen=True, gc=False):
    """The first token of a sequence, which came `seconds` after its arrival."""

    seconds: float
    mark: Mark


class _Step(msgspec.Struct, frozen=True, gc=False):
    """A step of the engine.

    Attributes:
        tokens: that sequences got.
        gaps: seconds since the token before, for each sequence that had one.
    """

    stats: StepStats
    tokens: int
    gaps: list[float]
    firsts: list[_FirstToken]


class _Ended(msgspec.Struct, frozen=True, gc=False):
    """What is counted of a sequence that has ended; see `RequestRecord`, which refers to much that nobody needs."""

    pooled: bool
    times: RequestTimes
    reason: FinishReason
    prompt: int
    cached: int
    loaded: int
    output: int
    max_tokens: int
    preemptions: int
    answers: int
    longest: int
    trace_id: str

    @classmethod
    def of(cls, record: RequestRecord) -> Self:
        """What is counted of a record."""
        return cls(
            record.kind == "pool",
            record.times,
            record.finish_reason,
            record.prompt_tokens,
            record.cached_tokens,
            record.loaded_tokens,
            record.output_tokens,
            record.max_tokens,
            record.preemptions,
            record.answers,
            record.longest_answer,
            trace_of(record.origin),
        )


class _Transfers:
    """The metrics of KV blocks that come from other engines, and are kept for them."""

    def __init__(self, metrics: Metrics, labels: tuple[str, str], held_blocks: Callable[[], float]) -> None:
        self._seconds, self._bytes = metrics.transfer_seconds.labels(*labels), metrics.transfer_bytes.labels(*labels)
        self._failed, self._expired = metrics.failed_transfers.labels(*labels), metrics.expired_holds.labels(*labels)
        metrics.held_blocks.labels(*labels).set_function(held_blocks)

    def count(self, all_stats: Sequence[StepStats]) -> None:
        """Count what has happened in some steps."""
        transfers = [transfer for stats in all_stats for transfer in stats.transfers]
        self._seconds.observe_all([transfer.seconds for transfer in transfers])
        self._bytes.observe_all([transfer.nbytes for transfer in transfers])
        self._failed.inc(sum(stats.failed_transfers for stats in all_stats))
        self._expired.inc(sum(stats.expired_holds for stats in all_stats))


class ModelMetrics(Observer):
    """Records the metrics of one model."""

    def __init__(self, metrics: Metrics, model_name: str, engine: int) -> None:
        self._metrics = metrics
        self._labels = labels = (model_name, str(engine))
        self._counters: dict[str, Counter] = {
            name: getattr(metrics, name).labels(*labels) for name in (*_STEP_COUNTERS, *_COUNTERS)
        }
        self._file_counters: dict[str, Counter] = {
            name: getattr(metrics, name).labels(*labels, "fs") for name in _FILE_COUNTERS
        }
        self._histograms: dict[str, BatchHistogram] = {
            name: getattr(metrics, name).labels(*labels) for name in _HISTOGRAMS
        }
        residency = () if metrics.residency is None else metrics.residency
        self._residency = [histogram.labels(*labels) for histogram in residency]
        self._transfers: _Transfers | None = None
        self._sleep = {state: metrics.sleep_state.labels(*labels, state) for state in _SLEEP_STATES}
        self._sleep_operations = {
            name: metrics.sleep_operations.labels(*labels, name) for name in get_args(SleepOperation)
        }
        self._rejections = {name: metrics.refusals.labels(model_name, name) for name in get_args(Rejection)}
        self.on_sleep(frozenset(), 1)
        self._ends = {reason: metrics.success.labels(*labels, reason) for reason in _REASONS}
        self._sources = {source: metrics.prompt_by_source.labels(*labels, source) for source in _SOURCES}
        self._lost = {reason: metrics.lost_tokens.labels(*labels, reason) for reason in get_args(LostReason)}
        self._cached_on_device = metrics.cached_by_source.labels(*labels, "device")
        self._loaded_from = {
            source: metrics.cached_by_source.labels(*labels, source) for source in get_args(LoadSource)
        }
        self._in_front: dict[_FrontWait, int] = {"preprocessing": 0, "grammar": 0}
        self._stats = StepStats()  # of the last step
        self._tokens, self._gaps, self._firsts = 0, list[float](), list[_FirstToken]()  # of the step that arrives
        self._steps, self._ended = Batch(self._count_steps), Batch(self._count_ended)
        metrics.batches += [self._steps, self._ended]
        self._show_state()

    def describe(self, info: ModelInfo, options: EngineOptions) -> None:
        """Publish the settings of the engine's KV cache, and zeros of what will be counted for such a model."""
        if info.kv_transfer is not None:
            self._transfers = _Transfers(self._metrics, self._labels, lambda: self._shown.held_blocks)
        if isinstance(info.kind, Generates):
            for api, streams, called in product(get_args(ToolRequest), (True, False), (True, False)):
                self._tool_parses(api, streams, called)
            drafted = 0 if options.speculative_method == "none" else options.num_speculative_tokens
            for position in range(drafted):
                self._metrics.accepted_per_pos.labels(*self._labels, position)
        values = (info.block_size, info.num_blocks, options.kv_cache_dtype, options.kv_cache_free_memory_fraction)
        self._metrics.cache_config.labels(
            *self._labels, *map(str, values), str(options.enable_prefix_caching), options.prefix_caching_hash_algo
        ).set(1)

    @override
    def on_step(self, stats: StepStats) -> None:
        self._stats = stats
        self._steps.add(_Step(stats, self._tokens, self._gaps, self._firsts))
        self._tokens, self._gaps, self._firsts = 0, [], []

    @override
    def on_tokens(self, origin: Origin, times: RequestTimes, now: float, count: int) -> None:
        self._tokens += count
        if times.first_token:
            self._gaps.append(now - times.last_token)
        else:
            self._firsts.append(_FirstToken(now - times.queued, Mark(trace_of(origin), now)))

    @override
    def on_finish(self, record: RequestRecord) -> None:
        self._ended.add(_Ended.of(record))

    @override
    def on_audio(self, seconds: float) -> None:
        self._counters["audio_seconds"].inc(seconds)

    @override
    def on_media_lookup(self, found: bool) -> None:
        self._counters["mm_queries"].inc()
        self._counters["mm_hits"].inc(found)

    @override
    def on_preprocessing_start(self) -> None:
        self._in_front["preprocessing"] += 1

    @override
    def on_preprocessing_end(self, seconds: float) -> None:
        self._in_front["preprocessing"] -= 1
        self._histograms["preprocess"].observe(seconds, exemplar_of(current_origin()))

    @override
    def on_grammar_start(self) -> None:
        self._in_front["grammar"] += 1

    @override
    def on_grammar_end(self, seconds: float) -> None:
        self._in_front["grammar"] -= 1
        self._histograms["grammar"].observe(seconds, exemplar_of(current_origin()))

    @override
    def on_tool_parse(self, api: ToolRequest, streams: bool, called: bool) -> None:
        self._tool_parses(api, streams, called).inc()

    @override
    def on_overload(self, reason: Rejection) -> None:
        self._rejections[reason].inc()

    @override
    def on_sleep(self, asleep: frozenset[MemoryTag], level: SleepLevel) -> None:
        self._sleep["awake"].set(not asleep)
        self._sleep["weights_offloaded"].set("weights" in asleep and level == 1)
        self._sleep["discard_all"].set("weights" in asleep and level == 2)

    @override
    def on_sleep_operation_start(self, operation: SleepOperation) -> None:
        self._sleep_operations[operation].inc()

    @override
    def on_sleep_operation_end(self, operation: SleepOperation, seconds: float) -> None:
        self._sleep_operations[operation].dec()
        self._metrics.sleep_seconds.labels(*self._labels, operation).observe(seconds)

    @override
    def on_restart(self) -> None:
        self._counters["restarts"].inc()
        self.on_step(StepStats())

    @property
    def _shown(self) -> StepStats:
        """What gauges of the engine show."""
        return _NOTHING if self._metrics.hides_engine else self._stats

    def _show_state(self) -> None:
        """Have gauges read what they show when they are asked for."""
        labels, metrics = self._labels, self._metrics
        metrics.running.labels(*labels).set_function(lambda: self._shown.running)
        metrics.waiting.labels(*labels).set_function(lambda: self._shown.waiting + sum(self._in_front.values()))
        metrics.kv_blocks.labels(*labels).set_function(lambda: self._shown.blocks_used)
        metrics.kv_usage.labels(*labels).set_function(self._kv_usage)
        metrics.snapshot_bytes.labels(*labels).set_function(lambda: self._shown.snapshot_bytes)
        metrics.unwritten.labels(*labels).set_function(lambda: self._shown.unwritten_blocks)
        metrics.host_usage.labels(*labels).set_function(lambda: self._shown.host_usage)
        metrics.offload_used.labels(*labels).set_function(lambda: self._shown.tier_bytes)
        by_reason: dict[str, Callable[[], float]] = {
            "capacity": lambda: self._shown.waiting - self._shown.deferred,
            "deferred": lambda: self._shown.deferred,
            "preprocessing": lambda: self._in_front["preprocessing"],
            "grammar": lambda: self._in_front["grammar"],
        }
        for reason, count in by_reason.items():
            metrics.waiting_by_reason.labels(*labels, reason).set_function(count)

    def _kv_usage(self) -> float:
        return self._shown.blocks_used / self._shown.blocks_total if self._shown.blocks_total else 0.0

    def _tool_parses(self, api: ToolRequest, streams: bool, called: bool) -> Counter:
        mode, outcome = "streaming" if streams else "non_streaming", "tool_call" if called else "no_tool_call"
        return self._metrics.tool_parses.labels(self._labels[0], mode, outcome, api)

    def _count_steps(self, steps: Sequence[_Step]) -> None:
        counters, histograms = self._counters, self._histograms
        counters["generation_tokens"].inc(sum(step.tokens for step in steps))
        histograms["itl"].observe_all([gap for step in steps for gap in step.gaps])
        firsts = [first for step in steps for first in step.firsts]
        histograms["ttft"].observe_all([first.seconds for first in firsts], [first.mark for first in firsts])
        all_stats = [step.stats for step in steps]
        for name, attribute in _STEP_COUNTERS.items():
            if count := sum([getattr(stats, attribute) for stats in all_stats]):
                counters[name].inc(count)
        for name, attribute in _FILE_COUNTERS.items():
            if count := sum([getattr(stats, attribute) for stats in all_stats]):
                self._file_counters[name].inc(count)
        working = [stats for stats in all_stats if stats.step_tokens]
        histograms["step_tokens"].observe_all([stats.step_tokens for stats in working])
        histograms["step_seconds"].observe_all([stats.step_seconds for stats in working])
        for stats in all_stats:
            for source, tokens in stats.hits_by_source.items():
                self._loaded_from[source].inc(tokens)
            for reason, tokens in stats.lost_tokens.items():
                self._lost[reason].inc(tokens)
            for position, count in enumerate(stats.accepted_per_position):
                self._metrics.accepted_per_pos.labels(*self._labels, position).inc(count)
        if self._residency:
            self._observe_residency(all_stats)
        if self._transfers is not None:
            self._transfers.count(all_stats)

    def _observe_residency(self, all_stats: Sequence[StepStats]) -> None:
        lifetime, idle, reuse_gap = self._residency
        evicted = [block for stats in all_stats for block in stats.evicted_blocks]
        lifetime.observe_all([block.lifetime for block in evicted])
        idle.observe_all([block.idle for block in evicted])
        reuse_gap.observe_all([gap for stats in all_stats for gap in stats.block_reuse_gaps])

    def _count_ended(self, ended: Sequence[_Ended]) -> None:
        for reason, count in collections.Counter([end.reason for end in ended]).items():
            self._ends[reason].inc(count)
        if pooled := [end for end in ended if end.pooled and end.reason == "stop"]:
            self._count_pooled(pooled)
        if generated := [end for end in ended if not end.pooled and end.times.first_token]:
            self._count_generated(generated)
        if last := [end for end in ended if end.longest]:
            self._histograms["request_n"].observe_all([end.answers for end in last])
            self._histograms["request_longest"].observe_all([end.longest for end in last])

    def _count_prompts(self, ended: Sequence[_Ended]) -> None:
        cached, loaded = sum([end.cached for end in ended]), sum([end.loaded for end in ended])
        self._counters["prompt_tokens"].inc(sum([end.prompt for end in ended]))
        self._counters["prompt_cached"].inc(cached)
        self._sources["local_compute"].inc(sum([max(0, end.prompt - end.cached) for end in ended]))
        self._sources["local_cache_hit"].inc(cached - loaded)
        self._sources["external_kv_transfer"].inc(loaded)
        self._cached_on_device.inc(cached - loaded)
        self._histograms["request_prompt"].observe_all([end.prompt for end in ended])
        self._histograms["request_preemptions"].observe_all([end.preemptions for end in ended])

    def _count_pooled(self, ended: Sequence[_Ended]) -> None:
        self._count_prompts(ended)
        histograms, all_times = self._histograms, [end.times for end in ended]
        marks = _marks(ended)
        histograms["e2e"].observe_all([times.sent - times.queued for times in all_times], marks)
        histograms["queue"].observe_all([_queued_for(times) for times in all_times], marks)
        histograms["inference"].observe_all([times.sent - times.scheduled for times in all_times], marks)

    def _count_generated(self, ended: Sequence[_Ended]) -> None:
        self._count_prompts(ended)
        histograms, all_times = self._histograms, [end.times for end in ended]
        histograms["request_computed"].observe_all([end.prompt - end.cached for end in ended])
        histograms["request_output"].observe_all([end.output for end in ended])
        histograms["request_max"].observe_all([end.max_tokens for end in ended])
        marks = _marks(ended)
        histograms["e2e"].observe_all([times.sent - times.queued for times in all_times], marks)
        histograms["queue"].observe_all([_queued_for(times) for times in all_times], marks)
        histograms["inference"].observe_all([times.last_token - times.scheduled for times in all_times], marks)
        histograms["prefill"].observe_all([times.first_token - times.scheduled for times in all_times], marks)
        histograms["decode"].observe_all([_decoded_for(times) for times in all_times], marks)
        longer = [end for end in ended if end.output > 1]
        per_token = [_decoded_for(end.times) / (end.output - 1) for end in longer]
        histograms["tpot"].observe_all(per_token, _marks(longer))


def _queued_for(times: RequestTimes) -> float:
    return max(0.0, times.scheduled - times.queued)


def _decoded_for(times: RequestTimes) -> float:
    return times.last_token - times.first_token


def _marks(ended: Sequence[_Ended]) -> list[Mark]:
    return [Mark(end.trace_id, end.times.sent) for end in ended]
