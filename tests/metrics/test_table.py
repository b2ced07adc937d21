"""The documentation's table of metrics is the code's."""

from __future__ import annotations

from pathlib import Path

from quire.metrics.table import page


def test_the_page_is_up_to_date() -> None:
    written = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert written.read_text(encoding="utf-8") == page(), "run: python -m quire.metrics.table > docs/metrics.md"
