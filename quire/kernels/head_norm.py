"""Root mean square norm of heads that lie among others in a projection."""

from __future__ import annotations

from torch import Tensor

from quire.kernels import native
from quire.kernels.rms_norm import rms_norm


def norm_heads_in_place(x: Tensor, weight: Tensor, eps: float) -> None:
    """Normalize each head of x (tokens, heads, dim), a view whose last two dimensions are dense.

    weight: (dim,).
    """
    dim = x.shape[2]
    if native.LANES <= dim <= native.MAX_DIM and dim % native.LANES == 0 and native.supports(x, weight):
        native.kernels.qk_norm_rope(
            x=x,
            cos=None,
            sin=None,
            q_weight=weight,
            k_weight=weight,
            q_heads=x.shape[1],
            k_heads=0,
            eps=eps,
            offset=0.0,
            interleaved=0,
        )
        return
    x.copy_(rms_norm(x.reshape(-1, dim), weight, eps).view(x.shape))
