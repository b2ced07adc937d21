"""What runs on a GPU machine needs no package that README.md there does not name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
# Of common CUDA images, as README.md says; what these require is there, too.
IMAGE = ("torch", "triton", "transformers", "pytest", "pytest-timeout", "pytest-xdist", "psutil", "tqdm", "xxhash")


def with_requirements(distributions: Iterable[str]) -> set[str]:
    """Distributions and all that they require."""
    names, left = set[str](), [*distributions]
    while left:
        name = left.pop()
        if name in names:
            continue
        names.add(name)
        try:
            required = map(Requirement, metadata.requires(name) or ())
        except metadata.PackageNotFoundError:  # it is not required here
            continue
        left += [
            requirement.name
            for requirement in required
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ]
    return names


def without_others(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module where there are only the packages of IMAGE and of README.md, and no compiled kernels."""
    listed = re.search(r"machine's Python and platform:\n\n(.*?)\n\n", _readme(), re.DOTALL)
    assert listed is not None
    allowed = ",".join([*with_requirements(IMAGE), *listed[1].split()])
    command = [sys.executable, "-m", "tests.support.hidden_packages", allowed, module, *arguments]
    return subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)


def _readme() -> str:
    return (ROOT / "benchmarks/gpu/README.md").read_text()


def test_both_lists_of_wheels_are_the_same() -> None:
    listed = re.search(r"machine's Python and platform:\n\n(.*?)\n\n", _readme(), re.DOTALL)
    names = re.search(r"names='(.*?)'", _readme())
    assert listed is not None
    assert names is not None
    assert sorted(names[1].replace("_", "-").split("|")) == sorted(listed[1].split())


def test_hidden_packages_are_hidden() -> None:
    done = without_others("fastapi")
    assert done.returncode != 0
    assert "No module named" in done.stderr


def test_tests_of_the_script_and_benchmarks_are_imported() -> None:
    """Those of this folder import the benchmarks."""
    script = (ROOT / "benchmarks/gpu/run").read_text() + " tests/benchmarks/gpu"
    paths = sorted({word for line in script.splitlines() for word in line.split() if word.startswith("tests/")})
    options = ["-c", "benchmarks/gpu/pytest.ini", "--rootdir", ".", "-p", "no:cacheprovider", "-p", "no:asyncio"]
    options += ["-q", "--collect-only"]
    done = without_others("pytest", *options, "-n", "0", *paths)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "error" not in done.stdout.splitlines()[-1]
