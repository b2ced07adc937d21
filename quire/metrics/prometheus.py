"""Prometheus metrics, under Quire's names and optionally under vLLM's as well."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from typing_extensions import override

from quire.config.options import EngineOptions
from quire.engine.client.model_info import ModelInfo
from quire.engine.client.protocol import MemoryTag, SleepLevel, StepStats
from quire.engine.client.records import Observer, RequestRecord, RequestTimes
from quire.metrics import buckets

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4  # version 1.0.0 requires quoted names
_PREFIX, _ALIAS = "quire:", "vllm:"
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
# Metrics that vLLM does not have.
_QUIRE_ONLY = {
    _PREFIX + name
    for name in (
        *("kv_cache_blocks_used", "step_duration_seconds", "engine_restarts", "audio_seconds"),
        *("encoder_cache_queries", "encoder_cache_hits", "mm_preprocess_seconds"),
        "rate_limited_requests",
    )
}
_REASONS = ("stop", "length", "abort", "error")
_QUEUE_LIMIT = "max_num_queued_reqs"  # vLLM's name of the limit that --max-num-queued-seqs is
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class _Alias(Collector):
    """Export the metrics of another registry that vLLM has as well, under vLLM's names."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Copies of the metrics with the prefix `vllm:`."""
        for metric in self._source.collect():
            if metric.name in _QUIRE_ONLY:
                continue
            copy = Metric(_rename(metric.name), metric.documentation, metric.type)
            copy.samples = [Sample(_rename(sample.name), *sample[1:]) for sample in metric.samples]
            yield copy


