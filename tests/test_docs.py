"""The pages for readers of the code name what exists, and their indexes are complete."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_DOCS = _ROOT / "docs"
_PATH = re.compile(r"`((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|h|cpp|toml|md))?)`")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
_STATUS = re.compile(r"Status: accepted \d{4}-\d\d-\d\d(?:, partly superseded by (?P<by>.*))?\.", re.DOTALL)
_DECISIONS = sorted((_DOCS / "decisions").glob("[0-9]*.md"))
_CARDS = (_ROOT / "quire" / "bundled").rglob("*.md")
_PAGES = sorted([*_ROOT.glob("*.md"), *_DOCS.rglob("*.md"), *(_ROOT / "benchmarks").rglob("*.md"), *_CARDS])


_OF_THE_CODE = [_DOCS / "where-to-look.md", _DOCS / "changes.md", *sorted((_DOCS / "architecture").glob("*.md"))]


@pytest.mark.parametrize("page", _OF_THE_CODE, ids=lambda page: page.stem)
def test_paths_on_a_page_exist(page: Path) -> None:
    paths = _PATH.findall(_text(page))
    assert paths
    assert not [path for path in paths if not _exists(path)]
    names = {path.name for path in (_ROOT / "quire").rglob("*.*")}
    assert set(re.findall(r"`(\w+\.py)`", _text(page))) <= names


def test_the_files_of_each_change_are_counted() -> None:
    _, *sections = re.split(r"^## ", _text(_DOCS / "changes.md"), flags=re.MULTILINE)
    rows = re.findall(r"^\| \[(.*?)\].*\| (\d+)", _text(_DOCS / "changes.md"), re.MULTILINE)
    files = [
        {path for path in _PATH.findall(section) if path.endswith((".py", ".toml")) and not path.startswith("tests/")}
        for section in sections
    ]
    assert [(name, int(count)) for name, count in rows] == [
        (section[:1].lower() + section.partition("\n")[0][1:], len(names))
        for section, names in zip(sections, files, strict=True)
    ]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target, heading in _LINK.findall(_text(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path = page.parent / target if target else page
        if not path.exists() or (heading and heading not in _anchors(path)):
            broken.append(f"{target}#{heading}")
    assert not broken


@pytest.mark.parametrize("page", _DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_a_status(page: Path) -> None:
    _, blank, status, *_ = _text(page).split("\n", 3)
    assert not blank
    assert status.startswith("Status: ")
    assert _STATUS.fullmatch(_status(page))


def test_the_index_of_decisions_is_complete() -> None:
    expected = []
    for page in _DECISIONS:
        status = _STATUS.fullmatch(_status(page))
        later = ", ".join(re.findall(r"\[\d{3}\]\([^)]*\)", (status and status["by"]) or ""))
        title = _text(page).partition("\n")[0].removeprefix(f"# {page.name[:3]}: ")
        expected.append(f"| [{page.name[:3]}]({page.name}) | {title} | {later} |")
    index = _text(_DOCS / "decisions" / "README.md").splitlines()
    assert [row for row in index if row.startswith("| [")] == expected


def test_the_index_of_results_is_complete() -> None:
    benchmarks = _ROOT / "benchmarks"
    index = _text(benchmarks / "results" / "README.md")
    files = {path.name for path in (benchmarks / "results").iterdir()} - {"README.md"}
    assert files == {target for target, _ in _LINK.findall(index) if "/" not in target}


def test_attributes_in_docstrings_exist() -> None:
    wrong = []
    for path in sorted((_ROOT / "quire").rglob("*.py")):
        for node in ast.walk(ast.parse(_text(path))):
            if isinstance(node, ast.ClassDef) and not node.bases:
                wrong += [f"{path.name}: {node.name}.{name}" for name in _documented(node) - _defined(node)]
    assert not wrong


def _documented(node: ast.ClassDef) -> set[str]:
    """The names under "Attributes:" in a docstring."""
    _, _, section = (ast.get_docstring(node) or "").partition("\nAttributes:\n")
    section = section.partition("\n\n")[0]
    lines = re.findall(r"^    ((?:\w+(?:, | and ))*\w+):(?: |$)", section, re.MULTILINE)
    return {name for line in lines for name in re.split(", | and ", line)}


def _defined(node: ast.ClassDef) -> set[str]:
    names = set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(part.name)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.add(part.id)
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            names.add(part.attr)
    return names


def _status(page: Path) -> str:
    """The second paragraph of a decision's page, in one line."""
    return _text(page).split("\n\n")[1].strip().replace("\n", " ")


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-") for heading in headings}


def _exists(path: str) -> bool:
    at_the_root = path.startswith(("tests/", "docs/", "quire/", "docker/", "deploy/"))
    return (_ROOT / path if at_the_root else _ROOT / "quire" / path).exists()
