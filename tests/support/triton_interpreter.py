"""Triton's interpreter as the tests need it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def prepare() -> None:
    """Correct what differs from a GPU, and skip work that tests do not need. Is called before kernels run."""
    if interpreter._patch_lang.__module__ != interpreter.__name__:
        return  # done already
    _accept_computed_bounds()
    _separate_rows()
    _replace_language_once()
    _cache_numpy_types()
    # Each sum and product of integers is computed a second time in 64 bits.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _accept_computed_bounds() -> None:
    """Let kernels loop to computed bounds: NumPy 2.4 refuses how Triton 3.6 converts arrays of one element."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _separate_rows() -> None:
    """Make each row of a product independent of where it is in the matrix, as on a GPU.

    NumPy's float32 products are not; float64 products that are rounded are, but for one element in many millions.
    """
    original = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.dtype.kind != "f" or d.data.dtype != np.float32:
            return original(self, a, b, d, *options)
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot


def _replace_language_once() -> None:
    """Replace functions of the language when a kernel starts; Triton repeats it whenever a kernel calls a function."""
    original = interpreter._patch_lang

    def patch(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(module.add) for module in modules):
            return original(function)
        return interpreter._LangPatchScope()  # has nothing to restore

    interpreter._patch_lang = patch


def _cache_numpy_types() -> None:
    """Look NumPy's types up by name; Triton builds its table in each call."""
    original, types = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in types:
            types[name] = original(dtype.scalar)
        return types[name]

    interpreter._get_np_dtype = numpy_type
