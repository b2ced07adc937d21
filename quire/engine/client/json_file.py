"""JSON files in a model's folder, which the engine and the front end read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path, error_type: type[Exception]) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file.

    Raises:
        error_type: it cannot be read, or contains something else.
    """
    try:
        if not path.exists():
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise error_type(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise error_type(f"{path} must contain a JSON object")
    return content
