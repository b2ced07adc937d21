"""Triton's interpreter as the tests need it."""

from __future__ import annotations

import math
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
    _share_shapes()
    _call_builtins_directly()
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
    original, modules_of = interpreter._patch_lang, dict[Any, list[Any]]()

    def patch(function: Any) -> Any:
        if function not in modules_of:
            modules_of[function] = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(module.add) for module in modules_of[function]):
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


def _share_shapes() -> None:
    """Make the objects of a shape once; Triton makes them, and a text of all their types, for each result.

    The type of a tuple, which is little more than that text, is made when it is asked for.
    """
    shapes = dict[tuple[int, ...], tuple[Any, int, str]]()
    tensor_shapes = dict[tuple[int, ...], tuple[Any, Any]]()

    def start_tuple(self: Any, values: Any, kind: Any = None) -> None:
        self.values = list(values)
        if kind is not None:
            self.type = kind if isinstance(kind, tl.core.tuple_type) else tl.core.tuple_type(kind)

    def tuple_type(self: Any) -> Any:
        if "_type" not in self.__dict__:
            self._type = tl.core._type_for_tuple_values(self.values)
        return self._type

    def start_block_type(self: Any, element_type: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if sizes not in shapes:
            original(self, element_type, shape)
            shapes[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_type
        self.shape, self.numel, text = shapes[sizes]
        self.name = f"<{text}, {element_type}>"

    def start_tensor(self: Any, handle: Any, kind: Any) -> None:
        sizes = tuple(kind.shape.values) if kind.is_block() else ()
        if sizes not in tensor_shapes:
            tensor_shapes[sizes] = tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = tensor_shapes[sizes]

    original = tl.block_type.__init__
    tl.tuple.__init__ = start_tuple
    tl.tuple.type = property(tuple_type, lambda self, kind: self.__dict__.update(_type=kind))
    tl.block_type.__init__ = start_block_type
    tl.tensor.__init__ = start_tensor


def _call_builtins_directly() -> None:
    """Call a function of the language without a copy of its keyword arguments, and without a check of one of them."""

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.interpreter_semantic
        function = getattr(member, "__wrapped__", member)  # methods of tensors are not wrapped

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*arguments, **options)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch
