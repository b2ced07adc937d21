"""Compiles every Triton kernel for a GPU, without one: ``python -m tests.support.triton_compile [ARCHITECTURE]``.

Each module of ``quire.kernels.triton`` with kernels has a list ``VARIANTS`` of signatures that they are called with.
The interpreter accepts code that the compiler refuses, so both are tested. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import quire.kernels.triton
from quire.kernels.triton.variants import KernelVariant

_HOPPER = 90


def compile_variant(variant: KernelVariant, architecture: int = _HOPPER) -> int:
    """Compile a kernel for a CUDA architecture; returns the bytes of its machine code."""
    signature = {**variant.signature, **dict.fromkeys(variant.constants, "constexpr")}
    source = ASTSource(variant.kernel, signature=signature, constexprs=dict(variant.constants))
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return len(compiled.asm["cubin"])


def main() -> None:
    """Compile all variants of all modules and print the size of each."""
    architecture = int(sys.argv[1]) if len(sys.argv) > 1 else _HOPPER
    for info in pkgutil.iter_modules(quire.kernels.triton.__path__):
        module = importlib.import_module(f"quire.kernels.triton.{info.name}")
        for variant in getattr(module, "VARIANTS", ()):
            print(info.name, variant.kernel.__name__, compile_variant(variant, architecture), flush=True)


if __name__ == "__main__":
    main()
