"""Ops of encoders, compiled and in torch, against their definitions."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F

from quire.kernels import native
from quire.kernels import varlen_attention as module
from quire.kernels.activation import ACTIVATIONS, activation
from quire.kernels.capture import CapturedCalls, Workspace
from quire.kernels.layer_norm import layer_norm
from quire.kernels.varlen_attention import EncoderAttentionParams, varlen_attention

DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [1, 12, 33, 0, 13, 300, 64, 2]
compiled = pytest.mark.skipif(native.instructions() is None, reason="installed without a compiler")


def _qkv(lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parts of one projection, and the offsets of the sequences."""
    torch.manual_seed(0)
    x = torch.randn(sum(lengths), heads + 2 * kv_heads, dim).to(dtype)
    return [x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :], _offsets(lengths)]


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def _expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, params: EncoderAttentionParams
) -> torch.Tensor:
    """The definition, query by query, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    sequence = torch.searchsorted(offsets, torch.arange(len(q)), right=True) - 1
    for i in range(len(q)):
        begin, end = offsets[sequence[i]].item(), offsets[sequence[i] + 1].item()
        distance = torch.arange(int(begin), int(end)) - i
        seen = torch.ones(len(distance), dtype=torch.bool)
        if params.causal:
            seen &= distance <= 0
        if params.window is not None:
            seen &= distance.abs() <= params.window
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            scores = k[int(begin) : int(end), kv_head].double() @ q[i, head].double() * params.scale
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            if params.alibi_slopes is not None:
                scores = scores - params.alibi_slopes[head] * distance.abs()
            if params.biases is not None:
                reach = params.biases.shape[1] // 2
                scores = scores + params.biases[head, distance.clamp(-reach, reach) + reach]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(0)
            out[i, head] = weights @ v[int(begin) : int(end), kv_head].double()
    return out


PARAMS = {
    "plain": EncoderAttentionParams(0.3),
    "window": EncoderAttentionParams(0.3, window=20),
    "alone": EncoderAttentionParams(0.3, window=0),
    "causal": EncoderAttentionParams(0.3, causal=True),
    "causal window": EncoderAttentionParams(0.3, causal=True, window=40),
    "softcap": EncoderAttentionParams(0.3, softcap=2.0),
    "alibi": EncoderAttentionParams(0.3, alibi_slopes=torch.tensor([0.5, 0.01])),
    "biases": EncoderAttentionParams(0.3, biases=torch.linspace(-2, 3, 2 * 81).sin().view(2, 81), window=70),
    "causal alibi": EncoderAttentionParams(0.3, alibi_slopes=torch.tensor([0.5, 0.01]), causal=True, softcap=3.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_varlen_attention(params: EncoderAttentionParams, dtype: torch.dtype) -> None:
    q, k, v, offsets = _qkv(LENGTHS, 2, 1, 32, dtype)
    expected = _expected(q, k, v, offsets, params)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    out = varlen_attention(q, k, v, offsets, params)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    with native.disabled():
        out = varlen_attention(q, k, v, offsets, params)
    torch.testing.assert_close(out.double(), expected, atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 16, 20, 24, 33, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
def test_varlen_attention_of_all_head_dims(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    q, k, v, offsets = _qkv([40, 5, 290], heads, kv_heads, dim, dtype)
    params = EncoderAttentionParams(dim**-0.5)
    out = varlen_attention(q, k, v, offsets, params)
    with native.disabled():
        expected = varlen_attention(q.float(), k.float(), v.float(), offsets, params)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [20, 32, 72, 80])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 33, 47, 65, 513])
def test_attention_reads_and_writes_only_what_belongs_to_it(
    length: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between NaN: other heads, other sequences, what comes after the last token, and the memory of the output."""
    torch.manual_seed(0)
    x = torch.full((3 * length + 40, 8, dim), torch.nan).to(dtype)
    x[length : 2 * length, 1:7] = torch.randn(length, 6, dim).to(dtype)
    q, k, v = x[: 3 * length, 1:3], x[: 3 * length, 3:5], x[: 3 * length, 5:7]
    params = EncoderAttentionParams(dim**-0.5)
    monkeypatch.setattr(module, "empty", lambda shape, dtype: torch.full(shape, torch.nan, dtype=dtype))
    out = varlen_attention(q, k, v, _offsets([length] * 3), params)
    rows = slice(length, 2 * length)
    with native.disabled():
        expected = varlen_attention(q[rows].float(), k[rows].float(), v[rows].float(), _offsets([length]), params)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(out[rows].float(), expected, atol=tolerance, rtol=tolerance)
    assert out[:length].isnan().all()
    assert out[2 * length :].isnan().all()


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "causal window", "alibi"])
def test_a_sequence_does_not_depend_on_the_others(name: str, dtype: torch.dtype) -> None:
    lengths = [1, 700, 30, 256, 13]
    q, k, v, offsets = _qkv(lengths, 2, 2, 64, dtype)
    params = replace(PARAMS[name], window=None if PARAMS[name].window is None else 300)
    together = varlen_attention(q, k, v, offsets, params)
    for begin, length in zip(offsets.tolist(), lengths, strict=False):
        rows = slice(begin, begin + length)
        assert torch.equal(
            varlen_attention(q[rows], k[rows], v[rows], torch.tensor([0, length]), params), together[rows]
        )


