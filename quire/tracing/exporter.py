"""The process that exports spans. Encoding and sending them would keep the interpreter of the server busy.

Messages to it are the settings, then batches: lists of trees, in MessagePack. It answers each with an `Exported`. It
ends when the other end of its connection, file descriptor 0, is closed.
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
from typing import NamedTuple, Protocol

import msgspec
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.sdk.trace.export import SpanExportResult
from typing_extensions import override

from quire.otlp.settings import Collector, OtlpSettingsError, TraceSettings
from quire.tracing.encoding import SpanEncoder, span_messages
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

    def export(self, trees: Sequence[msgspec.Raw]) -> Exported:
        """Export a batch of encoded trees, and wait for it.

        Raises:
            EOFError, OSError: the process has ended.
        """
        return self._ask(trees)

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


class _Exporter(Protocol):
    """An exporter of OpenTelemetry's that takes messages in the place of the SDK's spans."""

    def export(self, spans: Sequence[SpanMessage], /) -> SpanExportResult:
        """Send spans, and try again for some time if the collector does not take them."""


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
    with suppress(OSError):  # some sandboxes do not allow it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # it does not interrupt the engine when it wakes
    connection = Connection(os.dup(0))
    settings = msgspec.msgpack.decode(connection.recv_bytes(), type=TraceSettings)
    batches = msgspec.msgpack.Decoder(list[SpanTree])
    try:
        exporter = _exporter(settings.collector, SpanEncoder(settings.instance))
    except Exception as error:  # noqa: BLE001 error boundary: exporters have exceptions of their own for each variable
        _send(connection, Exported(0, str(error) or type(error).__name__))
        return
    complaint = _Complaint()
    exported = Exported()
    try:
        while True:
            _send(connection, exported)
            exported = _export(batches.decode(connection.recv_bytes()), exporter, complaint)
    except (EOFError, OSError):
        os._exit(0)  # what an exporter still tries is of no use to anyone


def _export(trees: list[SpanTree], exporter: _Exporter, complaint: _Complaint) -> Exported:
    spans: list[SpanMessage] = []
    broken = Exported()
    for tree in trees:
        try:
            spans += span_messages(tree)
        except Exception as error:  # noqa: BLE001 error boundary: other trees are exported
            broken = Exported(broken.spans + tree.span.count, f"{type(error).__name__}: {error}")
    if not spans:
        return broken
    try:
        result = exporter.export(spans)
    except Exception as error:  # noqa: BLE001 error boundary: later batches are exported
        return Exported(broken.spans + len(spans), f"{type(error).__name__}: {error}")
    if result is SpanExportResult.SUCCESS:
        return broken
    return Exported(broken.spans + len(spans), complaint.text)


def _exporter(collector: Collector, encoder: SpanEncoder) -> _Exporter:
    """The exporter of a protocol, which reads everything but the endpoint from its variables, with our encoder."""
    if collector.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as exporters  # noqa: PLC0415 the other is not used
    else:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as exporters  # type: ignore[no-redef]  # noqa: PLC0415
    if not hasattr(exporters, _ENCODER):
        raise TypeError("this version of OpenTelemetry's exporter cannot be given an encoder")
    setattr(exporters, _ENCODER, encoder.request)  # there is no other way in
    return exporters.OTLPSpanExporter(endpoint=collector.endpoint)