class Metrics:
    """All metrics of a server. A `ModelMetrics` for each model records into them."""

    def __init__(self, *, max_model_len: int, vllm_names: bool) -> None:
        """`max_model_len`: the largest of all models, for the buckets of token counts."""
        self._engine = CollectorRegistry(auto_describe=True)
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._registries: list[CollectorRegistry] = [self._engine, self._process]
        if vllm_names:
            aliases = CollectorRegistry()
            aliases.register(_Alias(self._engine))
            self._registries.append(aliases)
        self._define_engine()
        self._define_tokens()
        self._define_realtime()
        self._define_steps()
        self._define_sizes(buckets.token_counts(max_model_len))
        self._define_latencies()
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

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return b"".join(generate_latest(registry) for registry in self._registries)

    def families(self) -> Iterator[tuple[Metric, bool]]:
        """All metrics but those of the process, and whether vLLM has them as well."""
        for metric in self._engine.collect():
            yield metric, metric.name not in _QUIRE_ONLY
        for collector in (self.http_requests, self.http_seconds):
            for metric in collector.collect():
                yield metric, False

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, text, (*_LABELS, *labels), registry=self._engine)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, (*_LABELS, *labels), registry=self._engine)

    def _histogram(self, name: str, text: str, steps: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, _LABELS, buckets=steps, registry=self._engine)

    def _define_engine(self) -> None:
        self.running = self._gauge("num_requests_running", "Running sequences")
        self.waiting = self._gauge(
            "num_requests_waiting",
            "Sequences that are not running: they wait to be scheduled, or for more input (streaming input); and "
            "requests that wait for their media",
        )
        self.waiting_by_reason = self._gauge(
            "num_requests_waiting_by_reason",
            "Sequences that are not running, by reason; capacity: they wait to be scheduled; deferred: for more input; "
            "preprocessing: requests whose media are read and prepared",
            "reason",
        )
        self.sleep_state = self._gauge(
            "engine_sleep_state",
            "1 for the states that the engine is in: awake; weights_offloaded: asleep, level 1; discard_all: level 2",
            "sleep_state",
        )
        self.refusals = Counter(
            _PREFIX + "admission_rejections",
            "Requests refused because too many sequences run or wait (--max-num-queued-seqs), by vLLM's name of the "
            "limit",
            ("model_name", "reason"),
            registry=self._engine,
        )
        self.rate_limited = Counter(
            _PREFIX + "rate_limited_requests",
            "Requests refused as their API key has reached a limit, by the name of the key and by reason: requests or "
            "tokens per minute, or concurrency",
            ("key", "reason"),
            registry=self._engine,
        )
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1")
        self.cache_config = Gauge(
            _PREFIX + "cache_config_info", "Settings of the KV cache", (*_LABELS, *_CACHE_LABELS), registry=self._engine
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
        self.drafts = self._counter("spec_decode_num_drafts", "Drafts of speculative decoding that were verified")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted")

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

    def _define_realtime(self) -> None:
        self.realtime_sessions = Gauge(
            _PREFIX + "websocket_connections_active", "Open realtime sessions", registry=self._engine
        )
        self.realtime_opened = Counter(
            _PREFIX + "websocket_connections", "Realtime sessions opened so far", registry=self._engine
        )
        self.realtime_seconds = Histogram(
            _PREFIX + "websocket_connection_duration_seconds",
            "Duration of a realtime session",
            buckets=buckets.SESSION,
            registry=self._engine,
        )

    def _define_steps(self) -> None:
        self.step_tokens = self._histogram(
            "iteration_tokens_total", "Prompt and generated tokens of an engine step", buckets.STEP_TOKENS
        )
        self.step_seconds = self._histogram("step_duration_seconds", "Duration of an engine step", buckets.ITL)

    def _define_sizes(self, tokens: tuple[int, ...]) -> None:
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence", tokens)
        self.request_output = self._histogram("request_generation_tokens", "Tokens generated for a sequence", tokens)
        self.request_computed = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a sequence that were not in the prefix cache",
            tokens,
        )
        self.request_longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest of a prompt's n answers", tokens
        )
        self.request_max = self._histogram("request_params_max_tokens", "max_tokens of a sequence", tokens)
        self.request_n = self._histogram("request_params_n", "n of a prompt", buckets.ANSWERS)
        self.request_preemptions = self._histogram(
            "request_num_preemptions", "How often a finished sequence was preempted", buckets.PREEMPTIONS
        )

    def _define_latencies(self) -> None:
        self.ttft = self._histogram("time_to_first_token_seconds", "Time from arrival to the first token", buckets.TTFT)
        self.itl = self._histogram(
            "inter_token_latency_seconds",
            "Time between two outputs of a sequence, which have one token each, or more with speculation",
            buckets.ITL,
        )
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token of a sequence, without the first token",
            buckets.ITL,
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end of a sequence", buckets.LATENCY
        )
        self.queue = self._histogram(
            "request_queue_time_seconds", "Time from arrival until a sequence is scheduled", buckets.LATENCY
        )
        self.preprocess = self._histogram(
            "mm_preprocess_seconds",
            "Time in which the media of a request are fetched, decoded and prepared, waiting for memory and processes "
            "included",
            buckets.TTFT,
        )
        self.inference = self._histogram(
            "request_inference_time_seconds", "Time from being scheduled to the last token", buckets.LATENCY
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "Time from being scheduled to the first token", buckets.LATENCY
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "Time from the first to the last token", buckets.LATENCY
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
        reasons = ("capacity", "deferred", "preprocessing")
        self._waiting = {name: metrics.waiting_by_reason.labels(*labels, name) for name in reasons}
        self._in_engine = 0  # sequences that wait there
        self._preprocessing = 0  # requests that wait for their media
        self._sleep = {state: metrics.sleep_state.labels(*labels, state) for state in _SLEEP_STATES}
        self._refusals = metrics.refusals.labels(model_name, _QUEUE_LIMIT)
        self.on_sleep(frozenset(), 1)
        self._ends = {reason: metrics.success.labels(*labels, reason) for reason in _REASONS}
        names = (
            *("step_tokens", "step_seconds", "request_prompt", "request_output", "request_max", "request_n", "ttft"),
            *("itl", "tpot", "e2e", "queue", "inference", "prefill", "decode", "request_computed", "request_longest"),
            *("request_preemptions", "preprocess"),
        )
        self._histograms: dict[str, Histogram] = {name: getattr(metrics, name).labels(*labels) for name in names}
        self._itl = self._histograms["itl"]
        self._generated = self._counters["generation_tokens"]

    def describe_cache(self, info: ModelInfo, options: EngineOptions) -> None:
        """Publish the settings of the engine's KV cache."""
        values = (info.block_size, info.num_blocks, options.kv_cache_dtype, options.kv_cache_free_memory_fraction)
        self._metrics.cache_config.labels(
            *self._labels, *map(str, values), str(options.enable_prefix_caching), options.prefix_caching_hash_algo
        ).set(1)

    @override
    def on_step(self, stats: StepStats) -> None:
        gauges, counters = self._gauges, self._counters
        gauges["running"].set(stats.running)
        self._in_engine = stats.waiting
        gauges["waiting"].set(stats.waiting + self._preprocessing)
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

    @override
    def on_tokens(self, times: RequestTimes, now: float, count: int) -> None:
        self._generated.inc(count)
        if times.first_token:
            self._itl.observe(now - times.last_token)
        else:
            self._histograms["ttft"].observe(now - times.queued)

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
        self._add_preprocessing(1)

    @override
    def on_preprocessing_end(self, seconds: float) -> None:
        self._add_preprocessing(-1)
        self._histograms["preprocess"].observe(seconds)

    @override
    def on_overload(self) -> None:
        self._refusals.inc()

    @override
    def on_sleep(self, asleep: frozenset[MemoryTag], level: SleepLevel) -> None:
        self._sleep["awake"].set(not asleep)
        self._sleep["weights_offloaded"].set("weights" in asleep and level == 1)
        self._sleep["discard_all"].set("weights" in asleep and level == 2)

    @override
    def on_restart(self) -> None:
        self._counters["restarts"].inc()
        self.on_step(StepStats())

    def _add_preprocessing(self, count: int) -> None:
        self._preprocessing += count
        self._waiting["preprocessing"].set(self._preprocessing)
        self._gauges["waiting"].set(self._in_engine + self._preprocessing)

    def _observe_pooled(self, record: RequestRecord) -> None:
        times, histograms = record.times, self._histograms
        if record.finish_reason != "stop":
            return
        self._counters["prompt_tokens"].inc(record.prompt_tokens)
        self._counters["prompt_cached"].inc(record.cached_tokens)
        histograms["request_prompt"].observe(record.prompt_tokens)
        histograms["request_preemptions"].observe(record.preemptions)
        histograms["e2e"].observe(times.sent - times.queued)
        histograms["queue"].observe(max(0.0, times.scheduled - times.queued))
        histograms["inference"].observe(times.sent - times.scheduled)

    def _observe_generated(self, record: RequestRecord) -> None:
        times, histograms = record.times, self._histograms
        self._counters["prompt_tokens"].inc(record.prompt_tokens)
        self._counters["prompt_cached"].inc(record.cached_tokens)
        decode = times.last_token - times.first_token
        for name, value in (
            ("request_prompt", record.prompt_tokens),
            ("request_computed", record.prompt_tokens - record.cached_tokens),
            ("request_output", record.output_tokens),
            ("request_max", record.max_tokens),
            ("request_preemptions", record.preemptions),
            ("e2e", times.sent - times.queued),
            ("queue", max(0.0, times.scheduled - times.queued)),
            ("inference", times.last_token - times.scheduled),
            ("prefill", times.first_token - times.scheduled),
            ("decode", decode),
        ):
            histograms[name].observe(value)
        if record.output_tokens > 1:
            histograms["tpot"].observe(decode / (record.output_tokens - 1))


def _rename(name: str) -> str:
    return _ALIAS + name.removeprefix(_PREFIX)
