"""Finds operators that let the host wait for a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_MASKS = (torch.bool, torch.uint8)


class WaitsForDevice(RuntimeError):
    """The host waits for a device."""


class RefuseWaiting(TorchDispatchMode):
    """Within it, an operator of the calling thread that waits for a device raises `WaitsForDevice`.

    These are operators that read a value, whose result's size depends on values, or that copy between devices.
    torch.cuda.set_sync_debug_mode finds them too, but in all threads, of which others may serve requests.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is ever compiled. Otherwise the first call imports torch._dynamo, for a second and 100 MB."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = (*args, *(kwargs or {}).values())
        if torch.Tag.data_dependent_output in func.tags or _has_unknown_size(func, arguments):
            raise WaitsForDevice(f"{func.name()} reads values")
        with self:  # in inference mode, operators that call others do not call them before
            out = func.decompose(*args, **(kwargs or {}))
        if out is NotImplemented:
            out = func(*args, **(kwargs or {}))
        # Scalars of the host are arguments of kernels.
        read = (tensor for tensor in _tensors(arguments) if tensor.dim())
        if len({tensor.device.type for tensor in (*read, *_tensors(out))}) > 1:
            raise WaitsForDevice(f"{func.name()} copies between devices")
        return out


def _has_unknown_size(func: Any, arguments: Sequence[Any]) -> bool:
    """Whether the size of the result depends on values. Indexing is only by masks."""
    if func.name().startswith(("aten::index", "aten::_index_put")):
        indices = (value for value in arguments if isinstance(value, list | tuple))
        return any(tensor.dtype in _MASKS for index in indices for tensor in _tensors(index))
    return torch.Tag.dynamic_output_shape in func.tags


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value of an operator."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
