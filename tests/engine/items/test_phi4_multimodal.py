"""Phi-4 Multimodal: audio of several chunks, and checkpoints as its authors publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.models.errors import ModelError
from tests.support.audio_models import expected_tokens, make_audio_model, noise, prompt_with, save_audio_model
from tests.support.engine import Engine, greedy

AUDIO = "model.embed_tokens_extend.audio_embed."
THEIRS = (
    ("feed_forward_in.gate_up_proj", "feed_forward_in.net.0.linear"),
    ("feed_forward_out.gate_up_proj", "feed_forward_out.net.0.linear"),
    ("feed_forward_in.down_proj", "feed_forward_in.net.2"),
    ("feed_forward_out.down_proj", "feed_forward_out.net.2"),
    *((f"self_attn.{part}_proj", f"self_attn.linear_{part}") for part in "qkv"),
    ("self_attn.o_proj", "self_attn.linear_out"),
    ("up_proj_for_speech", "audio_projection.speech.0"),
    ("down_proj_for_speech", "audio_projection.speech.2"),
    ("up_proj_for_vision_speech", "audio_projection.vision.0"),
    ("down_proj_for_vision_speech", "audio_projection.vision.2"),
)


def test_audio_of_several_chunks(tmp_path: Path) -> None:
    """Each is an item; the last one is filled up, as by transformers, and convolutions look back."""
    model = make_audio_model("phi4_multimodal", text={"max_position_embeddings": 2048})
    engine = Engine(save_audio_model(model, tmp_path), max_num_batched_tokens=300)
    for seconds, count in ((40.0, 1), (43.0, 2), (81.31, 3)):
        sound = noise(1, seconds)
        prompt, items = prompt_with(engine.audio, [4, 7], sound, [9])
        assert len(items) == count
        assert [item.columns_before for item in items] == [0, *[8] * (count - 1)]
        assert engine.generate(prompt, greedy(8), items=items).tokens == expected_tokens(model, prompt, [sound], 8)


def as_published(model: Any, folder: Path) -> Path:
    """Save a model under the names of its authors, with both adapters in the checkpoint."""
    weights = load_file(save_audio_model(model, folder) / "model.safetensors")
    renamed = {}
    for name, tensor in weights.items():
        new = name
        for here, published in THEIRS if name.startswith(AUDIO) else ():
            new = new.replace(here, published)
        adapted = f"{name.removesuffix('.weight')}.lora_A" in model.lora.tensors
        renamed[name.replace(".weight", ".base_layer.weight") if adapted else new] = tensor
    for name, tensor in model.lora.tensors.items():
        renamed[f"{name}.speech.weight"] = tensor
        renamed[f"{name}.vision.weight"] = torch.randn_like(tensor)
    save_file(renamed, folder / "model.safetensors")
    (folder / "speech-lora" / "adapter_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    audio = config.pop("audio_config")
    del config["vision_config"]
    rope = config.pop("rope_parameters")
    config |= {
        "model_type": "phi4mm",
        "architectures": ["Phi4MMForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_phi4mm.Phi4MMForCausalLM"},
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_scaling": None,
        "speech_lora": {"r": 4, "lora_alpha": model.lora.config["lora_alpha"], "layer": "..."},
        "vision_lora": {"r": 4, "lora_alpha": 1.0, "layer": "..."},
        "embd_layer": {"audio_embd_layer": {"downsample_rate": 1}, "image_embd_layer": {"crop_size": 28}},
        "audio_processor": {
            "name": "cascades",
            "config": {
                "attention_dim": audio["hidden_size"],
                "attention_heads": audio["num_attention_heads"],
                "linear_units": audio["intermediate_size"],
                "num_blocks": audio["num_blocks"],
                "ext_pw_out_channel": audio["ext_pw_out_channel"],
                "depthwise_seperable_out_channel": audio["depthwise_separable_out_channel"],
                "input_size": audio["input_size"],
                "nemo_conv_settings": {"conv_channels": audio["nemo_conv_channels"]},
                "relative_attention_bias_args": {"type": "t5", "t5_bias_max_distance": audio["bias_max_distance"]},
            },
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_checkpoints_of_its_authors(tmp_path: Path) -> None:
    """The token of audio is that of the published model, 200011."""
    model = make_audio_model("phi4_multimodal", placeholder=200_011, text={"vocab_size": 200_064, "hidden_size": 32})
    engine = Engine(as_published(model, tmp_path))
    assert engine.info.architecture == "phi4_multimodal"
    sound = noise(0, 0.7)
    for parts in (([3, 1, 4], sound, [5]), ([3, 1, 4, 5],)):
        prompt, items = prompt_with(engine.audio, *parts)
        expected = expected_tokens(model, prompt, [sound] if items else [], 6)
        assert engine.generate(prompt, greedy(6), items=items).tokens == expected


@pytest.mark.parametrize("lora", [7, {"r": 4}, {"r": 4, "lora_alpha": "x"}])
def test_adapters_in_the_config_that_cannot_be_used(tmp_path: Path, lora: Any) -> None:
    folder = save_audio_model(make_audio_model("phi4_multimodal"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "speech_lora": lora}))
    with pytest.raises(ModelError, match="speech_lora must be an object with a number lora_alpha"):
        Engine(folder)
