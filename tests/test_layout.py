"""The files of the tests lie where the rules of the code want them."""

from __future__ import annotations

import ast
from pathlib import Path

_TESTS = Path(__file__).parent


def test_no_test_file_is_imported() -> None:
    """What several tests share is in tests/support."""
    wrong = []
    for path in sorted(_TESTS.rglob("*.py")):
        parts = path.relative_to(_TESTS.parent).with_suffix("").parts
        if any(part.startswith(".") for part in parts):  # tools that tests of containers have installed
            continue
        module = ".".join(parts)
        names = _imported(ast.parse(path.read_text(encoding="utf-8")), module)
        wrong += [f"{module} imports {name}" for name in names if ".test_" in name]
    assert not wrong


def _imported(tree: ast.Module, module: str) -> list[str]:
    """The full names that a module imports from the tests."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*parents, *filter(None, [node.module])])
            names += [f"{source}.{name.name}" for name in node.names]
    return [name for name in names if name.startswith("tests.")]
