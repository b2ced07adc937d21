"""xIELU, an activation with learned numbers (Huang and Schlag 2024), in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Return p x^2 + beta x where x is above 0, and n (exp(min(x, eps)) - 1 - x) + beta x elsewhere.

    p is softplus(alpha_p), and n is beta + softplus(alpha_n). It is computed in float32.

    Args:
        x: of any shape.
        alpha_p: one number, like the others.
    """
    wide = x.float()
    positive, negative = F.softplus(alpha_p.float()), beta.float() + F.softplus(alpha_n.float())
    curve = torch.where(
        wide > 0, positive * wide.square(), negative * (torch.expm1(torch.minimum(wide, eps.float())) - wide)
    )
    return (curve + beta.float() * wide).to(x.dtype)
