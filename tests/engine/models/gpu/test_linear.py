"""Linear layers with the Triton kernels."""

from __future__ import annotations

import pytest
import torch

from quire.engine.models.layers.embedding import Embedding
from quire.engine.models.layers.inputs import AdapterOfRow
from quire.engine.models.layers.linear import Linear
from quire.kernels import native


def make(device: torch.device, dtype: torch.dtype) -> Linear:
    torch.manual_seed(0)
    linear = Linear(96, 48, bias=True)
    linear.weight = torch.nn.Parameter(torch.randn(48, 96, device=device).to(dtype) * 0.1, requires_grad=False)
    linear.bias = torch.nn.Parameter(torch.randn(48, device=device).to(dtype), requires_grad=False)
    return linear


@pytest.mark.parametrize("indices", [None, [0, 3, 4], []])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_for_some_rows(device: torch.device, dtype: torch.dtype, indices: list[int] | None) -> None:
    with native.disabled():
        linear, x = make(device, dtype), torch.randn(6, 96, device=device).to(dtype)
        linear.pack_weights("none")
        down = torch.randn(8, 96, device=device).to(dtype) * 0.1
        up = torch.randn(48, 8, device=device).to(dtype)
        linear.adapt(down, up)
        plain = linear(x)
        chosen = list(range(6)) if indices is None else indices
        adapters = torch.tensor([0 if row in chosen else -1 for row in range(6)], dtype=torch.int32, device=device)
        out = linear(x, adapted=AdapterOfRow(adapters).sorted())
        expected = plain.clone()
        expected[chosen] += ((x[chosen].float() @ down.float().T).to(dtype).float() @ up.float().T).to(dtype)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=4e-2 if dtype == torch.bfloat16 else 1e-5)
    others = [row for row in range(6) if row not in chosen]
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
