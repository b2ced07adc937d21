"""Facts: what two engines compare by name before they work together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

Facts = Mapping[str, str]  # such as "block size": "16"; names are those of errors
_SHOWN = 200  # characters of a value in an error


class Difference(NamedTuple):
    """A fact that is not the same, with both values as errors show them."""

    name: str
    theirs: str
    ours: str


def differences(theirs: Facts, ours: Facts) -> Iterator[Difference]:
    """Yield the facts that differ, or that one of two engines does not know."""
    for name in [*ours, *sorted(theirs.keys() - ours.keys())]:
        there, here = theirs.get(name, "not known"), ours.get(name, "not known")
        if there != here:
            yield Difference(name, _shown(there), _shown(here))


def _shown(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
