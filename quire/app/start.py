"""The first moments of `quire serve`: what takes long begins before the server's own modules are imported."""

from __future__ import annotations

import gc

from quire.config.commands import Serve
from quire.engine.models.config_reader import ConfigReader
from quire.engine.models.torch_import import start_loading_libraries


def run(settings: Serve) -> int:
    """Serve until a signal arrives; returns the exit status."""
    gc.disable()  # imports leave little garbage, and each full collection would search all modules
    configs = ConfigReader(forks=True)
    start_loading_libraries()
    from quire.app.serve import run as serve  # noqa: PLC0415 half a second of imports

    return serve(settings, configs)
