"""What an operator should be told, as rules for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dashboards.metric_names import named_in

# Metrics whose names other programs have as well are only read of these jobs.
JOBS = 'job=~".*quire.*"'
RUNBOOKS = "docs/alerts.md"
_HTTP = "http_requests_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition that needs a person.

    Attributes:
        measured: what the condition compares; it has values on a healthy server, too.
        condition: what follows `measured`.
        lasting: how long it has to hold, as Prometheus writes durations.
        severity: `critical`: users are not served; `warning`: they are served badly, or soon not; `info`: they notice
            nothing, or somebody has wanted it.
        advice: what to look at first.
    """

    name: str
    measured: str
    condition: str
    lasting: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    advice: str

    @property
    def expression(self) -> str:
        """The condition in PromQL."""
        named_in([self.measured, self.condition])
        return f"{self.measured} {self.condition}"

    @property
    def runbook(self) -> str:
        """Where the documentation says what to do."""
        return f"{RUNBOOKS}#{self.name.lower()}"


def _share(part: str, whole: str, by: str) -> str:
    return f"sum by ({by}) (rate({part}[5m])) / sum by ({by}) (rate({whole}[5m]))"


_BY_SERVER = "job, instance"
_BY_MODEL = "job, instance, model_name"
_SERVER = "{{ $labels.instance }}"
_MODEL = "{{ $labels.model_name }} on {{ $labels.instance }}"
_SHARE = "{{ $value | humanizePercentage }}"
_SECONDS = "{{ $value | humanizeDuration }}"
_COUNT = '{{ $value | printf "%.0f" }}'

