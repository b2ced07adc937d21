"""The parts of Gemma 3n around its language model: transformers' modules, and in the place of timm's tower Quire's."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModel
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nMultimodalEmbedder, Gemma3nPreTrainedModel

from quire.engine.models.layers.mobilenet import MobileNetV5


class Gemma3nReaders(Gemma3nPreTrainedModel):  # type: ignore[misc]
    """Has the attributes of transformers' `Gemma3nModel`, which needs timm; `language_model` is None."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.language_model = None
        self.vision_tower = VisionTower(config.vision_config)
        self.audio_tower = AutoModel.from_config(config.audio_config)
        self.embed_vision = Gemma3nMultimodalEmbedder(config.vision_config, config.text_config)
        self.embed_audio = Gemma3nMultimodalEmbedder(config.audio_config, config.text_config)


class VisionTower(nn.Module):
    """Has the name that checkpoints give the tower."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        fields = vision.model_args or {}
        self.timm_model = MobileNetV5(fields.get("channel_multiplier", 1.0), fields.get("msfa_output_resolution", 16))
