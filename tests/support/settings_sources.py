"""Settings without the environment, where that has none of them.

pydantic-settings looks for the variable of each field in turn. For the settings of a server, of which hundreds of tests
start one, that takes longer than FastAPI needs for all its routes.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_settings import EnvSettingsSource


def skip_empty_environments(patch: pytest.MonkeyPatch) -> None:
    """Let an environment without a variable that begins with the prefix of the settings give no values, at once."""
    read = EnvSettingsSource.__call__

    def read_if_any(source: EnvSettingsSource) -> dict[str, Any]:
        prefix = source.env_prefix.lower()
        if type(source) is EnvSettingsSource and not any(name.lower().startswith(prefix) for name in source.env_vars):
            return {}
        return read(source)

    patch.setattr(EnvSettingsSource, "__call__", read_if_any)
