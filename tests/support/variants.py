"""Parameters of tests of which a default run needs a part: the others are marked slow.

A test of every case in every schedule mostly finds what one of its cases, or one of its schedules, finds alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

Parameter = Any  # what pytest.param returns; pytest does not export its type


def slow_but(values: Iterable[Any], *quick: Any) -> list[Parameter]:
    """All values as parameters, of which all but the quick ones are slow; a tuple is the values of several names."""
    values = list(values)
    unknown = [value for value in quick if value not in values]
    assert not unknown, f"not among the values: {unknown}"
    return _parameters(((value if isinstance(value, tuple) else (value,)) for value in values), quick)


def covering(*axes: Iterable[Any]) -> list[Parameter]:
    """All combinations of the values of axes. Those that are not slow are as many as the longest axis has values.

    They have each value of each axis at least once.
    """
    lists = [list(axis) for axis in axes]
    quick = [tuple(values[index % len(values)] for values in lists) for index in range(max(map(len, lists)))]
    return _parameters(product(*lists), quick)


def _parameters(combinations: Iterable[tuple[Any, ...]], quick: Iterable[Any]) -> list[Parameter]:
    needed = [value if isinstance(value, tuple) else (value,) for value in quick]
    return [
        pytest.param(
            *combination,
            id="-".join(getattr(value, "__name__", str(value)) for value in combination),
            marks=() if combination in needed else pytest.mark.slow,
        )
        for combination in combinations
    ]
