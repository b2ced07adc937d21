"""Reports of the benchmarks of a GPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.limits import GpuLimits

logger = logging.getLogger(__name__)


class Report:
    """A JSON file that is written anew after each case, so that it is complete up to the case that ended a program.

    Attributes:
        limits: of the GPU.
        facts: what holds for all cases.
        results: of each case.
    """

    def __init__(self, out: Path | None, **facts: Any) -> None:
        """Measure the limits. `out`: the file; None for none."""
        self.limits = GpuLimits.measured()
        self.facts: dict[str, Any] = {"date": date.today().isoformat(), "torch": torch.__version__, **facts}
        self.results: list[dict[str, Any]] = []
        self._out = out
        print(self.limits, flush=True)
        self._save()

    def add(self, case: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> None:
        """Add the result of a case; one that fails has its error in place of numbers."""
        try:
            measured = measure()
        except Exception as error:  # error boundary: the other cases are worth measuring
            logger.exception("%s failed", dict(case))
            measured = {"error": f"{type(error).__name__}: {error}"}
        self.results.append({**case, **measured})
        print(self.results[-1], flush=True)
        self._save()

    def _save(self) -> None:
        if self._out is not None:
            text = json.dumps({**self.facts, "limits": self.limits.as_dict(), "results": self.results}, indent=1)
            self._out.write_text(text + "\n", encoding="utf-8")
