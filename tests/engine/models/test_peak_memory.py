"""Loading takes no more memory than the loaded model and two of its largest tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.kernels import native

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell peaks"),
    pytest.mark.skipif(native.instructions() is None, reason="nothing is packed without compiled kernels"),
]
_HIDDEN, _FEED_FORWARD, _VOCAB, _LAYERS = 1024, 4096, 8192, 5
_LARGEST = _VOCAB * _HIDDEN * 2  # bytes of a tensor in the checkpoint
_SLACK = 24 << 20  # of the allocator, and pages that were read
_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": _HIDDEN,
    "intermediate_size": _FEED_FORWARD,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": _VOCAB,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# Loads a model and prints how much resident memory grew, at its peak and in the end.
_LOAD = """
import contextlib, sys
from pathlib import Path
from quire.app.cli import prepare_process
prepare_process()
from quire.config.options import ModelOptions
from quire.engine.execution.devices.select import find_device
from quire.engine.models.loader import load_model
from quire.engine.models.model_config import read_model_config

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10

folder, options = Path(sys.argv[1]), ModelOptions(dtype="bfloat16", quantization=sys.argv[2])
config = read_model_config(folder)
device = find_device("cpu")
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
with device.activate():
    loaded = load_model(folder, config, options, device, lambda total: contextlib.nullcontext(lambda count: None))
print(resident("VmHWM") - before, resident("VmRSS") - before, loaded.weight_bytes)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 190 MB of random weights."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    shapes = {
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (_HIDDEN, _HIDDEN),
        "self_attn.v_proj": (_HIDDEN, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "mlp.gate_proj": (_FEED_FORWARD, _HIDDEN),
        "mlp.up_proj": (_FEED_FORWARD, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _FEED_FORWARD),
        "input_layernorm": (_HIDDEN,),
        "post_attention_layernorm": (_HIDDEN,),
    }
    names = {f"model.layers.{layer}.{name}.weight": shape for layer in range(_LAYERS) for name, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (_VOCAB, _HIDDEN), "lm_head.weight": (_VOCAB, _HIDDEN)}
    names["model.norm.weight"] = (_HIDDEN,)
    save_file(
        {name: torch.rand(shape, dtype=torch.bfloat16) for name, shape in names.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("quantization", ["int8", pytest.param("none", marks=pytest.mark.slow)])
def test_loading_has_a_bounded_peak(checkpoint: Path, quantization: str, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", _LOAD, str(checkpoint), quantization]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    peak, final, weights = map(int, shown.split())
    assert final >= 0.9 * weights
    assert peak <= final + 2 * _LARGEST + _SLACK
