"""The gated delta rule, token by token; the twin of `quire.kernels.gated_delta_rule.reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.delta_gates import DeltaGates
from quire.kernels.triton.numerics import sigmoid, softplus
from quire.kernels.triton.variants import KernelVariant

_BLOCK = 16  # columns of a state in a program


@triton.jit
def gated_delta_rule_kernel(
    q,
    k,
    v,
    decay,
    beta,
    log_rate,
    bias,
    state,
    slots,
    bounds,
    out,
    heads,
    heads_per_key,
    key_dim,
    value_dim,
    scale,
    most_beta,
    q_stride,
    k_stride,
    v_stride,
    decay_stride,
    beta_stride,
    state_stride,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program for BLOCK columns of the state of a head of a sequence. The slot of padding is negative."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, SIZE)
    inside, known = at < value_dim, rows < key_dim
    begin, end = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    slot = tl.load(slots + sequence)
    state_at = state + slot * state_stride + (head * key_dim + rows[:, None]) * value_dim + at[None, :]
    within = known[:, None] & inside[None, :] & (slot >= 0)
    total = tl.load(state_at, mask=within, other=0.0)
    rate = -tl.exp(tl.load(log_rate + head))
    of_key = head // heads_per_key * key_dim + rows
    column = head * value_dim + at
    for token in range(begin, end):
        key = tl.load(k + token * k_stride + of_key, mask=known, other=0.0).to(tl.float32)
        query = tl.load(q + token * q_stride + of_key, mask=known, other=0.0).to(tl.float32)
        value = tl.load(v + token * v_stride + column, mask=inside, other=0.0).to(tl.float32)
        key = key / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
        query = query * (scale / tl.sqrt(tl.sum(query * query, 0) + 1e-6))
        part = most_beta * sigmoid(tl.load(beta + token * beta_stride + head).to(tl.float32))
        if CHANNELS:
            at_channel = head * key_dim + rows
            logits = tl.load(decay + token * decay_stride + at_channel, mask=known, other=0.0).to(tl.float32)
            logits += tl.load(bias + at_channel, mask=known, other=0.0)
            total = total * tl.exp(rate * softplus(logits))[:, None]
        else:
            logit = tl.load(decay + token * decay_stride + head).to(tl.float32) + tl.load(bias + head)
            total = total * tl.exp(rate * softplus(logit))
        change = (value - tl.sum(total * key[:, None], 0)) * part
        total += key[:, None] * change[None, :]
        result = tl.sum(total * query[:, None], 0)
        tl.store(out + token * heads * value_dim + column, result.to(out.dtype.element_ty), mask=inside)
    tl.store(state_at, total, mask=within)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, gates: DeltaGates, state: Tensor, slots: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """See `quire.kernels.gated_delta_rule.gated_delta_rule`."""
    tokens, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[1:]
    out = torch.empty((tokens, heads, value_dim), dtype=v.dtype, device=v.device)
    if tokens:
        gated_delta_rule_kernel[(len(slots), heads, triton.cdiv(value_dim, _BLOCK))](
            q,
            k,
            v,
            gates.decay,
            gates.beta,
            gates.log_rate,
            gates.bias,
            state,
            slots,
            cu_seqlens.to(v.device),
            out,
            heads,
            heads // key_heads,
            key_dim,
            value_dim,
            key_dim**-0.5,
            gates.most_beta,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            gates.decay.stride(0),
            gates.beta.stride(0),
            state.stride(0),
            CHANNELS=gates.decay.shape[2] > 1,
            BLOCK=_BLOCK,
            SIZE=triton.next_power_of_2(key_dim),
        )
    return out


VARIANTS = [
    KernelVariant(
        gated_delta_rule_kernel,
        {
            **dict.fromkeys(("q", "k", "v", "decay", "beta", "out"), "*bf16"),
            **dict.fromkeys(("log_rate", "bias", "state"), "*fp32"),
            **dict.fromkeys(("slots", "bounds"), "*i64"),
            **dict.fromkeys(("heads", "heads_per_key", "key_dim", "value_dim"), "i32"),
            **dict.fromkeys(("scale", "most_beta"), "fp32"),
            **dict.fromkeys(("q_stride", "k_stride", "v_stride", "decay_stride", "beta_stride", "state_stride"), "i32"),
        },
        {"CHANNELS": channels, "BLOCK": _BLOCK, "SIZE": 128},
    )
    for channels in (False, True)
]
