"""All tensors of a step are on the device, and no step waits for it: checked on the meta device, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.execution.attention import varlen
from quire.engine.execution.attention.varlen import VarlenAttention
from quire.engine.execution.profile import run_largest_step
from quire.engine.models.checkpoint.weights import allocate
from quire.engine.models.model_config import read_model_config
from quire.engine.models.networks.decoder import Decoder
from quire.engine.models.specs.decoder import DecoderSpec, MoE
from quire.kernels import native
from quire.kernels.paged_attention import AttentionParams
from tests.support.models import BASE, DECODERS


def spec_of(case: str, folder: Path) -> DecoderSpec:
    from transformers import AutoConfig

    model_type, overrides = DECODERS[case]
    config: Any = AutoConfig.for_model(model_type, **{**BASE, **overrides})
    config.save_pretrained(folder)
    spec = read_model_config(folder).spec
    assert isinstance(spec, DecoderSpec)
    return spec


@pytest.mark.parametrize("case", DECODERS)
def test_a_step_stays_on_the_device(case: str, tmp_path: Path) -> None:
    """Most operations on tensors of two devices are refused, and on the meta device those that read a value."""
    spec = spec_of(case, tmp_path)
    if any(isinstance(layer.ffn, MoE) for layer in spec.layers):
        pytest.skip("only the Triton kernels choose experts without reading a value")
    device = torch.device("meta")
    with device:
        model = Decoder(spec)
    with native.disabled():
        allocate(model, torch.bfloat16, device)
        model.set_context(64)
        run_largest_step(model, 12, 4, 64, device)


def test_an_encoder_attends_on_the_device_of_its_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The starts of sequences, which the host has made, follow them once: kernels read both."""
    tensors: list[torch.Tensor] = []
    monkeypatch.setattr(varlen, "varlen_attention", lambda q, k, v, starts, params: tensors.append(starts))
    attend, q = VarlenAttention(torch.tensor([0, 2, 5])), torch.empty(5, 2, 16, device="meta")
    for _ in range(2):
        attend(0, q, q, q, AttentionParams(0.25))
    assert tensors[0].device == q.device
    assert tensors[1] is tensors[0]


def test_tensors_of_two_devices_are_refused() -> None:
    """What the test above depends on."""
    for refused in (
        lambda: torch.ones(3) + torch.ones(3, device="meta"),
        lambda: torch.cat((torch.ones(3), torch.ones(3, device="meta"))),
        lambda: torch.ones(3, device="meta").sum().item(),
        lambda: torch.ones(3, device="meta").nonzero(),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            refused()
