"""The paths in docs/where-to-look.md exist."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PATH = re.compile(r"`([\w/]+(?:\.py|\.h|/))`")


def test_paths_of_the_table_exist() -> None:
    page = (_ROOT / "docs" / "where-to-look.md").read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if row.startswith("|")]
    wrong = [f"{row.split('|')[1].strip()}: {path}" for row in rows for path in _PATH.findall(row) if not _exists(path)]
    assert len(rows) > 50
    assert not wrong


def _exists(path: str) -> bool:
    return (_ROOT / path if path.startswith("tests/") else _ROOT / "quire" / path).exists()
