"""The process of an engine's core: what it imports before its core is known, and what it runs."""

from __future__ import annotations

import gc
import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the server imports this module first of all, and pickles a reference to its functions
    from quire.config.options import LogOptions
    from quire.engine.build.core_config import CoreConfig
    from quire.otlp.settings import TraceSettings

_FLUSH_SECONDS = 0.5  # for spans of the steps


def import_engine() -> None:
    """Import what builds and runs cores."""
    from quire.app.schemas import defer_schemas  # noqa: PLC0415 as all imports: not in the server's process
    from quire.engine.models.torch_import import import_torch  # noqa: PLC0415

    gc.disable()  # as while the server imports
    defer_schemas()
    import_torch()
    importlib.import_module("quire.engine.build.engine")
    gc.freeze()
    gc.enable()


def serve_core_in_process(config: CoreConfig, logs: LogOptions, traces: TraceSettings | None, address: str) -> None:
    """Body of a core's process. `traces`: where its steps are exported to; None: they are not traced."""
    from quire.app.logs import flush_logs, start_logging  # noqa: PLC0415
    from quire.engine.build.engine import serve_core  # noqa: PLC0415
    from quire.engine.client.transport import flush_messages  # noqa: PLC0415

    start_logging(logs.log_level, logs.log_format)
    if traces is None:
        serve_core(config, address)
    else:
        from quire.tracing.start import start_traces  # noqa: PLC0415 imports OpenTelemetry

        running = start_traces(traces)
        serve_core(config, address, running.step_observer())
        running.export.close(_FLUSH_SECONDS)
    flush_messages()
    flush_logs()
    os._exit(0)  # all is closed; Python's own exit takes seconds with torch
