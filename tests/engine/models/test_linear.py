"""Linear layers: activations of their results."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.layers.inputs import LoRAIds
from quire.engine.models.layers.linear import Linear, LoRARows
from quire.engine.models.layers.moe import ExpertLinear
from quire.engine.models.layers.step import StepLoRA
from quire.kernels.activation import ACTIVATIONS
from quire.kernels.gpu_weights import GpuWeight, StackedWeights, format_weight
from tests.support.variants import slow_but

ACTS = sorted(ACTIVATIONS)


def make(size_in: int, size_out: int, dtype: torch.dtype) -> Linear:
    torch.manual_seed(0)
    linear = Linear(size_in, size_out, bias=True)
    linear.weight = torch.nn.Parameter(torch.randn(size_out, size_in).to(dtype) * size_in**-0.5, requires_grad=False)
    linear.bias = torch.nn.Parameter(torch.randn(size_out).to(dtype), requires_grad=False)
    return linear


# Numbers of rows, of inputs and of outputs.
SHAPES = [(rows, *sizes) for rows in (1, 7, 13, 130) for sizes in ((64, 48), (64, 40), (30, 33), (384, 1536), (2, 1))]
# Each activation with a quarter of the shapes.
_QUICK = [(act, shape) for i, act in enumerate(ACTS) for j, shape in enumerate(SHAPES) if (i + j) % 4 == 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("act", "shape"), slow_but(product(ACTS, SHAPES), *_QUICK))
def test_an_activation_equals_torch(act: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Packed or not, of sizes that the kernels compute and of others."""
    rows, size_in, size_out = shape
    linear = make(size_in, size_out, dtype)
    x = torch.randn(rows, size_in).to(dtype)
    assert linear.weight is not None
    assert linear.bias is not None
    expected = ACTIVATIONS[act](F.linear(x.double(), linear.weight.double(), linear.bias.double()))
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(linear(x, act=act).double(), expected, atol=tolerance, rtol=tolerance)
    linear.pack_weights("none")
    out = linear(x, act=act)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(linear(x, act=act, out_dtype=torch.float32).double(), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("size_out", [48, 40])
@pytest.mark.parametrize("act", ACTS)
def test_an_activation_of_quantized_weights(act: str, size_out: int, quantization: str) -> None:
    linear = make(128, size_out, torch.bfloat16)
    linear.pack_weights(quantization)  # type: ignore[arg-type]
    x = torch.randn(29, 128).bfloat16()
    expected = ACTIVATIONS[act](linear(x).float()).bfloat16()
    torch.testing.assert_close(linear(x, act=act), expected, atol=2e-3, rtol=0.02)


def weights_of(rank: int) -> tuple[Tensor, Tensor]:
    """Of an adapter of 64 inputs and 48 outputs."""
    return torch.randn(rank, 64).bfloat16() * 0.1, torch.randn(48, rank).bfloat16()


@pytest.mark.parametrize("rows", [{0: None}, {0: torch.tensor([0, 3, 4])}, {}])
def test_an_activation_comes_after_the_adapter(rows: LoRARows) -> None:
    linear = make(64, 48, torch.bfloat16)
    linear.put_lora(0, *weights_of(16), num_adapters=1)
    linear.pack_weights("none")
    x = torch.randn(6, 64).bfloat16()
    expected = ACTIVATIONS["gelu"](linear(x, lora=rows).float()).bfloat16()
    out = linear(x, act="gelu", lora=rows)
    torch.testing.assert_close(out, expected)
    others = [row for row in range(6) if rows == {} or (isinstance(rows[0], Tensor) and row not in rows[0])]
    assert torch.equal(out[others], linear(x, act="gelu")[others])


@pytest.mark.parametrize("lora_ids", [[0] * 6, [1, 0, -1, 0, 1, 2], [-1, 2, -1, -1, -1, -1]])
def test_each_row_has_the_product_of_its_adapter(lora_ids: list[int]) -> None:
    """As if the step had the rows of that adapter alone. Adapter 2 has no weights for this layer."""
    linear, x = make(64, 48, torch.bfloat16), torch.randn(6, 64).bfloat16()
    linear.pack_weights("none")
    linear.put_lora(0, *weights_of(16), num_adapters=3)
    linear.put_lora(1, *weights_of(4), num_adapters=3)
    step = StepLoRA.of(LoRAIds(torch.tensor(lora_ids, dtype=torch.int32), None), 3)
    assert step is not None
    out = linear(x, lora=step.tokens)
    for row, lora_id in enumerate(lora_ids):
        alone = x[row : row + 1]
        assert torch.equal(out[row], linear(alone, lora={lora_id: None})[0])
        assert (lora_id in (0, 1)) != torch.equal(out[row], linear(alone)[0])


def test_experts_of_different_formats_are_refused() -> None:
    """A format may leave some weights plain; a stack has one format."""
    stack = StackedWeights(3)
    experts = [ExpertLinear(64, 48, bias=False, stack=stack, index=index) for index in range(3)]
    for expert, quantization in zip(experts, ("int8", "int8", "none"), strict=True):
        packed = GpuWeight(format_weight(torch.randn(48, 64), quantization))
        if quantization == "none":
            with pytest.raises(UnsupportedModel, match="experts are scaled and plain"):
                expert.use(packed)
        else:
            expert.use(packed)
            assert expert.packed_bytes == 48 * (64 + 4)