@compiled
def test_large_scores_and_nan() -> None:
    """Scores whose exponentials overflow; NaN stays within its sequence."""
    q, k, v, offsets = _qkv([50, 50], 1, 1, 32, torch.float32)
    params = EncoderAttentionParams(100.0)
    expected = _expected(q, k, v, offsets, params)
    torch.testing.assert_close(varlen_attention(q, k, v, offsets, params).double(), expected, atol=1e-3, rtol=1e-3)
    k[7] = torch.nan
    out = varlen_attention(q, k, v, offsets, params)
    assert out[:50].isnan().all()
    assert out[50:].isfinite().all()


@compiled
def test_attention_is_replayed_for_other_sequences() -> None:
    q, k, v, offsets = _qkv([100, 0, 0, 0], 2, 2, 32, torch.bfloat16)
    results = []
    with torch.inference_mode():
        captured = CapturedCalls(
            lambda: results.append(varlen_attention(q, k, v, offsets, PARAMS["plain"])), Workspace(), (100, 0)
        )
        assert captured.complete
        for lengths in ([50, 1, 9, 40], [30, 0, 20, 0]):
            offsets.copy_(_offsets(lengths))
            captured.replay((sum(lengths), 0))
            tokens = slice(sum(lengths))
            expected = varlen_attention(q[tokens], k[tokens], v[tokens], offsets, PARAMS["plain"])
            assert torch.equal(results[0][tokens], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 100, 384, 2048])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_residual", [True, False])
def test_layer_norm(has_residual: bool, has_bias: bool, dim: int, dtype: torch.dtype) -> None:
    """Of rows with a large mean, and a larger stride."""
    torch.manual_seed(0)
    x, residual = (torch.randn(70, dim + 8) + 3).to(dtype)[:, 8:], torch.randn(70, dim).to(dtype)
    weight, bias = torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)
    total = x.double() + (residual.double() if has_residual else 0)
    expected = F.layer_norm(total, (dim,), weight.double(), bias.double() if has_bias else None, 1e-5)
    arguments = (x, weight, bias if has_bias else None, 1e-5, residual if has_residual else None)
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    out = layer_norm(*arguments)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    with native.disabled():
        torch.testing.assert_close(layer_norm(*arguments).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_new", "quick_gelu", "relu", "relu2"])
@pytest.mark.parametrize("shape", [(3, 32), (200, 192), (5, 7)])
def test_activation(shape: tuple[int, int], act: str, dtype: torch.dtype) -> None:
    """Also where exponentials overflow, and for NaN."""
    torch.manual_seed(0)
    x = (torch.randn(shape) * 4).to(dtype)
    x[0, :7] = torch.tensor([200.0, -200.0, 0.0, torch.nan, 1e-3, -5.0, 5.0]).to(dtype)
    expected = ACTIVATIONS[act](x.float()).to(dtype)
    torch.testing.assert_close(activation(x, act), expected, equal_nan=True)
    torch.testing.assert_close(activation(x.clone(), act, in_place=True), expected, equal_nan=True)


@compiled
def test_activation_in_place() -> None:
    x = torch.randn(3, 32)
    expected = F.gelu(x)
    assert activation(x, "gelu", in_place=True) is x
    torch.testing.assert_close(x, expected)
