"""Small ops against their definitions."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from quire.kernels import native
from quire.kernels.activation import act_and_mul, clamped_swiglu
from quire.kernels.add_scaled import scaled
from quire.kernels.multiply import sigmoid
from quire.kernels.projected_heads import CosSin, ProjectedHeads, QKNormWeights
from quire.kernels.qk_norm_rope import qk_norm_rope
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rope import apply_rope
from quire.kernels.softcap import softcap_in_place
from quire.kernels.take_rows import take_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 33])
def test_take_rows(dtype: torch.dtype, size: int) -> None:
    table, rows = torch.randn(50, size).to(dtype), torch.tensor([49, 0, 7, 7])
    assert torch.equal(take_rows(table, rows), table[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 33.941, 0.1])
def test_scaled_rounds_as_transformers_does(dtype: torch.dtype, scale: float) -> None:
    x = torch.randn(3, 72).to(dtype)
    assert torch.equal(scaled(x, scale), x * torch.tensor(scale, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, offset: float) -> None:
    x, weight = torch.randn(3, 5, 16).to(dtype), torch.randn(16).to(dtype)
    expected = F.rms_norm(x.float(), (16,), weight.float() + offset, 1e-6)
    out = rms_norm(x, weight, 1e-6, offset)
    assert out.dtype == dtype
    atol, rtol = (1e-6, 1e-5) if dtype == torch.float32 else (0.05, 0.02)
    torch.testing.assert_close(out.float(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [8, 4])
def test_rope_rotates_pairs(interleaved: bool, dim: int) -> None:
    x = torch.randn(2, 3, 8)
    angle = torch.randn(2, dim // 2)
    out = apply_rope(x, angle.cos(), angle.sin(), interleaved=interleaved)
    for token in range(2):
        for head in range(3):
            for pair in range(dim // 2):
                a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + dim // 2)
                rotated = torch.complex(x[token, head, a], x[token, head, b]) * torch.polar(
                    torch.tensor(1.0), angle[token, pair]
                )
                torch.testing.assert_close(out[token, head, pair], rotated.real)
                torch.testing.assert_close(out[token, head, pair + dim // 2], rotated.imag)
    assert torch.equal(out[..., dim:], x[..., dim:])


def test_act_and_mul() -> None:
    gate, up = torch.randn(4, 6) * 5, torch.randn(4, 6) * 5
    both = torch.cat((gate, up), -1)
    torch.testing.assert_close(act_and_mul(both, "silu"), F.silu(gate) * up)
    torch.testing.assert_close(act_and_mul(both, "gelu_pytorch_tanh"), F.gelu(gate, approximate="tanh") * up)
    low, clamped = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    torch.testing.assert_close(clamped_swiglu(both, 1.7, 7.0), (clamped + 1) * low * torch.sigmoid(1.7 * low))


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 200])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_new", "relu"])
def test_compiled_act_and_mul(act: str, tokens: int, dtype: torch.dtype) -> None:
    """Also where exponentials overflow, and for NaN."""
    torch.manual_seed(0)
    both = (torch.randn(tokens, 192) * 4).to(dtype)
    both[0, :5] = torch.tensor([200.0, -200.0, 0.0, torch.nan, 1e-3]).to(dtype)
    out = act_and_mul(both, act)
    with native.disabled():
        expected = act_and_mul(both, act)
    torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dim", [16, 100, 2048])
def test_compiled_rms_norm(dim: int, offset: float, dtype: torch.dtype) -> None:
    """Of contiguous rows and of rows with a larger stride."""
    torch.manual_seed(0)
    weight, rows = torch.randn(dim).to(dtype), torch.randn(40, dim + 8).to(dtype)
    for x in (rows[:, :dim].contiguous(), rows[:, 8:]):
        out = rms_norm(x, weight, 1e-6, offset)
        with native.disabled():
            torch.testing.assert_close(out, rms_norm(x, weight, 1e-6, offset))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("pairs", [None, 4, 16, 20, 32, 37, 40])
@pytest.mark.parametrize(("tokens", "interleaved"), [(1, False), (30, False), (30, True)])
def test_compiled_qk_norm_rope(
    tokens: int, interleaved: bool, pairs: int | None, offset: float | None, dtype: torch.dtype
) -> None:
    """With and without norms; rotated completely, in part, or not at all."""
    torch.manual_seed(0)
    heads, kv_heads, dim = 5, 2, 80
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim + 16).to(dtype)[:, 16:]
    norms = (
        None if offset is None else QKNormWeights(torch.randn(dim).to(dtype), torch.randn(dim).to(dtype), 1e-6, offset)
    )
    angle = torch.randn(tokens, pairs or 1) * 3
    angles = None if pairs is None else CosSin(angle.cos(), angle.sin(), interleaved=interleaved)
    with native.disabled():
        expected = qk_norm_rope(ProjectedHeads(qkv.clone(), heads, kv_heads, norms, angles))
    out = qk_norm_rope(ProjectedHeads(qkv, heads, kv_heads, norms, angles))
    tolerance = (
        1e-5 if dtype == torch.float32 else 0.04
    )  # of elements up to ten, which the reference rounds three times
    for actual, other in zip(out, expected, strict=True):
        torch.testing.assert_close(actual, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_rope_of_heads_of_72_elements(dtype: torch.dtype) -> None:
    """As towers have them: no multiple of 16."""
    torch.manual_seed(0)
    qkv, angle = torch.randn(7, 9 * 72).to(dtype), torch.randn(7, 36) * 3
    angles = CosSin(angle.cos(), angle.sin(), interleaved=False)
    with native.disabled():
        expected = qk_norm_rope(ProjectedHeads(qkv.float(), 3, 3, None, angles))
    out = qk_norm_rope(ProjectedHeads(qkv, 3, 3, None, angles))
    for actual, other in zip(out, expected, strict=True):
        torch.testing.assert_close(actual, other.to(dtype))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcap(dtype: torch.dtype, compiled: bool) -> None:
    """The bits of a row do not depend on the others. Its end is no whole vector."""
    x = (torch.randn(3, 9001) * torch.logspace(-5, 3, 9001)).to(dtype)
    x[1, 5000:5003] = torch.tensor([math.nan, math.inf, -math.inf])
    expected = 30 * torch.tanh(x.double() / 30)
    last = x[2:].clone()
    with nullcontext() if compiled else native.disabled():
        softcap_in_place(x, 30.0)
        softcap_in_place(last, 30.0)
    rtol = 1e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(x.double(), expected, atol=0.0, rtol=rtol, equal_nan=True)
    assert torch.equal(last[0], x[2])


def test_the_bits_of_sigmoids_do_not_depend_on_how_many_there_are() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1000, 1) * 3
    values = sigmoid(logits)
    assert torch.equal(values, torch.cat([sigmoid(logit[None]) for logit in logits]))
    torch.testing.assert_close(values, logits.double().sigmoid().float())
