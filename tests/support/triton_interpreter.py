"""Triton's interpreter as the tests need it: `prepare` it before kernels run."""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter


def prepare() -> None:
    """Let kernels loop to bounds that they compute, and make each row of a product independent of the others.

    Triton 3.6 converts arrays of one element to loop bounds, which NumPy 2.4 refuses. NumPy's float32 products of a row
    depend on where it is in a matrix, unlike those of a GPU; float64 products that are rounded do not.
    """
    original, original_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    if original.__module__ != interpreter.__name__:
        return  # they are replaced already

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.dtype.kind != "f":
            return original_dot(self, a, b, d, *options)
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_dot = dot
