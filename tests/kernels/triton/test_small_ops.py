"""The Triton kernels of small ops against their torch references. `poisoned` memory must not be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import activation, layer_norm, native, rope, softcap
from quire.kernels.activation import ACTIVATIONS, act_and_mul, clamped_swiglu
from quire.kernels.add_rms_norm import add_rms_norm
from quire.kernels.add_scaled import add_scaled, scaled
from quire.kernels.projected_heads import CosSin, ProjectedHeads, QKNormWeights
from quire.kernels.qk_norm_rope import qk_norm_rope
from quire.kernels.rms_norm import reference as rms_norm_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def _without_compiled_kernels(device: torch.device) -> Iterator[None]:
    with native.disabled():
        yield


def assert_near(out: torch.Tensor, expected: torch.Tensor, *, equal_nan: bool = False) -> None:
    """The references of half precision round several times."""
    atol, rtol = (2e-6, 1e-5) if out.dtype == torch.float32 else (0.06, 0.02)
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol, equal_nan=equal_nan)


def poisoned(rows: int, size: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """Random rows (rows, size) between columns of NaN."""
    memory = torch.full((rows, size + 14), math.nan, dtype=dtype, device=device)
    memory[:, 3 : size + 3] = torch.randn(rows, size, device=device) * scale
    return memory[:, 3 : size + 3]


@dtypes
@pytest.mark.parametrize("act", sorted(ACTIVATIONS))
def test_gated_activations(device: torch.device, act: str, dtype: torch.dtype) -> None:
    both = poisoned(3, 2 * 37, dtype, device, 4.0)
    both[0, :4] = torch.tensor([math.nan, 90.0, -90.0, 0.0])
    out = act_and_mul(both, act)
    assert out.dtype == dtype
    assert_near(out, activation.reference(both, act), equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (2, 3, 2500)])
def test_gated_activations_of_any_shape(device: torch.device, shape: tuple[int, ...]) -> None:
    both = torch.randn(shape, device=device)
    torch.testing.assert_close(act_and_mul(both, "silu"), activation.reference(both, "silu"))


@dtypes
def test_clamped_swiglu(device: torch.device, dtype: torch.dtype) -> None:
    both = poisoned(3, 2 * 70, dtype, device, 8.0)
    expected = activation.clamped_swiglu_reference(both, 1.702, 7.0)
    assert_near(clamped_swiglu(both, 1.702, 7.0), expected)


@dtypes
@pytest.mark.parametrize("act", ["quick_gelu", "relu2", "silu"])
@pytest.mark.parametrize("in_place", [True, False])
def test_plain_activations(device: torch.device, act: str, in_place: bool, dtype: torch.dtype) -> None:
    x = torch.randn(3, 700, device=device).to(dtype)
    expected, before = ACTIVATIONS[act](x), x.clone()
    assert_near(activation.activation(x, act, in_place=in_place), expected)
    assert in_place or torch.equal(x, before)


@dtypes
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_softcap(device: torch.device, cap: float, dtype: torch.dtype) -> None:
    x = (torch.randn(5, 333, device=device) * torch.logspace(-4, 2, 333, device=device)).to(dtype)
    expected = softcap.softcap(x, cap)
    softcap.softcap_in_place(x, cap)
    assert_near(x, expected)
    small = torch.linspace(-1e-3, 1e-3, 50, device=device)
    expected = small.double().tanh().float()
    softcap.softcap_in_place(small, 1.0)
    torch.testing.assert_close(small, expected, atol=0.0, rtol=1e-6)


@dtypes
@pytest.mark.parametrize("shape", [(1, 64), (3, 33), (2, 1025), (0, 64)])
@pytest.mark.parametrize(("with_bias", "with_residual"), [(True, False), (False, True), (True, True)])
def test_layer_norm(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], with_bias: bool, with_residual: bool
) -> None:
    x = poisoned(*shape, dtype, device, 3.0)
    weight, bias = (torch.randn(shape[1], device=device).to(dtype) for _ in range(2))
    residual = poisoned(*shape, dtype, device) if with_residual else None
    arguments = (x, weight, bias if with_bias else None, 1e-5, residual)
    assert_near(layer_norm.layer_norm(*arguments), layer_norm.reference(*arguments))


@dtypes
@pytest.mark.parametrize("shape", [(1, 64), (3, 33), (2, 1025), (0, 64)])
@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (0.22, 1.0)])
def test_add_rms_norm(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], scale: float, offset: float
) -> None:
    x, y = poisoned(*shape, dtype, device), poisoned(*shape, dtype, device)
    weight, before = torch.randn(shape[1], device=device).to(dtype), x.clone()
    total, normed = add_rms_norm(x, y, scale, weight, 1e-6, offset)
    assert torch.equal(x, before)
    if scale == 1.0 and (dtype != torch.bfloat16 or device.type == "cuda"):  # the interpreter truncates to bfloat16
        assert torch.equal(total, x + y)
    assert_near(total, x + y * scale)
    assert_near(normed, rms_norm_reference(total, weight, 1e-6, offset))


@dtypes
def test_sums_with_scales(device: torch.device, dtype: torch.dtype) -> None:
    x, y = (torch.randn(4, 30, device=device).to(dtype) for _ in range(2))
    assert_near(add_scaled(x, y, 0.3), (x.double() + y.double() * 0.3).to(dtype))
    assert torch.equal(add_scaled(x, y), x + y)
    assert torch.equal(scaled(x, 0.3), x * torch.tensor(0.3, dtype=dtype, device=device))


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.integers(0, 4),
    heads=st.integers(1, 6),
    pairs=st.integers(1, 20),
    unrotated=st.integers(0, 9),
    interleaved=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_rope(tokens: int, heads: int, pairs: int, unrotated: int, interleaved: bool, dtype: torch.dtype) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = poisoned(tokens, heads * (2 * pairs + unrotated), dtype, device).unflatten(1, (heads, -1))
    angle = torch.randn(tokens, pairs, device=device) * 3
    arguments = (x, angle.cos(), angle.sin())
    out = rope.apply_rope(*arguments, interleaved=interleaved)
    assert_near(out, rope.reference(*arguments, interleaved=interleaved))


@dtypes
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("pairs", [None, 5, 40])
@pytest.mark.parametrize("interleaved", [False, True])
def test_qk_norm_rope(
    device: torch.device, interleaved: bool, pairs: int | None, offset: float | None, dtype: torch.dtype
) -> None:
    heads, kv_heads, dim, tokens = 5, 2, 80, 3
    qkv = poisoned(tokens, (heads + 2 * kv_heads) * dim, dtype, device)
    weights = [torch.randn(dim, device=device).to(dtype) for _ in range(2)]
    norms = None if offset is None else QKNormWeights(weights[0], weights[1], 1e-6, offset)
    angle = torch.randn(tokens, pairs or 1, device=device) * 3
    angles = None if pairs is None else CosSin(angle.cos(), angle.sin(), interleaved)
    out = qk_norm_rope(ProjectedHeads(qkv.clone(), heads, kv_heads, norms, angles))
    q, k, v = qkv.unflatten(1, (-1, dim)).split((heads, kv_heads, kv_heads), 1)
    if offset is not None:
        q, k = (rms_norm_reference(x, weight, 1e-6, offset) for x, weight in zip((q, k), weights, strict=True))
    if angles is not None:
        q, k = (rope.reference(x, angles.cos, angles.sin, interleaved=interleaved) for x in (q, k))
    for actual, other in zip(out, (q, k, v), strict=True):
        assert_near(actual, other)


def capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    out = x.clone()
    softcap.softcap_in_place(out, cap)
    return out


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    """Bit for bit, as greedy tokens must be the same alone and in a batch."""
    x, y = (torch.randn(9, 320, device=device, dtype=torch.float32) for _ in range(2))
    weight = torch.randn(320, device=device)
    angle = torch.randn(9, 16, device=device)
    ops: dict[str, Callable[[slice], torch.Tensor]] = {
        "add_rms_norm": lambda rows: add_rms_norm(x[rows], y[rows], 0.5, weight, 1e-6)[1],
        "layer_norm": lambda rows: layer_norm.layer_norm(x[rows], weight, weight, 1e-5, y[rows]),
        "act_and_mul": lambda rows: act_and_mul(x[rows], "gelu"),
        "softcap": lambda rows: capped(x[rows], 5.0),
        "rope": lambda rows: rope.apply_rope(
            x[rows].unflatten(1, (10, 32)), angle[rows].cos(), angle[rows].sin(), interleaved=False
        ),
    }
    for name, op in ops.items():
        together = op(slice(None))
        for row in range(9):
            assert torch.equal(op(slice(row, row + 1))[0], together[row]), name
