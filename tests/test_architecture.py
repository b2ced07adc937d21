"""The paths in the table "Where to look" of docs/architecture.md exist."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PATH = re.compile(r"`([\w/]+(?:\.py|\.h|/))`")


def test_paths_of_the_table_exist() -> None:
    page = (_ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("## Where to look")[1].split("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("|")]
    wrong = [f"{row.split('|')[1].strip()}: {path}" for row in rows for path in _missing(row)]
    assert len(rows) > 50
    assert not wrong


def _missing(row: str) -> list[str]:
    """Paths that do not exist; a name without a folder is in the folder of the path before it."""
    folder, missing = _ROOT / "quire", list[str]()
    for name in _PATH.findall(row):
        base = _ROOT if name.startswith("tests/") else _ROOT / "quire"
        path = (base if "/" in name else folder) / name
        if not path.exists():
            missing.append(name)
        folder = path if name.endswith("/") else path.parent
    return missing
