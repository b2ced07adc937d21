"""Gains of norms move into the weights that read their results before these are quantized to 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.models.checkpoint.norm_gains import NormGains
from quire.engine.models.layers.linear import Linear
from quire.engine.models.layers.norm import LayerNorm, RMSNorm
from tests.support.engine import load
from tests.support.whisper import make_whisper, save_whisper


def uneven_whisper() -> Any:
    """A whisper some of whose channels are many times as large as others behind each norm, and have small weights."""
    model = make_whisper()
    encoder, decoder = model.model.encoder, model.model.decoder
    for layer in (*encoder.layers, *decoder.layers):
        attn, cross = layer.self_attn, getattr(layer, "encoder_attn", None)
        _spread(layer.self_attn_layer_norm, attn.q_proj, attn.k_proj, attn.v_proj)
        _spread(layer.final_layer_norm, layer.fc1)
        if cross is not None:
            _spread(layer.encoder_attn_layer_norm, cross.q_proj)
    crosses = [layer.encoder_attn for layer in decoder.layers]
    _spread(encoder.layer_norm, *(linear for cross in crosses for linear in (cross.k_proj, cross.v_proj)))
    return model


def _spread(norm: torch.nn.LayerNorm, *linears: torch.nn.Linear) -> None:
    norm.weight.data[::8] *= 40
    norm.weight.data[1::8] = 0  # a channel that is never read
    norm.bias.data[1::16] = 0
    for linear in linears:
        linear.weight.data[:, ::8] /= 40


def error(model: torch.nn.Module, exact: torch.nn.Module, norm: str, linear: str) -> float:
    """The relative error of a linear layer behind a norm."""
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    outputs = [network.get_submodule(linear)(network.get_submodule(norm)(x)) for network in (model, exact)]
    return float((outputs[0] - outputs[1]).norm() / outputs[1].norm())


def test_large_channels_do_not_cost_the_others_their_precision(tmp_path: Path) -> None:
    folder = save_whisper(uneven_whisper(), tmp_path)
    exact, rounded = load(folder).model, load(folder, quantization="int8").model
    pairs = {
        "encoder.layers.0.attn_norm": "encoder.layers.0.attn.qkv",
        "encoder.layers.1.ffn_norm": "encoder.layers.1.ffn.up",
        "encoder.norm": "layers.2.cross.k",
        "layers.0.attn_norm": "layers.0.attn.qkv",
        "layers.1.cross_norm": "layers.1.cross.q",
        "layers.2.ffn_norm": "layers.2.ffn.up",
    }
    errors = {norm: error(rounded, exact, norm, linear) for norm, linear in pairs.items()}
    assert max(errors.values()) < 0.02, errors


def test_the_norm_before_the_tied_head_keeps_its_gains(tmp_path: Path) -> None:
    """The head's weight is the table of embeddings as well."""
    folder = save_whisper(uneven_whisper(), tmp_path)
    exact, rounded = load(folder).model, load(folder, quantization="int8").model
    torch.testing.assert_close(rounded.norm.weight, exact.norm.weight)
    assert not torch.equal(rounded.encoder.norm.weight, exact.encoder.norm.weight)


@pytest.mark.parametrize("norm_type", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("order", [("norm", "linear"), ("linear", "norm")])
def test_products_stay_the_same_whichever_is_loaded_first(norm_type: Any, order: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    norm, linear = norm_type(32, 1e-5), Linear(32, 48)
    for parameter in (*norm.parameters(), *linear.parameters()):
        torch.nn.init.normal_(parameter)
    norm.weight.data[3] = 0
    model = torch.nn.ModuleDict({"norm": norm, "linear": linear})
    x = torch.randn(5, 32)
    expected = linear(norm(x))
    gains = NormGains(model, [(norm, (linear,))])
    changed: list[Any] = []
    for part in order:
        layers = [linear] if part == "linear" else []
        for name in [name for name, _ in model.named_parameters() if name.startswith(part)]:
            changed += gains.loaded(name, layers)
    assert changed == [linear]
    torch.testing.assert_close(linear(norm(x)), expected, atol=1e-4, rtol=1e-4)
    spread = norm.weight.abs()[norm.weight != 0]
    assert float(spread.max()) <= 1.0
