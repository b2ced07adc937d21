"""Records the launches of Triton kernels that run in the interpreter, and compiles each for a GPU as a launch would.

    TRITON_LAUNCHES=FILE pytest -p tests.support.triton_launches ...      # appends to FILE what the tests launch
    python -m tests.support.triton_launches FILE [PROCESSES]              # compiles it

`triton_compile` compiles signatures that were written down; this finds those that really occur: integers that are 1 and
become constants, pointers that are not aligned, arguments of another type than expected, and how many there are.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

_VARIABLE = "TRITON_LAUNCHES"
_SHARED_MEMORY = 227 << 10  # bytes that a program can have on Hopper
_ALIGNMENT = 16


def pytest_configure(config: object) -> None:
    """Record from now on."""
    record(Path(os.environ[_VARIABLE]))


def record(file: Path) -> None:
    """Append each new kind of launch in this process to a file."""
    from triton.runtime import interpreter

    run, seen = interpreter.InterpretedFunction.run, set[str]()

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        described = {
            name: _described(value) if name in self.arg_names and not _is_constant(self.fn, name) else value
            for name, value in arguments.items()
        }
        line = json.dumps([self.fn.__module__, self.fn.__name__, described])
        if line not in seen:
            seen.add(line)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(line + "\n")
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    interpreter.InterpretedFunction.run = recorded


def _is_constant(function: Any, name: str) -> bool:
    return "constexpr" in str(function.__annotations__.get(name, ""))


def _described(value: Any) -> Any:
    """What a launch looks at of an argument that is no constant of the kernel."""
    if isinstance(value, torch.Tensor):
        return {"tensor": str(value.dtype).removeprefix("torch."), "aligned": value.data_ptr() % _ALIGNMENT == 0}
    if isinstance(value, float):
        return 0.5
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return (1 << 40 if value >= 1 << 31 else 32) + (0 if value % _ALIGNMENT == 0 else 3)
    return value


class _Pointer:
    """What a launch looks at of a tensor."""

    def __init__(self, dtype: torch.dtype, aligned: bool) -> None:
        self.dtype = dtype
        self._address = 64 if aligned else 65

    def data_ptr(self) -> int:
        return self._address

    @staticmethod
    def ptr_range() -> int:
        return 0


class _Driver:
    """Stand in for the driver of a GPU, to compile without one."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def _compile(line: str) -> tuple[str, str | None, float]:
    """The launch, what is wrong with it, and the seconds that it took to compile."""
    from triton.runtime import driver

    driver.set_active(_Driver())
    started = time.perf_counter()
    module, name, described = json.loads(line)
    kernel = getattr(importlib.import_module(module), name)
    arguments = {name: _argument(kernel, name, value) for name, value in described.items()}
    try:
        compiled = kernel.warmup(**arguments, grid=(1,))
        shared = compiled.metadata.shared
        error = None if shared <= _SHARED_MEMORY else f"{shared} bytes of shared memory"
    except Exception as failure:  # noqa: BLE001 it is what this program looks for
        error = f"{type(failure).__name__}: {failure}"
    return line, error, time.perf_counter() - started


def _argument(kernel: Any, name: str, value: Any) -> Any:
    if name == "INTERPRETED":
        return False
    if isinstance(value, dict):
        return _Pointer(getattr(torch, value["tensor"]), value["aligned"])
    return value


def main() -> None:
    """Compile all launches of a file and print what fails."""
    lines = sorted(set(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()))
    total, failed = 0.0, 0
    with ProcessPoolExecutor(int(sys.argv[2]) if len(sys.argv) > 2 else 1) as processes:
        for line, error, taken in processes.map(_compile, lines):
            total += taken
            if error is not None:
                failed += 1
                print(line, error, "", sep="\n", flush=True)
    print(f"{len(lines)} kernels, {failed} failed, {total:.0f} seconds")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
