"""The process that exports spans. Encoding and sending them would keep the interpreter of the server busy.

Messages to it are the settings, then batches in MessagePack: lists of trees, and of requests of which it makes trees.
It answers each with an `Exported`. It ends when the other end of its connection, file descriptor 0, is closed.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from typing_extensions import override

from quire.otlp.settings import Collector, OtlpSettingsError, TraceSettings
from quire.tracing.encoding import SpanBatch
from quire.tracing.request_span import request_span
from quire.tracing.requests import RequestTrace
from quire.tracing.span import SpanTree

_LOGGERS = (  # of exporters
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
_PROGRAM = f"import sys; sys.path = sys.argv[1:]; import {__name__} as exporter; exporter.main()"
_SERVERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # which a terminal or supervisor sends to all
_ENCODER = "encode_spans"  # the name of their encoder in modules of exporters
_NICE = 19  # requests go first
_END_SECONDS = 10.0  # a process that is killed ends at once, unless the machine is busy


class Exported(NamedTuple):
    """What became of a batch.

    Attributes:
        spans: that the collector has not taken.
        complaint: why; empty if it has taken all.
    """

    spans: int = 0
    complaint: str = ""


class ExporterProcess:
    """The process, and its connection. For one thread, except for `kill`."""

    def __init__(self, settings: TraceSettings) -> None:
        """Start it.

        Raises:
            OtlpSettingsError: a variable of OpenTelemetry's SDK is not valid.
        """
        ours, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(  # noqa: S603 our own program
                [sys.executable, "-c", _PROGRAM, *sys.path], stdin=its.fileno()
            )
        self._connection = Connection(ours.detach())
        started = self._ask(settings)
        if started.complaint:
            self.kill()
            raise OtlpSettingsError(f"a setting of OpenTelemetry is not valid: {started.complaint}")

    def export(self, sources: Sequence[msgspec.Raw]) -> Exported:
        """Export a batch of encoded sources of spans, and wait for it.

        Raises:
            EOFError, OSError: the process has ended.
        """
        return self._ask(sources)

    def kill(self) -> None:
        """End the process, also while another thread waits for it."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)

    def _ask(self, message: object) -> Exported:
        _send(self._connection, message)
        return msgspec.msgpack.decode(self._connection.recv_bytes(), type=Exported)


def _send(connection: Connection, message: object) -> None:
    connection.send_bytes(msgspec.msgpack.encode(message))


class _Complaint(logging.Filter):
    """Keeps the last message that the exporter logs, as a collector that is down would fill the log with them."""

    def __init__(self) -> None:
        super().__init__()
        self.text = "the collector did not take them"
        for name in _LOGGERS:
            logging.getLogger(name).filters.insert(0, self)  # before the one that drops what was said lately

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        self.text = record.getMessage()
        return False


def main() -> None:
    """Export batches until the connection ends."""
    for number in _SERVERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the server exports until it has drained, and then ends this process
    os.nice(_NICE)
    if hasattr(os, "sched_setscheduler"):  # not on macOS
        with suppress(OSError):  # some sandboxes do not allow it
            # It does not interrupt the engine when it wakes.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    connection = Connection(os.dup(0))
    settings = msgspec.msgpack.decode(connection.recv_bytes(), type=TraceSettings)
    batches = msgspec.msgpack.Decoder(list[SpanTree | RequestTrace])
    batch = SpanBatch(settings.instance)
    try:
        exporter = _exporter(settings.collector, batch)
    except Exception as error:  # noqa: BLE001 error boundary: exporters have exceptions of their own for each variable
        _send(connection, Exported(0, str(error) or type(error).__name__))
        return
    complaint = _Complaint()
    exported = Exported()
    try:
        while True:
            _send(connection, exported)
            exported = _export(batches.decode(connection.recv_bytes()), batch, exporter, complaint)
    except (EOFError, OSError):
        os._exit(0)  # what an exporter still tries is of no use to anyone


def _export(
    sources: list[SpanTree | RequestTrace], batch: SpanBatch, exporter: SpanExporter, complaint: _Complaint
) -> Exported:
    broken = Exported()
    batch.clear()
    for source in sources:
        try:
            batch.add(source if isinstance(source, SpanTree) else _tree(source))
        except Exception as error:  # noqa: BLE001 error boundary: other trees are exported
            broken = Exported(broken.spans + source.count, f"{type(error).__name__}: {error}")
    if not (count := len(batch.spans)):
        return broken
    try:
        result = exporter.export(batch.spans)
    except Exception as error:  # noqa: BLE001 error boundary: later batches are exported
        return Exported(broken.spans + count, f"{type(error).__name__}: {error}")
    if result is SpanExportResult.SUCCESS:
        return broken
    return Exported(broken.spans + count, complaint.text)


def _tree(trace: RequestTrace) -> SpanTree:
    return SpanTree(trace.context, trace.parent, trace.wall_offset, request_span(trace))


def _exporter(collector: Collector, batch: SpanBatch) -> SpanExporter:
    """The exporter of a protocol, which reads everything but the endpoint from its variables, with our encoder.

    It is given the spans of the batch in the place of the SDK's, and sends its request.
    """
    if collector.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as exporters  # noqa: PLC0415 the other is not used
    else:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as exporters  # type: ignore[no-redef]  # noqa: PLC0415
    if not hasattr(exporters, _ENCODER):
        raise TypeError("this version of OpenTelemetry's exporter cannot be given an encoder")
    setattr(exporters, _ENCODER, lambda _: batch.request)  # there is no other way in
    return exporters.OTLPSpanExporter(endpoint=collector.endpoint)
