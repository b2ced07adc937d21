"""The formats of tool calls that tests go through."""

from __future__ import annotations

from quire.parsing.tools.registry import FORMATS

# One name for each syntax of answers that must be a call; several names share one.
CONSTRAINED = sorted({FORMATS[name].constrained.syntax: name for name in sorted(FORMATS, reverse=True)}.values())
