"""Prometheus metrics, under Quire's names and optionally under vLLM's as well."""

from __future__ import annotations

import collections
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.process_collector import ProcessCollector
from typing_extensions import override

from quire.config.options import EngineOptions, MetricsOptions
from quire.config.types import BucketFamily
from quire.engine.client.model_info import Generates, ModelInfo
from quire.engine.client.origin import Origin, current_origin
from quire.engine.client.protocol import MemoryTag, SleepLevel, StepStats
from quire.engine.client.records import (
    Observer,
    Rejection,
    RequestRecord,
    RequestTimes,
    SleepOperation,
    ToolRequest,
)
from quire.metrics import buckets
from quire.metrics.aliases import PREFIX, Aliases, is_in_vllm
from quire.metrics.buckets import buckets_by_family

_LABELS = ("model_name", "engine")
_STEP_COUNTERS = {
    "prefix_queries": "prefix_queries",
    "prefix_hits": "prefix_hits",
    "encoder_queries": "item_queries",
    "encoder_hits": "item_hits",
    "preemptions": "preemptions",
    "drafts": "drafts",
    "drafted": "drafted_tokens",
    "accepted": "accepted_tokens",
    "corrupted": "corrupted",
}
# All but the share of memory are named as in vLLM, for autoscalers and routers that read them.
_CACHE_LABELS = (
    *("block_size", "num_gpu_blocks", "cache_dtype", "kv_cache_free_memory_fraction", "enable_prefix_caching"),
    "prefix_caching_hash_algo",
)
_REASONS = ("stop", "length", "abort", "error")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")  # of prompt tokens; nothing comes from outside
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_DEFAULTS = MetricsOptions()
_FrontWait = Literal["preprocessing", "grammar"]  # what a request waits for before the engine gets it


def exemplar_of(origin: Origin) -> dict[str, str] | None:
    """Return the labels of the exemplar of a request; None if it is part of no trace that is recorded."""
    span = origin.span
    return {"trace_id": span.trace_id} if span is not None and span.sampled else None


class BatchHistogram(Histogram):
    """A histogram that takes many values at once, in a quarter of the time."""

    def observe_all(self, values: Sequence[float]) -> None:
        """Observe values, without exemplars."""
        self._sum.inc(sum(values))
        for bucket, count in collections.Counter(bisect_left(self._upper_bounds, value) for value in values).items():
            self._buckets[bucket].inc(count)


class ResidencyHistograms(NamedTuple):
    """How long KV blocks stay in the prefix cache."""

    lifetime: BatchHistogram
    idle: BatchHistogram
    reuse_gap: BatchHistogram


