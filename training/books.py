"""Reads the word and phrase lists (``words/*.toml``, ``phrases/*.toml``)."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SPLITS = ("train", "heldout")


@cache
def phrase_book(name: str) -> dict[str, Any]:
    """Return the tables of ``phrases/NAME.toml``."""
    return tomllib.loads((HERE / "phrases" / f"{name}.toml").read_text("utf-8"))


@cache
def tool_parts() -> dict[str, Any]:
    """Return the tables of ``toolspecs/parts.toml``."""
    return tomllib.loads((HERE / "toolspecs" / "parts.toml").read_text("utf-8"))


@cache
def words(split: str) -> dict[str, tuple[str, ...]]:
    """Return all word lists of one split (train or heldout) by name."""
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}")
    lists: dict[str, tuple[str, ...]] = {}
    for path in sorted((HERE / "words").glob("*.toml")):
        for name, table in tomllib.loads(path.read_text("utf-8")).items():
            text = table[split]
            parts = text.split("|") if "|" in text else re.split(r",\s+", text)
            lists[name] = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    return lists
