"""Jina's embedders v2 with random weights, written down from their description: there is no class of transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

_EPS = 1e-12
_CONFIG = {
    "model_type": "bert",
    "architectures": ["JinaBertForMaskedLM"],
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,  # not a power of two
    "vocab_size": 261,
    "type_vocab_size": 2,
    "max_position_embeddings": 300,
    "layer_norm_eps": _EPS,
    "pad_token_id": 0,
}


class JinaBert:
    """The model; `qk_norm`: the variant for code and several languages."""

    def __init__(self, *, qk_norm: bool = False, **changes: Any) -> None:
        torch.manual_seed(0)
        self.config = {**_CONFIG, **changes}
        self.qk_norm = qk_norm
        repository = "jinaai/jina-bert-v2-qk-post-norm" if qk_norm else "jinaai/jina-bert-implementation"
        self.config["auto_map"] = {
            "AutoConfig": f"{repository}--configuration_bert.JinaBertConfig",
            "AutoModelForSequenceClassification": f"{repository}--modeling_bert.JinaBertForSequenceClassification",
        }
        self.weights: dict[str, Tensor] = {}
        hidden, size = self.config["hidden_size"], self.config["intermediate_size"]
        self._draw("embeddings.word_embeddings.weight", self.config["vocab_size"], hidden)
        self._draw("embeddings.token_type_embeddings.weight", self.config["type_vocab_size"], hidden)
        self._norm("embeddings.LayerNorm")
        for index in range(self.config["num_hidden_layers"]):
            layer = f"encoder.layer.{index}."
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                self._linear(f"{layer}attention.{name}", hidden, hidden)
            self._norm(f"{layer}attention.output.LayerNorm")
            up, down = ("up_gated_layer", "down_layer") if qk_norm else ("gated_layers", "wo")
            self._draw(f"{layer}mlp.{up}.weight", 2 * size, hidden)
            self._linear(f"{layer}mlp.{down}", size, hidden)
            norms = ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2")
            for name in norms if qk_norm else ("mlp.layernorm",):
                self._norm(layer + name)

    def add_head(self) -> None:
        """Make a reranker of it: a layer behind the first token, and one label."""
        hidden = self.config["hidden_size"]
        self._linear("pooler.dense", hidden, hidden)
        self._linear("classifier", hidden, 1)

    def score(self, prompt: list[int]) -> Tensor:
        """(1,): the probability of the label."""
        first = self.hidden_states(prompt)[0]
        return self._projected("classifier", self._projected("pooler.dense", first).tanh()).sigmoid()

    def save(self, folder: Path) -> Path:
        """Write config and weights."""
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def hidden_states(self, prompt: list[int]) -> Tensor:
        """(tokens, hidden) of one text."""
        types = self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self._normed("embeddings.LayerNorm", self.weights["embeddings.word_embeddings.weight"][prompt] + types)
        for index in range(self.config["num_hidden_layers"]):
            x = self._layer(f"encoder.layer.{index}.", x)
        return x

    def _layer(self, layer: str, x: Tensor) -> Tensor:
        attended = self._normed(f"{layer}attention.output.LayerNorm", self._attention(f"{layer}attention.", x) + x)
        if self.qk_norm:
            attended = self._normed(f"{layer}layer_norm_1", attended + x)
            up, gate = (attended @ self.weights[f"{layer}mlp.up_gated_layer.weight"].T).chunk(2, -1)
            branch = self._projected(f"{layer}mlp.down_layer", up * F.gelu(gate))
            return self._normed(f"{layer}layer_norm_2", attended + branch)
        gate, up = (attended @ self.weights[f"{layer}mlp.gated_layers.weight"].T).chunk(2, -1)
        return self._normed(f"{layer}mlp.layernorm", attended + self._projected(f"{layer}mlp.wo", F.gelu(gate) * up))

    def _attention(self, name: str, x: Tensor) -> Tensor:
        q, k, v = (self._projected(f"{name}self.{part}", x) for part in ("query", "key", "value"))
        if self.qk_norm:
            q, k = self._normed(f"{name}self.layer_norm_q", q), self._normed(f"{name}self.layer_norm_k", k)
        heads = self.config["num_attention_heads"]
        q, k, v = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in (q, k, v))
        at = torch.arange(len(x))
        bias = -torch.tensor(_slopes(heads))[:, None, None] * (at[:, None] - at).abs()
        weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + bias).softmax(-1)
        return self._projected(f"{name}output.dense", (weights @ v).transpose(0, 1).flatten(1))

    def _projected(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _normed(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], _EPS)

    def _draw(self, name: str, *shape: int) -> None:
        self.weights[name] = torch.randn(*shape) * shape[-1] ** -0.5

    def _linear(self, name: str, size_in: int, size_out: int) -> None:
        self._draw(f"{name}.weight", size_out, size_in)
        self.weights[f"{name}.bias"] = torch.randn(size_out) * 0.1

    def _norm(self, name: str) -> None:
        self.weights[f"{name}.weight"] = 1 + torch.randn(self.config["hidden_size"]) * 0.2
        self.weights[f"{name}.bias"] = torch.randn(self.config["hidden_size"]) * 0.1


def _slopes(heads: int) -> list[float]:
    """Of Press et al. 2022: a geometric series, filled up with every second element of one that is twice as long."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
    below = 2 ** int(math.log2(heads))
    return _slopes(below) + _slopes(2 * below)[0::2][: heads - below]
