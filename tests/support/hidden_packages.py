"""Hides installed packages, as if they were not there: for code that runs where few are.

    python -m tests.support.hidden_packages ALLOWED,... MODULE ARGUMENT ...

runs a module with the packages that are allowed, and the standard library.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from types import ModuleType


class _Hidden(MetaPathFinder):
    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self._names or fullname.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def normalized(distribution: str) -> str:
    """The name of a distribution as package indexes write it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def hide(allowed: Collection[str]) -> None:
    """Let imports of installed packages fail but those of the distributions `allowed`, and of the compiled kernels."""
    wanted = {normalized(name) for name in allowed} | {"quire"}
    hidden = {
        name
        for name, distributions in packages_distributions().items()
        if wanted.isdisjoint(map(normalized, distributions))
    }
    sys.meta_path.insert(0, _Hidden(hidden - set(sys.modules) | {"quire.kernels._native"}))


def main() -> None:
    """Run a module of the command line."""
    _, allowed, module, *arguments = sys.argv
    hide(allowed.split(","))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
