"""The first moments of `quire serve`: what takes long begins before the server's own modules are imported."""

from __future__ import annotations

from quire.engine.models.config_reader import ConfigReader
from quire.engine.models.torch_import import start_loading_libraries


def start_early() -> ConfigReader:
    """Start a reader of configs, and the loading of torch's libraries."""
    configs = ConfigReader(forks=True)
    start_loading_libraries()
    return configs
