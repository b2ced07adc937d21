"""Transcriptions and realtime sessions."""

from __future__ import annotations

from dashboards.boards.common import E2E, HTTP, HTTP_SECONDS, QUEUE, STATUS_COLORS, TTFT, by_model
from dashboards.panels import Dashboard, Heatmap, Lines, Query, Row, Stat
from dashboards.promql import MODELS, SERVERS

_AUDIO = "quire:audio_seconds_total"
_OPEN, _OPENED = "quire:websocket_connections_active", "quire:websocket_connections_total"
_SESSION = "quire:websocket_connection_duration_seconds"
_FILES = 'handler=~"/v1/audio/.*"'


def dashboard() -> Dashboard:
    """Files, live sessions, and how much audio the models hear."""
    return Dashboard(
        "quire-speech",
        "Quire / Speech",
        "Realtime sessions, transcriptions of files, and the models that hear them: choose those in *Model*.",
        (_now(), _sessions(), _files(), _models()),
    )


def _now() -> Row:
    return Row(
        "Now",
        (
            Stat(
                title="Open sessions",
                about="WebSockets of `/v1/realtime`.",
                expression=SERVERS.sum(_OPEN),
                unit="count",
                width=6,
            ),
            Stat(
                title="Audio",
                about="Seconds of audio that are transcribed per second: how many people can talk at once.",
                expression=MODELS.rate(_AUDIO),
                unit="per second",
                width=6,
            ),
            Stat(
                title="Files",
                about="Requests of `/v1/audio/...` per second.",
                expression=SERVERS.rate(HTTP, _FILES),
                unit="requests/s",
                width=6,
            ),
            Stat(
                title="TTFT p95",
                about="Until the first token of a transcript, after the audio is complete.",
                expression=MODELS.quantile(0.95, TTFT),
                unit="seconds",
                width=6,
            ),
        ),
    )


def _sessions() -> Row:
    return Row(
        "Realtime sessions",
        (
            Lines(
                title="Open sessions",
                about="Of each server. The limit is `--max-realtime-sessions`.",
                lines=(Query(SERVERS.sum(_OPEN, by="instance"), "{{instance}}"),),
                unit="count",
            ),
            Lines(
                title="Opened sessions",
                about="Many short ones: clients reconnect.",
                lines=(Query(SERVERS.rate(_OPENED, by="instance"), "{{instance}}"),),
                unit="per second",
            ),
            Heatmap(
                title="Duration of sessions",
                about="Sessions that ended, per second, by their duration.",
                expression=SERVERS.rate(f"{_SESSION}_bucket", by="le"),
                unit="seconds",
            ),
        ),
    )


def _files() -> Row:
    return Row(
        "Files",
        (
            Lines(
                title="Requests",
                about="Transcriptions and translations by class of status.",
                lines=(Query(SERVERS.rate(HTTP, _FILES, by="status"), "{{status}}"),),
                colors=STATUS_COLORS,
                unit="requests/s",
                stacked=True,
                width=12,
            ),
            Lines(
                title="Duration",
                about="Mean of a request, by endpoint.",
                lines=(
                    Query(
                        f"{SERVERS.rate(f'{HTTP_SECONDS}_sum', _FILES, by='handler')}"
                        f" / ({SERVERS.rate(f'{HTTP_SECONDS}_count', _FILES, by='handler')} > 0)",
                        "{{handler}}",
                    ),
                ),
                unit="seconds",
                width=12,
            ),
        ),
    )


def _models() -> Row:
    return Row(
        "Models",
        (
            by_model("Audio", "Seconds of audio per second.", MODELS.rate(_AUDIO, by="model_name"), "per second", 6),
            by_model(
                "Time to first token, p95", "Of each model.", MODELS.quantile(0.95, TTFT, "model_name"), "seconds", 6
            ),
            by_model("End to end, p95", "Of each model.", MODELS.quantile(0.95, E2E, "model_name"), "seconds", 6),
            by_model(
                "Queue, p95",
                "Utterances that wait: the engine hears more than it can.",
                MODELS.quantile(0.95, QUEUE, "model_name"),
                "seconds",
                6,
            ),
        ),
    )