class Metrics:
    """All metrics of a server. A `ModelMetrics` for each model records into them."""

    def __init__(
        self,
        *,
        max_model_len: int,
        vllm_names: bool,
        options: MetricsOptions = _DEFAULTS,
        kv_cache_metrics: bool = False,
    ) -> None:
        """Define all metrics.

        Args:
            max_model_len: the largest of all models, for the buckets of token counts.
            vllm_names: export metrics under vLLM's names as well.
            options: deprecated metrics, and buckets.
            kv_cache_metrics: there are histograms of the time that KV blocks stay in the prefix cache.
        """
        self._engine = CollectorRegistry(auto_describe=True)
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._aliases = Aliases(vllm_names=vllm_names, hidden_version=options.show_hidden_metrics_for_version)
        self._buckets = buckets_by_family(options.custom_histogram_buckets, max_model_len)
        self.histogram_families: dict[BucketFamily, list[str]] = {family: [] for family in self._buckets}
        self._define_engine()
        self._define_speculation()
        self._define_tokens()
        self._define_realtime()
        self._define_sleep()
        self._define_steps()
        self._define_sizes()
        self._define_latencies()
        self.trace_spans_dropped = Counter(
            PREFIX + "trace_spans_dropped",
            "Spans of traces that were not exported, because too many waited or the collector did not take them",
            registry=self._engine,
        )
        self.residency = self._residency_histograms() if kv_cache_metrics else None
        self.http_requests = Counter(
            "http_requests",
            "HTTP requests by method, handler and class of status (2xx to 5xx; 4xx also if the client disconnects "
            "before the response); /health, /ready, /ping, /metrics, /load and /version are not counted",
            ("method", "handler", "status"),
            registry=self._process,
        )
        self.http_seconds = Histogram(
            "http_request_duration_seconds",
            "Duration of a counted HTTP request, until its response has been sent",
            ("method", "handler"),
            buckets=buckets.HTTP,
            registry=self._process,
        )

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now, under all names that are exported."""
        for metric in self._engine.collect():
            if metric.samples:
                yield metric
                yield from self._aliases.of(metric)
        for metric in self._process.collect():
            if metric.samples:
                yield metric

    def families(self) -> Iterator[tuple[Metric, bool]]:
        """All metrics but those of the process, and whether vLLM has them as well."""
        for metric in self._engine.collect():
            yield metric, is_in_vllm(metric.name)
        for collector in (self.http_requests, self.http_seconds):
            for metric in collector.collect():
                yield metric, False

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, (*_LABELS, *labels), registry=self._engine)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, (*_LABELS, *labels), registry=self._engine)

    def _histogram(self, name: str, text: str, family: BucketFamily) -> BatchHistogram:
        self.histogram_families[family].append(name)
        return BatchHistogram(PREFIX + name, text, _LABELS, buckets=self._buckets[family], registry=self._engine)

    def _define_engine(self) -> None:
        self.running = self._gauge("num_requests_running", "Running sequences")
        self.waiting = self._gauge(
            "num_requests_waiting",
            "Sequences that are not running: they wait to be scheduled, or for more input (streaming input); and "
            "requests that wait for their media or their grammar",
        )
        self.waiting_by_reason = self._gauge(
            "num_requests_waiting_by_reason",
            "Sequences that are not running, by reason; capacity: they wait to be scheduled; deferred: for more input; "
            "preprocessing: requests whose media are read and prepared; grammar: requests whose grammar is checked",
            "reason",
        )
        self.sleep_state = self._gauge(
            "engine_sleep_state",
            "1 for the states that the engine is in: awake; weights_offloaded: asleep, level 1; discard_all: level 2",
            "sleep_state",
        )
        self.refusals = Counter(
            PREFIX + "admission_rejections",
            "Requests refused because too many sequences run or wait, by limit; max_num_queued_reqs, as vLLM calls it: "
            "of all clients (--max-num-queued-seqs); max_client_share: of one client (--max-client-share)",
            ("model_name", "reason"),
            registry=self._engine,
        )
        self.rate_limited = Counter(
            PREFIX + "rate_limited_requests",
            "Requests refused as their API key has reached a limit, by the name of the key and by reason: requests or "
            "tokens per minute, or concurrency",
            ("key", "reason"),
            registry=self._engine,
        )
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1")
        self.cache_config = Gauge(
            PREFIX + "cache_config_info", "Settings of the KV cache", (*_LABELS, *_CACHE_LABELS), registry=self._engine
        )
        self.kv_blocks = self._gauge("kv_cache_blocks_used", "KV blocks in use")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.encoder_queries = self._counter("encoder_cache_queries", "Items of media looked up in the encoder cache")
        self.encoder_hits = self._counter("encoder_cache_hits", "Items of media found in the encoder cache")
        self.mm_queries = self._counter(
            "mm_cache_queries", "Pictures and videos looked up in the cache of prepared ones"
        )
        self.mm_hits = self._counter(
            "mm_cache_hits", "Pictures and videos that were prepared, or being prepared, for another request"
        )
        self.preemptions = self._counter("num_preemptions", "Sequences that were preempted because KV blocks ran out")

    def _define_speculation(self) -> None:
        self.drafts = self._counter("spec_decode_num_drafts", "Drafts of speculative decoding that were verified")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted")
        self.accepted_per_pos = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were accepted, by their position in the draft, from 0",
            "position",
        )

    def _define_tokens(self) -> None:
        self.prompt_tokens = self._counter(
            "prompt_tokens",
            "Prompt tokens, counted when a sequence ends; n answers count n times; sequences without output are not "
            "counted",
        )
        self.prompt_cached = self._counter(
            "prompt_tokens_cached",
            "Part of prompt_tokens that was in the prefix cache; prefix_cache_hits also counts unfinished sequences",
        )
        self.prompt_by_source = self._counter(
            "prompt_tokens_by_source",
            "prompt_tokens by where their keys and values came from; local_cache_hit: the prefix cache; "
            "external_kv_transfer is always 0",
            "source",
        )
        self.cached_by_source = self._counter(
            "prompt_tokens_cached_by_source",
            "prompt_tokens_cached by the place of the cache; there is only one: device",
            "source",
        )
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self.restarts = self._counter("engine_restarts", "Restarts of the engine after its death")
        self.audio_seconds = self._counter(
            "audio_seconds", "Seconds of transcribed audio; interim transcriptions of realtime sessions do not count"
        )
        self.corrupted = self._counter(
            "corrupted_requests",
            "Sequences that ended with an error as the model computed NaN or infinity for them",
        )
        self.success = self._counter("request_success", "Finished sequences by finish reason", "finished_reason")
        self.tool_parses = Counter(
            PREFIX + "tool_call_parser_invocations",
            "Searches for tool calls in answers to requests with tools: one for each answer, or if it streams for each "
            "piece; outcome: tool_call, no_tool_call; mode: streaming, non_streaming",
            ("model_name", "mode", "outcome", "request_type"),
            registry=self._engine,
        )

    def _define_realtime(self) -> None:
        self.realtime_sessions = Gauge(
            PREFIX + "websocket_connections_active", "Open realtime sessions", registry=self._engine
        )
        self.realtime_opened = Counter(
            PREFIX + "websocket_connections", "Realtime sessions opened so far", registry=self._engine
        )
        self.realtime_seconds = Histogram(
            PREFIX + "websocket_connection_duration_seconds",
            "Duration of a realtime session",
            buckets=buckets.SESSION,
            registry=self._engine,
        )

    def _define_sleep(self) -> None:
        self.sleep_seconds = Histogram(
            PREFIX + "sleep_mode_operation_duration_seconds",
            "Time in which the engine is put to sleep or woken up, waiting for requests included",
            (*_LABELS, "operation"),
            buckets=buckets.SLEEP,
            registry=self._engine,
        )
        self.sleep_operations = self._gauge(
            "sleep_mode_operations_in_flight",
            "Requests to put the engine to sleep or wake it, not answered",
            "operation",
        )

    def _define_steps(self) -> None:
        self.step_tokens = self._histogram(
            "iteration_tokens_total", "Prompt and generated tokens of an engine step", "iteration_tokens"
        )
        self.step_seconds = self._histogram(
            "step_duration_seconds", "Duration of an engine step", "inter_token_latency"
        )

    def _define_sizes(self) -> None:
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence", "request_tokens")
        self.request_output = self._histogram(
            "request_generation_tokens", "Tokens generated for a sequence", "request_tokens"
        )
        self.request_computed = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a sequence that were not in the prefix cache",
            "request_tokens",
        )
        self.request_longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest of a prompt's n answers", "request_tokens"
        )
        self.request_max = self._histogram("request_params_max_tokens", "max_tokens of a sequence", "request_tokens")
        self.request_n = self._histogram("request_params_n", "n of a prompt", "request_params_n")
        self.request_preemptions = self._histogram(
            "request_num_preemptions",
            "How often a finished sequence was preempted",
            "request_num_preemptions",
        )

    def _define_latencies(self) -> None:
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token", "time_to_first_token"
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds",
            "Time between two outputs of a sequence, which have one token each, or more with speculation",
            "inter_token_latency",
        )
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token of a sequence, without the first token",
            "inter_token_latency",
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end of a sequence", "request_latency"
        )
        self.queue = self._histogram(
            "request_queue_time_seconds", "Time from arrival until a sequence is scheduled", "request_latency"
        )
        self.preprocess = self._histogram(
            "mm_preprocess_seconds",
            "Time in which the media of a request are fetched, decoded and prepared, waiting for memory and processes "
            "included",
            "time_to_first_token",
        )
        self.grammar = self._histogram(
            "grammar_check_seconds",
            "Time in which the grammar of a request is written and checked",
            "time_to_first_token",
        )
        self.inference = self._histogram(
            "request_inference_time_seconds", "Time from being scheduled to the last token", "request_latency"
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "Time from being scheduled to the first token", "request_latency"
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "Time from the first to the last token", "request_latency"
        )

    def _residency_histograms(self) -> ResidencyHistograms:
        return ResidencyHistograms(
            lifetime=self._histogram(
                "kv_block_lifetime_seconds",
                "Time from the allocation of a KV block until its content is evicted",
                "kv_cache_residency",
            ),
            idle=self._histogram(
                "kv_block_idle_before_evict_seconds",
                "Time from the last use of a KV block until its content is evicted",
                "kv_cache_residency",
            ),
            reuse_gap=self._histogram(
                "kv_block_reuse_gap_seconds",
                "Time between two uses of the cached content of a KV block",
                "kv_cache_residency",
            ),
        )


class ModelMetrics(Observer):
    """Records the metrics of one model."""

    def __init__(self, metrics: Metrics, model_name: str, engine: int) -> None:
        self._metrics = metrics
        self._labels = labels = (model_name, str(engine))
        self._gauges = {
            name: getattr(metrics, name).labels(*labels) for name in ("running", "waiting", "kv_usage", "kv_blocks")
        }
        self._counters = {
            name: getattr(metrics, name).labels(*labels)
            for name in (
                *_STEP_COUNTERS,
                "prompt_tokens",
                "prompt_cached",
                "generation_tokens",
                "audio_seconds",
                "restarts",
                *("mm_queries", "mm_hits"),
            )
        }
        self._in_step = 0  # tokens of the step whose outputs arrive
        self._in_engine = 0  # sequences that wait there
        self._in_front: dict[_FrontWait, int] = {"preprocessing": 0, "grammar": 0}
        reasons = ("capacity", "deferred", *self._in_front)
        self._waiting = {name: metrics.waiting_by_reason.labels(*labels, name) for name in reasons}
        self._sleep = {state: metrics.sleep_state.labels(*labels, state) for state in _SLEEP_STATES}
        self._sleep_operations = {
            name: metrics.sleep_operations.labels(*labels, name) for name in get_args(SleepOperation)
        }
        self._rejections = {name: metrics.refusals.labels(model_name, name) for name in get_args(Rejection)}
        self.on_sleep(frozenset(), 1)
        self._ends = {reason: metrics.success.labels(*labels, reason) for reason in _REASONS}
        self._sources = {source: metrics.prompt_by_source.labels(*labels, source) for source in _SOURCES}
        self._cached_on_device = metrics.cached_by_source.labels(*labels, "device")
        names = (
            *("step_tokens", "step_seconds", "request_prompt", "request_output", "request_max", "request_n", "ttft"),
            *("itl", "tpot", "e2e", "queue", "inference", "prefill", "decode", "request_computed", "request_longest"),
            *("request_preemptions", "preprocess", "grammar"),
        )
        self._histograms: dict[str, BatchHistogram] = {name: getattr(metrics, name).labels(*labels) for name in names}
        residency = () if metrics.residency is None else metrics.residency
        self._residency = [histogram.labels(*labels) for histogram in residency]
        self._gaps: list[float] = []  # seconds between tokens in that step

    def describe(self, info: ModelInfo, options: EngineOptions) -> None:
        """Publish the settings of the engine's KV cache, and zeros of what will be counted for such a model."""
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
        gauges, counters = self._gauges, self._counters
        if self._in_step:
            counters["generation_tokens"].inc(self._in_step)
            self._in_step = 0
        if self._gaps:
            self._histograms["itl"].observe_all(self._gaps)
            self._gaps.clear()
        gauges["running"].set(stats.running)
        self._in_engine = stats.waiting
        gauges["waiting"].set(stats.waiting + sum(self._in_front.values()))
        self._waiting["capacity"].set(stats.waiting - stats.deferred)
        self._waiting["deferred"].set(stats.deferred)
        gauges["kv_blocks"].set(stats.blocks_used)
        gauges["kv_usage"].set(stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0)
        for name, attribute in _STEP_COUNTERS.items():
            if count := getattr(stats, attribute):
                counters[name].inc(count)
        if stats.step_tokens:
            self._histograms["step_tokens"].observe(stats.step_tokens)
            self._histograms["step_seconds"].observe(stats.step_seconds)
        for position, count in enumerate(stats.accepted_per_position):
            self._metrics.accepted_per_pos.labels(*self._labels, position).inc(count)
        if self._residency:
            self._observe_residency(stats)

    @override
    def on_tokens(self, origin: Origin, times: RequestTimes, now: float, count: int) -> None:
        self._in_step += count
        if times.first_token:
            self._gaps.append(now - times.last_token)
        else:
            self._histograms["ttft"].observe(now - times.queued, exemplar_of(origin))

    @override
    def on_finish(self, record: RequestRecord) -> None:
        self._ends[record.finish_reason].inc()
        if record.kind == "pool":
            self._observe_pooled(record)
        elif record.times.first_token:
            self._observe_generated(record)
        if record.longest_answer:
            self._histograms["request_n"].observe(record.answers)
            self._histograms["request_longest"].observe(record.longest_answer)

    @override
    def on_audio(self, seconds: float) -> None:
        self._counters["audio_seconds"].inc(seconds)

    @override
    def on_media_lookup(self, found: bool) -> None:
        self._counters["mm_queries"].inc()
        self._counters["mm_hits"].inc(found)

    @override
    def on_preprocessing_start(self) -> None:
        self._add_waiting("preprocessing", 1)

    @override
    def on_preprocessing_end(self, seconds: float) -> None:
        self._add_waiting("preprocessing", -1)
        self._histograms["preprocess"].observe(seconds, exemplar_of(current_origin()))

    @override
    def on_grammar_start(self) -> None:
        self._add_waiting("grammar", 1)

    @override
    def on_grammar_end(self, seconds: float) -> None:
        self._add_waiting("grammar", -1)
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

    def _add_waiting(self, reason: _FrontWait, count: int) -> None:
        self._in_front[reason] += count
        self._waiting[reason].set(self._in_front[reason])
        self._gauges["waiting"].set(self._in_engine + sum(self._in_front.values()))

    def _tool_parses(self, api: ToolRequest, streams: bool, called: bool) -> Counter:
        mode, outcome = "streaming" if streams else "non_streaming", "tool_call" if called else "no_tool_call"
        return self._metrics.tool_parses.labels(self._labels[0], mode, outcome, api)

    def _observe_residency(self, stats: StepStats) -> None:
        lifetime, idle, reuse_gap = self._residency
        lifetime.observe_all([block.lifetime for block in stats.evicted_blocks])
        idle.observe_all([block.idle for block in stats.evicted_blocks])
        reuse_gap.observe_all(stats.block_reuse_gaps)

    def _count_prompt(self, record: RequestRecord) -> None:
        self._counters["prompt_tokens"].inc(record.prompt_tokens)
        self._counters["prompt_cached"].inc(record.cached_tokens)
        self._sources["local_compute"].inc(max(0, record.prompt_tokens - record.cached_tokens))
        self._sources["local_cache_hit"].inc(record.cached_tokens)
        self._cached_on_device.inc(record.cached_tokens)

    def _observe_pooled(self, record: RequestRecord) -> None:
        times, histograms = record.times, self._histograms
        if record.finish_reason != "stop":
            return
        self._count_prompt(record)
        histograms["request_prompt"].observe(record.prompt_tokens)
        histograms["request_preemptions"].observe(record.preemptions)
        exemplar = exemplar_of(record.origin)
        histograms["e2e"].observe(times.sent - times.queued, exemplar)
        histograms["queue"].observe(max(0.0, times.scheduled - times.queued), exemplar)
        histograms["inference"].observe(times.sent - times.scheduled, exemplar)

    def _observe_generated(self, record: RequestRecord) -> None:
        times, histograms = record.times, self._histograms
        self._count_prompt(record)
        decode = times.last_token - times.first_token
        for name, value in (
            ("request_prompt", record.prompt_tokens),
            ("request_computed", record.prompt_tokens - record.cached_tokens),
            ("request_output", record.output_tokens),
            ("request_max", record.max_tokens),
            ("request_preemptions", record.preemptions),
        ):
            histograms[name].observe(value)
        exemplar = exemplar_of(record.origin)
        for name, seconds in (
            ("e2e", times.sent - times.queued),
            ("queue", max(0.0, times.scheduled - times.queued)),
            ("inference", times.last_token - times.scheduled),
            ("prefill", times.first_token - times.scheduled),
            ("decode", decode),
        ):
            histograms[name].observe(seconds, exemplar)
        if record.output_tokens > 1:
            histograms["tpot"].observe(decode / (record.output_tokens - 1), exemplar)
