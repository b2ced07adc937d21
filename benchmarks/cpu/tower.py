"""The tower and projector of SmolVLM-256M's shape with random weights: a tile by Quire beside transformers' own code.

python -m benchmarks.cpu.tower [--dtype float32]

One thread; times are CPU times, so that other processes disturb them less, and the least of some rounds.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModel

from quire.engine.client.protocol import PictureItem
from quire.engine.models.checkpoint.weights import allocate
from quire.engine.models.config.image_processor import Normalization
from quire.engine.models.fallback.tower import TowerLinear, empty_tower
from quire.engine.models.family import Composite, Tower
from quire.engine.models.networks.vision_encoder import PixelEncoder
from quire.engine.models.registry import registry

EDGE = 512
_VISION = {
    "model_type": "smolvlm_vision",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": EDGE,
    "patch_size": 16,
}
_TEXT = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 300}
_NORMALIZATION = Normalization(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_ROUNDS = 5


def encoders(dtype: torch.dtype) -> dict[str, PixelEncoder]:
    """The same weights in transformers' model and in Quire's tower."""
    config = AutoConfig.for_model("smolvlm", vision_config=_VISION, text_config=_TEXT, scale_factor=4)
    family = registry().types["smolvlm"]
    assert isinstance(family, Composite)
    assert isinstance(family.tower, Tower)
    plain = AutoModel.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="sdpa").eval()
    weights: dict[str, Any] = dict(plain.named_parameters())
    del plain.text_model
    quire = PixelEncoder(empty_tower(config, family.tower), family.tower.encode, _NORMALIZATION)
    allocate(quire, dtype, torch.device("cpu"))
    quire.make_buffers(torch.device("cpu"))
    for name, parameter in quire.tower.named_parameters():
        parameter.data.copy_(weights[name])
    for module in quire.tower.modules():
        if isinstance(module, TowerLinear):
            module.pack_weights("none")
    return {"transformers": PixelEncoder(plain, family.tower.encode, _NORMALIZATION), "quire": quire}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    dtype = getattr(torch, parser.parse_args().dtype)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pixels = np.random.default_rng(0).integers(0, 255, (1, EDGE, EDGE, 3)).astype(np.uint8)
    item = PictureItem(hash=b"", length=64, pixels=pixels)
    made = encoders(dtype)
    least = dict.fromkeys(made, float("inf"))
    for _ in range(_ROUNDS):
        for name, encoder in made.items():
            started = time.process_time()
            encoder.encode(item)
            least[name] = min(least[name], time.process_time() - started)
    for name, seconds in least.items():
        print(f"{name}: {1000 * seconds:.0f} ms of a core for a tile of {EDGE} x {EDGE} pixels")


if __name__ == "__main__":
    main()
