"""Signatures of Triton kernels, with which they can be compiled ahead of their first call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One signature of a kernel.

    Attributes:
        kernel: the function, as ``triton.jit`` returned it.
        signature: type of each argument that is not a constant, e.g. "*bf16", "i32", "fp32".
        constants: the values of its ``tl.constexpr`` arguments.
        divisible: the integer arguments that are multiples of 16, as strides mostly are. Triton compiles other code for
            them. It does so for pointers too, which are taken as aligned to 16 bytes.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    divisible: Sequence[str] = ()
    num_warps: int = 4
    num_stages: int = 2
