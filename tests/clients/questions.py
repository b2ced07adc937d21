"""The questions that every client sends, and the expected answers of the bundled model."""

from __future__ import annotations

import sys

MODEL = "quire-nano"
URL = sys.argv[1]
SUM = "What is 27 + 58?"
TOTAL = "85"
LONG = "What are you?"  # its answer comes in several pieces, also from a busy server
NAME = "quire-nano"
WEATHER = "What is the weather in Paris?"
FOUND = '{"temperature": "21 degrees"}'
DEGREES = "21"


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    assert "Paris" in city, city
    return FOUND
