"""Linear layers with the Triton kernels."""

from __future__ import annotations

import pytest
import torch

from quire.engine.models.layers.embedding import Embedding
from quire.engine.models.layers.inputs import LoRAIds
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.step import StepLoRA
from quire.kernels import native


def make(device: torch.device, dtype: torch.dtype) -> Linear:
    torch.manual_seed(0)
    linear = Linear(96, 48, bias=True)
    linear.weight = torch.nn.Parameter(torch.randn(48, 96, device=device).to(dtype) * 0.1, requires_grad=False)
    linear.bias = torch.nn.Parameter(torch.randn(48, device=device).to(dtype), requires_grad=False)
    return linear


@pytest.mark.parametrize("lora_ids", [[0] * 6, [0, -1, -1, 0, 0, -1], [-1] * 6, [1, 0, -1, 0, 1, 2], [2] * 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_has_the_product_of_its_adapter(device: torch.device, dtype: torch.dtype, lora_ids: list[int]) -> None:
    """Adapter 1 has a smaller rank; 2 has no weights for this layer."""
    with native.disabled():
        linear, x = make(device, dtype), torch.randn(6, 96, device=device).to(dtype)
        linear.pack_weights("none")
        plain = linear(x)
        expected = plain.clone()
        for lora_id, rank in ((0, 8), (1, 4)):
            lora_a = torch.randn(rank, 96, device=device).to(dtype) * 0.1
            lora_b = torch.randn(48, rank, device=device).to(dtype)
            linear.put_lora(lora_id, lora_a, lora_b, num_adapters=3)
            chosen = [row for row in range(6) if lora_ids[row] == lora_id]
            inner = (x[chosen].float() @ lora_a.float().T).to(dtype)
            expected[chosen] += (inner.float() @ lora_b.float().T).to(dtype)
        step = StepLoRA.of(LoRAIds(torch.tensor(lora_ids, dtype=torch.int32, device=device), None), 3)
        assert step is not None
        out = linear(x, lora=step.tokens)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=4e-2 if dtype == torch.bfloat16 else 1e-5)
    others = [row for row in range(6) if lora_ids[row] not in (0, 1)]
    assert torch.equal(out[others], plain[others])


def test_a_tied_embedding_exists_once(device: torch.device) -> None:
    with native.disabled():
        head = Linear(64, 40)
        table = Embedding(40, 64, head)
        weight = torch.nn.Parameter(torch.randn(40, 64, device=device).bfloat16(), requires_grad=False)
        head.weight = table.weight = weight
        table.pack_weights("none")
        assert all(layer.weight is None for layer in (head, table))
        assert head.packed_bytes == weight.nbytes
        tokens = torch.tensor([0, 39, 7], device=device)
        assert torch.equal(table(tokens), weight[tokens])
        x = torch.randn(3, 64, device=device).bfloat16()
        logits = head(x, out_dtype=torch.float32)
        torch.testing.assert_close(logits, x.float() @ weight.float().T, rtol=1e-4, atol=1e-4)
