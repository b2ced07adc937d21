"""JSON files in a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.multimodal.errors import ModelFileError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file.

    Raises:
        ModelFileError: it cannot be read, or contains something else.
    """
    try:
        if not path.exists():
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} must contain a JSON object")
    return content
