"""The gated delta rule (Yang et al. 2024), with a decay of each head or of each element of its keys (Kimi Linear)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import gpu, native
from quire.kernels.capture import empty
from quire.kernels.delta_gates import DeltaGates

_MAX_DIM = 512  # elements of a key of the compiled kernels
EPS = 1e-6  # added to the squares of queries and keys


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, gates: DeltaGates, state: Tensor, slots: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """S = decay * S, then S += beta * k (v - k S)^T for each token; its result is q S / sqrt(key_dim).

    Queries and keys are divided by their length. A result depends neither on how a sequence is divided among calls, nor
    on other sequences.

    Args:
        q: (tokens, key_heads, key_dim), the last two dimensions dense; heads that are neighbours share one.
        k: like q.
        v: (tokens, heads, value_dim), the last two dimensions dense.
        gates: decays and betas.
        state: (slots, heads, key_dim, value_dim) float32, changed in place.
        slots: (sequences,) int64, the state of each sequence; no two are equal. On GPUs -1 is padding without a state.
        cu_seqlens: (sequences + 1,) int64 on the host, where the tokens of each sequence begin, and where the last end.

    Returns:
        (tokens, heads, value_dim) in v's dtype, contiguous.
    """
    tensors = (q, k, v, gates.decay, gates.beta)
    if native.supports(*tensors) and v.shape[2] % native.LANES == 0 and k.shape[2] <= _MAX_DIM:
        out = empty(v.shape, v.dtype)
        native.kernels.gated_delta_rule(
            q=q,
            k=k,
            v=v,
            decay=gates.decay,
            beta=gates.beta,
            log_rate=gates.log_rate,
            bias=gates.bias,
            state=state,
            slots=slots,
            cu_seqlens=cu_seqlens,
            out=out,
            most_beta=gates.most_beta,
        )
        return out
    if gpu.supports(*tensors, state):
        from quire.kernels.triton import gated_delta_rule as kernel

        return kernel.gated_delta_rule(q, k, v, gates, state, slots, cu_seqlens)
    return reference(q, k, v, gates, state, slots, cu_seqlens)


def reference(
    q: Tensor, k: Tensor, v: Tensor, gates: DeltaGates, state: Tensor, slots: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """`gated_delta_rule` in torch. Vectorized functions of more tokens at once would give them other bits."""
    count, scale, rate = v.shape[1] // k.shape[1], k.shape[2] ** -0.5, -gates.log_rate.exp()[:, None]
    out = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    bounds = cu_seqlens.tolist()
    for slot, begin, end in zip(slots.tolist(), bounds, bounds[1:], strict=False):
        if slot < 0:
            continue
        for token in range(begin, end):
            query, key = (_normalized(part[token].float()).repeat_interleave(count, 0)[:, :, None] for part in (q, k))
            steps = F.softplus(gates.decay[token].float() + gates.bias, threshold=30.0)
            state[slot] *= (rate * steps).exp()[:, :, None]
            known = (state[slot] * key).sum(1)
            beta = gates.most_beta * gates.beta[token].float().sigmoid()
            change = (v[token].float() - known) * beta[:, None]
            state[slot] += key * change[:, None]
            out[token] = (state[slot] * (query * scale)).sum(1)
    return out.to(v.dtype)


def _normalized(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()
