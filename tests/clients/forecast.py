"""A tool with nested parameters, which reach the server as references to $defs."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel


class Unit(StrEnum):
    """A unit of temperature."""

    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class Options(BaseModel):
    """How to tell the forecast."""

    unit: Unit
    days: int


class Forecast(BaseModel):
    """Get the weather of a city."""

    options: Options
    city: str
