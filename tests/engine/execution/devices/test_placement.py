"""All tensors of a step are on the device, and no step waits for it: checked with fake CUDA tensors, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quire.engine.execution.profile import run_largest_step
from quire.engine.models.decoder import Decoder
from quire.engine.models.model_config import read_model_config
from quire.engine.models.spec import DecoderSpec, MoE
from quire.engine.models.weights import allocate
from quire.kernels import gpu, native
from tests.support.models import BASE, DECODERS


def spec_of(case: str, folder: Path) -> DecoderSpec:
    from transformers import AutoConfig

    model_type, overrides = DECODERS[case]
    config: Any = AutoConfig.for_model(model_type, **{**BASE, "num_hidden_layers": 2, **overrides})
    config.save_pretrained(folder)
    spec = read_model_config(folder).spec
    assert isinstance(spec, DecoderSpec)
    return spec


@pytest.mark.parametrize("case", DECODERS)
def test_a_step_stays_on_the_device(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors refuse operations on tensors of two devices, and those that read a value."""
    spec = spec_of(case, tmp_path)
    if any(isinstance(layer.ffn, MoE) for layer in spec.layers):
        pytest.skip("experts are chosen on the device by Triton kernels, which fake tensors cannot run")
    monkeypatch.setattr(gpu, "supports", lambda *_: False)  # the references run
    with torch.device("meta"):
        model = Decoder(spec)
    device = torch.device("cuda", 0)
    with FakeTensorMode(allow_non_fake_inputs=True), native.disabled():
        allocate(model, torch.bfloat16, device)
        model.set_context(64)
        run_largest_step(model, 12, 4, 64, device)
