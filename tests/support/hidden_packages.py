"""Hides installed packages, as if they were not there: for code that runs where few are.

    python -m tests.support.hidden_packages ALLOWED,... MODULE ARGUMENT ...

runs a module with the packages that are allowed, and the standard library.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Collection
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from typing import Any


class _Without:
    """A finder of modules that does not find some."""

    def __init__(self, finder: Any, names: Collection[str]) -> None:
        self._finder = finder
        self._names = names

    def find_spec(self, fullname: str, *arguments: Any) -> ModuleSpec | None:
        if fullname in self._names or fullname.partition(".")[0] in self._names:
            return None
        spec: ModuleSpec | None = self._finder.find_spec(fullname, *arguments)
        return spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def normalized(distribution: str) -> str:
    """The name of a distribution as package indexes write it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def hide(allowed: Collection[str]) -> None:
    """Let imports of installed packages fail but those of the distributions `allowed`, and of the compiled kernels."""
    packages = {normalized(name) for name in allowed} | {"quire"}
    hidden = {
        name
        for name, distributions in packages_distributions().items()
        if packages.isdisjoint(map(normalized, distributions))
    }
    names = hidden - set(sys.modules) | {"quire.kernels._native"}
    sys.meta_path[:] = [_Without(finder, names) for finder in sys.meta_path]


def main() -> None:
    """Run a module of the command line."""
    _, allowed, module, *arguments = sys.argv
    hide(allowed.split(","))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
