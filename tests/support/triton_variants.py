"""Which variants of kernels Triton would compile for calls that its interpreter runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

Variant = tuple[str, tuple[tuple[str, Any], ...]]  # of a kernel: its name, and what Triton knows of each argument
_ALIGNMENT = 16


@contextmanager
def recorded_variants() -> Iterator[set[Variant]]:
    """The variants of all kernels that are called within."""
    variants: set[Variant] = set()
    inner = InterpretedFunction.run

    def run(kernel: InterpretedFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        variants.add(_variant(kernel, args, options))
        return inner(kernel, *args, grid=grid, warmup=warmup, **options)

    InterpretedFunction.run = run
    try:
        yield variants
    finally:
        InterpretedFunction.run = inner


def differences(called: set[Variant], known: set[Variant]) -> list[str]:
    """The variants that are not known: their arguments that differ from those of the most similar known one."""
    lines = []
    for name, arguments in sorted(called - known, key=str):
        similar = [sorted(set(arguments) - set(others), key=str) for other, others in known if other == name]
        lines.append(f"{name}: {min(similar, key=len) if similar else 'not called'}")
    return lines


def _variant(kernel: InterpretedFunction[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Variant:
    signature = inspect.signature(kernel.fn)
    arguments = {name: value for name, value in options.items() if name in signature.parameters}
    launch = {name: value for name, value in options.items() if name not in arguments}
    plain, unaligned = (
        set(kernel.kwargs.get(option) or ()) for option in ("do_not_specialize", "do_not_specialize_on_alignment")
    )
    known = {
        name: value
        if "constexpr" in str(signature.parameters[name].annotation)
        else _known(value, specialized=name not in plain, aligned=name not in unaligned)
        for name, value in signature.bind(*args, **arguments).arguments.items()
    }
    return kernel.fn.__name__, tuple(sorted({**known, **launch}.items()))


def _known(value: Any, *, specialized: bool, aligned: bool) -> Any:
    """What Triton compiles for an argument: its type, and for integers whether they are 1 or multiples of 16."""
    if isinstance(value, Tensor):
        return value.dtype, aligned and value.data_ptr() % _ALIGNMENT == 0
    if isinstance(value, int) and not isinstance(value, bool):
        width = 32 if -(1 << 31) <= value < 1 << 31 else 64
        return ("int", 1) if specialized and value == 1 else (width, specialized and value % _ALIGNMENT == 0)
    return type(value).__name__
