"""xIELU, an activation with learned numbers (Huang and Schlag 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import native
from quire.kernels.capture import empty


@dataclass(frozen=True, slots=True)
class XieluNumbers:
    """The numbers of the activation: p x^2 + beta x above 0, and n (exp(min(x, eps)) - 1 - x) + beta x elsewhere."""

    p: float
    n: float
    beta: float
    eps: float

    @classmethod
    def learned(cls, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> XieluNumbers:
        """p is softplus(alpha_p), and n is beta + softplus(alpha_n); each tensor has one number."""
        p, n = F.softplus(alpha_p.float()), beta.float() + F.softplus(alpha_n.float())
        return cls(p.item(), n.item(), beta.float().item(), eps.float().item())


def xielu(x: Tensor, numbers: XieluNumbers) -> Tensor:
    """The activation of x (tokens, size), computed in float32."""
    if native.supports(x) and x.is_contiguous() and x.shape[1] % native.LANES == 0:
        out = empty(x.shape, x.dtype)
        native.kernels.xielu(x=x, out=out, positive=numbers.p, negative=numbers.n, beta=numbers.beta, eps=numbers.eps)
        return out
    return reference(x, numbers)


def reference(x: Tensor, numbers: XieluNumbers) -> Tensor:
    """`xielu` in torch."""
    wide = x.float()
    below = numbers.n * (torch.expm1(wide.clamp(max=numbers.eps)) - wide)
    return (torch.where(wide > 0, numbers.p * wide.square(), below) + numbers.beta * wide).to(x.dtype)
