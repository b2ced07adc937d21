"""Reads a JSON file of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.engine.models.errors import BrokenFolder


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file.

    Raises:
        BrokenFolder: the file cannot be read.
    """
    try:
        if not path.exists():
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenFolder(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise BrokenFolder(f"{path} must contain a JSON object")
    return content
