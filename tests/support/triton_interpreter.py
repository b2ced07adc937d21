"""Triton's interpreter as the tests need it: call both functions before kernels run."""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter


def accept_computed_bounds() -> None:
    """Let kernels loop to computed bounds: NumPy 2.4 refuses how Triton 3.6 converts arrays of one element."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    if original.__module__ == interpreter.__name__:  # not replaced yet
        interpreter._patch_lang_tensor = patch


def separate_rows() -> None:
    """Make each row of a product independent of where it is in the matrix, as on a GPU.

    NumPy's float32 products are not; float64 products that are rounded are, but for one element in many millions.
    """
    original = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.dtype.kind != "f" or d.data.dtype != np.float32:
            return original(self, a, b, d, *options)
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    if original.__module__ == interpreter.__name__:  # not replaced yet
        interpreter.InterpreterBuilder.create_dot = dot
