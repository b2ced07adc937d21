"""Triton's interpreter with NumPy 2.4: loop bounds that a kernel computes are arrays of one element."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def accept_computed_bounds() -> None:
    """Let kernels loop to computed bounds: Triton 3.6 converts arrays of one element in a way that NumPy refuses."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    if original.__module__ == interpreter.__name__:  # not replaced yet
        interpreter._patch_lang_tensor = patch
