"""Prometheus metrics, under Quire's names and optionally under vLLM's as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.process_collector import ProcessCollector

from quire.config.options import MetricsOptions
from quire.config.types import BucketFamily
from quire.metrics import buckets
from quire.metrics.aliases import PREFIX, Aliases, is_in_vllm
from quire.metrics.batches import Batch, BatchHistogram
from quire.metrics.buckets import buckets_by_family
from quire.metrics.http import HttpMetrics

_LABELS = ("model_name", "engine")
# All but the share of memory are named as in vLLM, for autoscalers and routers that read them.
_CACHE_LABELS = (
    *("block_size", "num_gpu_blocks", "cache_dtype", "kv_cache_free_memory_fraction", "enable_prefix_caching"),
    "prefix_caching_hash_algo",
)
_STATES = ("engine_sleep_state", "cache_config_info")  # of engines, which cannot be added up
_DEFAULTS = MetricsOptions()


class ResidencyHistograms(NamedTuple):
    """How long KV blocks stay in the prefix cache."""

    lifetime: BatchHistogram
    idle: BatchHistogram
    reuse_gap: BatchHistogram


class Metrics:
    """All metrics of a server. A `ModelMetrics` for each model records into them.

    Attributes:
        batches: events that are counted before metrics are told.
        hides_engine: gauges of engines show nothing, as another process shows them.
    """

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
        self._define_transfers()
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
        self.http = HttpMetrics(self._process)
        self.batches: list[Batch[Any]] = [self.http.answered]
        self.hides_engine = False

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now, under all names that are exported."""
        for batch in self.batches:
            batch.settle()
        for metric in self._engine.collect():
            if metric.samples:
                yield metric
                yield from self._aliases.of(metric)
        for metric in self._process.collect():
            if metric.samples:
                yield metric

    def of_this_process(self) -> list[Metric]:
        """All metrics as they are now, but without what the engines' gauges show."""
        self.hides_engine = True
        try:
            metrics = list(self.collect())
        finally:
            self.hides_engine = False
        return [metric for metric in metrics if metric.name.partition(":")[2] not in _STATES]

    def families(self) -> Iterator[tuple[Metric, bool]]:
        """All metrics but those of the process, and whether vLLM has them as well."""
        for metric in self._engine.collect():
            yield metric, is_in_vllm(metric.name)
        for collector in (self.http.requests, self.http.seconds):
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
            "Sequences that are not running: they wait to be scheduled, for more input (streaming input), or for KV "
            "blocks that are read from the disk or another server; and requests that wait for their media or their "
            "grammar",
        )
        self.waiting_by_reason = self._gauge(
            "num_requests_waiting_by_reason",
            "Sequences that are not running, by reason; capacity: they wait to be scheduled; deferred: for more input, "
            "or for KV blocks that are read from the disk; preprocessing: requests whose media are read and prepared; "
            "grammar: requests whose grammar is checked",
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
        self.external_queries = self._counter(
            "external_prefix_cache_queries",
            "Prompt tokens that were not in the KV cache, and looked up in the tiers of --kv-offloading-size and "
            "--kv-offloading-disk-size or in another server (--kv-transfer-config)",
        )
        self.external_hits = self._counter(
            "external_prefix_cache_hits",
            "Prompt tokens that were read from these tiers or from another server",
        )
        self.lost_tokens = self._counter(
            "prefix_cache_lost_tokens",
            "Tokens of prompts of models with states that were computed before, and have to be computed again, by "
            "reason; no_snapshot: their states were not saved there; evicted: their states or KV blocks were evicted; "
            "template_changed: a message in the middle of a chat is another than in the prompt before",
            "reason",
        )
        self.snapshot_hits = self._counter("state_snapshot_hits", "Sequences that began with saved states")
        self.snapshots_saved = self._counter("state_snapshots_saved", "States of sequences that were saved")
        self.snapshots_evicted = self._counter("state_snapshots_evicted", "Saved states that were evicted for others")
        self.snapshot_bytes = self._gauge(
            "state_snapshot_bytes", "Size of the saved states of sequences (--state-snapshot-memory), on each rank"
        )
        self.offload_used = self._gauge(
            "kv_offload_used_bytes", "Size of the files of --kv-offloading-disk-size, of all models and servers"
        )
        self.unwritten = self._gauge(
            "kv_offload_unwritten_blocks",
            "KV blocks of the prefix cache that are not in the last tier yet: on the disk, or else in host memory",
        )
        self.host_usage = self._gauge(
            "kv_offload_cpu_cache_usage_perc", "Share of --kv-offloading-size that has KV blocks, 0 to 1"
        )
        self.load_bytes = self._counter(
            "kv_offload_load_bytes",
            "Bytes of KV blocks copied from host memory to the device, or on CPUs read from files",
        )
        self.load_seconds = self._counter("kv_offload_load_time", "Seconds in which these bytes were copied or read")
        self.store_bytes = self._counter(
            "kv_offload_store_bytes",
            "Bytes of KV blocks copied from the device to host memory, or on CPUs written to files",
        )
        self.store_seconds = self._counter("kv_offload_store_time", "Seconds in which they were copied or written")
        self.file_reads = self._counter(
            "kv_offload_tiering_read_bytes", "Bytes of KV blocks read from files to host memory (fs)", "tier"
        )
        self.file_read_seconds = self._counter(
            "kv_offload_tiering_read_time", "Seconds in which these bytes were read", "tier"
        )
        self.file_writes = self._counter(
            "kv_offload_tiering_write_bytes", "Bytes of KV blocks written from host memory to files (fs)", "tier"
        )
        self.file_write_seconds = self._counter(
            "kv_offload_tiering_write_time", "Seconds in which they were written", "tier"
        )
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

    def _define_transfers(self) -> None:
        """Metrics of --kv-transfer-config, by the names that vLLM's NixlConnector has."""
        self.transfer_seconds = BatchHistogram(
            PREFIX + "nixl_xfer_time_seconds",
            "Time for which a request has waited for KV blocks of another server, all of which came",
            _LABELS,
            buckets=buckets.TRANSFER_SECONDS,
            registry=self._engine,
        )
        self.transfer_bytes = BatchHistogram(
            PREFIX + "nixl_bytes_transferred",
            "Bytes of the KV blocks that another server has sent for a request",
            _LABELS,
            buckets=buckets.TRANSFER_BYTES,
            registry=self._engine,
        )
        self.failed_transfers = self._counter(
            "nixl_num_failed_transfers", "Requests whose KV blocks another server did not send, or not all of them"
        )
        self.expired_holds = self._counter(
            "nixl_num_kv_expired_reqs",
            "Requests whose KV blocks were kept for another server and given back before it has read them: their time "
            "was over, others needed the room, or they were not valid any more",
        )
        self.held_blocks = self._gauge("kv_transfer_held_blocks", "KV blocks that are kept for other servers")

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
            "prompt_tokens by where their keys and values came from; local_cache_hit: the prefix cache in memory; "
            "external_kv_transfer: the tiers of --kv-offloading-size and --kv-offloading-disk-size, or another server "
            "(--kv-transfer-config)",
            "source",
        )
        self.cached_by_source = self._counter(
            "prompt_tokens_cached_by_source",
            "prompt_tokens_cached by the place of the cache; device: the KV cache; host: the memory of "
            "--kv-offloading-size; disk: the files of --kv-offloading-disk-size, and what was read together with such; "
            "p2p: another server. All but device count when a sequence begins",
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
