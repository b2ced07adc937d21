"""Compiles every Triton kernel for a GPU, without one.

``python -m tests.support.triton_compile [ARCHITECTURE] [--first]``; ``--first``: only the first variant of each kernel.

Each module of ``quire.kernels.triton`` with kernels has a list ``VARIANTS`` of signatures that they are called with.
The interpreter accepts code that the compiler refuses, so both are tested. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import quire.kernels.triton
from quire.kernels.triton.variants import KernelVariant

_HOPPER = 90
_SHARED_MEMORY = 227 << 10  # bytes that a program can have on Hopper


def compile_variant(variant: KernelVariant, architecture: int = _HOPPER) -> Any:
    """Compile a kernel for a CUDA architecture; returns what triton.compile does.

    Raises:
        ValueError: the kernel needs more shared memory than there is.
    """
    signature = {**variant.signature, **dict.fromkeys(variant.constants, "constexpr")}
    names = variant.kernel.arg_names
    divisible = [name for name, kind in variant.signature.items() if kind.startswith("*") or name in variant.divisible]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(variant.kernel, signature=signature, constexprs=dict(variant.constants), attrs=attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    if compiled.metadata.shared > _SHARED_MEMORY:
        raise ValueError(f"{compiled.name} needs {compiled.metadata.shared} bytes of shared memory: {variant}")
    return compiled


class Resources(NamedTuple):
    """What a compiled kernel takes of a multiprocessor.

    Attributes:
        registers: of a thread.
        stack: bytes of a thread in memory, where registers are spilled to.
        shared: bytes of shared memory of a program.
    """

    registers: int
    stack: int
    shared: int


def resources(compiled: Any) -> Resources:
    """The resources that the machine code of a result of `compile_variant` says it needs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return Resources(counts["REG"], counts["STACK"], compiled.metadata.shared)


def all_variants() -> Iterator[tuple[str, KernelVariant]]:
    """Every module's name with each of its variants."""
    for info in pkgutil.iter_modules(quire.kernels.triton.__path__):
        module = importlib.import_module(f"quire.kernels.triton.{info.name}")
        for variant in getattr(module, "VARIANTS", ()):
            yield info.name, variant


def first_variants() -> Iterator[tuple[str, KernelVariant]]:
    """Every kernel's module with the kernel's first variant."""
    seen = set[int]()
    for name, variant in all_variants():
        if id(variant.kernel) not in seen:
            seen.add(id(variant.kernel))
            yield name, variant


def main() -> None:
    """Compile variants and print the sizes of their code and their resources."""
    parser = argparse.ArgumentParser()
    parser.add_argument("architecture", type=int, nargs="?", default=_HOPPER)
    parser.add_argument("--first", action="store_true")
    arguments = parser.parse_args()
    for name, variant in first_variants() if arguments.first else all_variants():
        compiled = compile_variant(variant, arguments.architecture)
        used = resources(compiled)
        print(
            name, compiled.name, f"bytes={len(compiled.asm['cubin'])}", f"registers={used.registers}",
            f"stack={used.stack}", f"shared={used.shared}", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