SERVERS = (
    Alert(
        name="QuireDown",
        measured=f"up{{{JOBS}}}",
        condition="== 0",
        lasting="1m",
        severity="critical",
        summary=f"{_SERVER} does not answer",
        advice="Prometheus cannot scrape it: the process has ended, hangs, or cannot be reached.",
    ),
    Alert(
        name="QuireRestartsAgainAndAgain",
        measured=f"changes(process_start_time_seconds{{{JOBS}}}[15m])",
        condition="> 2",
        lasting="0m",
        severity="critical",
        summary=f"{_SERVER} was started {_COUNT} times in 15 minutes",
        advice="It dies soon after its start; the last lines of its log say why. Exit status 137 is the OOM killer.",
    ),
    Alert(
        name="QuireServerErrors",
        measured=_share(f'{_HTTP}{{{JOBS}, status="5xx"}}', f"{_HTTP}{{{JOBS}}}", _BY_SERVER),
        condition="> 0.05",
        lasting="5m",
        severity="critical",
        summary=f"{_SHARE} of the requests to {_SERVER} fail with 5xx",
        advice="503: a queue is full, a model sleeps, or an engine restarts. 500: see the log.",
    ),
    Alert(
        name="QuireOpenFiles",
        measured=f"process_open_fds{{{JOBS}}} / process_max_fds{{{JOBS}}}",
        condition="> 0.8",
        lasting="5m",
        severity="warning",
        summary=f"{_SERVER} has {_SHARE} of its open files",
        advice="At 100 % it accepts no connections. Raise `ulimit -n`, or find clients that leave connections open.",
    ),
)
ENGINES = (
    Alert(
        name="QuireEngineStalled",
        measured="sum by (job, instance, model_name, engine) (increase(quire:iteration_tokens_total_count[2m]))",
        condition="== 0 and on (job, instance, model_name, engine) min_over_time(quire:num_requests_running[2m]) > 0",
        lasting="1m",
        severity="critical",
        summary=f"The engine of {_MODEL} runs no steps",
        advice="Sequences run, but none gets tokens. `/health` fails after `--stall-timeout`, so that a supervisor "
        "restarts the server; but not if somebody has paused it (`GET /is_paused`).",
    ),
    Alert(
        name="QuireEngineRestarted",
        measured="increase(quire:engine_restarts_total[15m])",
        condition="> 0",
        lasting="0m",
        severity="warning",
        summary=f"The engine of {_MODEL} has died and was started again",
        advice="The log has the reason. After five attempts the server ends.",
    ),
    Alert(
        name="QuireCorrupted",
        measured="increase(quire:corrupted_requests_total[15m])",
        condition="> 0",
        lasting="0m",
        severity="critical",
        summary=f"{_MODEL} computed NaN or infinity",
        advice="Weights or a kernel are broken, or the data type has too small a range. Answers of this server "
        "cannot be trusted.",
    ),
    Alert(
        name="QuireAsleep",
        measured='quire:engine_sleep_state{sleep_state="awake"}',
        condition="== 0",
        lasting="30m",
        severity="info",
        summary=f"{_MODEL} sleeps, or a part of it",
        advice="Its requests get status 503 until `POST /wake_up`.",
    ),
    Alert(
        name="QuireFailedSequences",
        measured=_share(
            'quire:request_success_total{finished_reason="error"}', "quire:request_success_total", _BY_MODEL
        ),
        condition="> 0.01",
        lasting="5m",
        severity="warning",
        summary=f"{_SHARE} of the sequences of {_MODEL} fail",
        advice="Also streams that had begun, whose HTTP status is 200. See the log.",
    ),
)
LOAD = (
    Alert(
        name="QuireQueueGrows",
        measured='avg_over_time(quire:num_requests_waiting_by_reason{reason="capacity"}[5m])',
        condition="> 10 and on (job, instance, model_name, engine) "
        'deriv(quire:num_requests_waiting_by_reason{reason="capacity"}[10m]) > 0',
        lasting="5m",
        severity="warning",
        summary=f"{_COUNT} sequences wait for {_MODEL}, and more and more",
        advice="Requests come faster than they are served: add servers, or lower the load.",
    ),
    Alert(
        name="QuireRefuses",
        measured="sum by (job, instance, model_name) "
        '(rate(quire:admission_rejections_total{reason="max_num_queued_reqs"}[5m]))',
        condition="> 0",
        lasting="5m",
        severity="warning",
        summary=f"{_MODEL} refuses requests",
        advice="The queue is full (`--max-num-queued-seqs`): clients get status 503 with Retry-After.",
    ),
    Alert(
        name="QuireSlowFirstToken",
        measured="histogram_quantile(0.95, sum by (job, instance, model_name, le) "
        "(rate(quire:time_to_first_token_seconds_bucket[5m])))",
        condition="> 10",
        lasting="10m",
        severity="warning",
        summary=f"p95 of the time to first token of {_MODEL} is {_SECONDS}",
        advice="The dashboard *Why was it slow* tells queue and prefill apart.",
    ),
    Alert(
        name="QuireKVCacheFull",
        measured="quire:kv_cache_usage_perc",
        condition="> 0.95 and on (job, instance, model_name, engine) rate(quire:num_preemptions_total[5m]) > 0",
        lasting="5m",
        severity="warning",
        summary=f"The KV cache of {_MODEL} is full, and sequences are preempted",
        advice="Sequences are computed more than once. Lower `--max-num-seqs`, enlarge the cache, or add servers.",
    ),
    Alert(
        name="QuireMediaQueue",
        measured='min_over_time(quire:num_requests_waiting_by_reason{reason="preprocessing"}[5m])',
        condition="> 20",
        lasting="0m",
        severity="warning",
        summary=f"{_COUNT} requests of {_MODEL} wait for their media",
        advice="Decoding needs more cores or more `--max-media-memory`, or a host that serves media is slow.",
    ),
    Alert(
        name="QuireClientsGiveUp",
        measured=_share(
            'quire:request_success_total{finished_reason="abort"}', "quire:request_success_total", _BY_MODEL
        ),
        condition="> 0.3",
        lasting="10m",
        severity="info",
        summary=f"{_SHARE} of the sequences of {_MODEL} are aborted by their clients",
        advice="Clients whose timeouts are shorter than their answers; or the server is slow.",
    ),
)
GROUPS = {"quire-servers": SERVERS, "quire-engines": ENGINES, "quire-load": LOAD}
