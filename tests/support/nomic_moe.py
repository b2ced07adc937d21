"""Nomic Embed v2 with random weights, written down from its description: there is no class of transformers.

Without the bias that its authors add to the result of a layer's experts, which llama.cpp's converter leaves out.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_HIDDEN, _SIZE, _HEADS, _LAYERS, _EXPERTS, _TOP, _VOCAB = 64, 96, 4, 4, 4, 2, 261
_EPS, _THETA = 1e-5, 10000.0


class NomicMoe:
    """The model: experts in every second layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weights = {
            "token_embd.weight": torch.randn(_VOCAB, _HIDDEN),
            "token_types.weight": torch.randn(1, _HIDDEN),
        }
        self._norm("token_embd_norm")
        for layer in range(_LAYERS):
            block = f"blk.{layer}."
            self._linear(f"{block}attn_qkv", 3 * _HIDDEN, _HIDDEN)
            self._linear(f"{block}attn_output", _HIDDEN, _HIDDEN)
            self._norm(f"{block}attn_output_norm")
            self._norm(f"{block}layer_output_norm")
            if layer % 2:
                self._draw(f"{block}ffn_gate_inp.weight", _EXPERTS, _HIDDEN)
                self._draw(f"{block}ffn_up_exps.weight", _EXPERTS, _SIZE, _HIDDEN)
                self._draw(f"{block}ffn_down_exps.weight", _EXPERTS, _HIDDEN, _SIZE)
            else:
                self._linear(f"{block}ffn_up", _SIZE, _HIDDEN)
                self._linear(f"{block}ffn_down", _HIDDEN, _SIZE)

    def write(self, path: Path) -> Path:
        """Write a file as llama.cpp's converter does."""
        writer = gguf.GGUFWriter(path, "nomic-bert-moe")
        writer.add_context_length(512)
        writer.add_embedding_length(_HIDDEN)
        writer.add_block_count(_LAYERS)
        writer.add_feed_forward_length(_SIZE)
        writer.add_head_count(_HEADS)
        writer.add_layer_norm_eps(_EPS)
        writer.add_rope_freq_base(_THETA)
        writer.add_expert_count(_EXPERTS)
        writer.add_expert_used_count(_TOP)
        writer.add_uint32("nomic-bert-moe.moe_every_n_layers", 2)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        tokens = ["<s>", "<pad>", "</s>", "<unk>", *(f"\u2581w{index}" for index in range(_VOCAB - 4))]
        writer.add_tokenizer_model("t5")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * _VOCAB)
        writer.add_unk_token_id(3)
        writer.add_pad_token_id(1)
        for name, weight in self.weights.items():
            writer.add_tensor(name, weight.numpy().astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def hidden_states(self, prompt: list[int]) -> Tensor:
        """(tokens, hidden) of one text."""
        x = self.weights["token_embd.weight"][prompt] + self.weights["token_types.weight"]
        x = self._normed("token_embd_norm", x)
        for layer in range(_LAYERS):
            block = f"blk.{layer}."
            x = self._normed(f"{block}attn_output_norm", x + self._attention(block, x))
            branch = self._experts(block, x) if layer % 2 else self._plain(block, x)
            x = self._normed(f"{block}layer_output_norm", x + branch)
        return x

    def _attention(self, block: str, x: Tensor) -> Tensor:
        parts = self._projected(f"{block}attn_qkv", x).chunk(3, -1)
        q, k, v = (part.unflatten(1, (_HEADS, -1)).transpose(0, 1) for part in parts)
        q, k = _rotated(q), _rotated(k)
        weights = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)
        return self._projected(f"{block}attn_output", (weights @ v).transpose(0, 1).flatten(1))

    def _plain(self, block: str, x: Tensor) -> Tensor:
        return self._projected(f"{block}ffn_down", F.gelu(self._projected(f"{block}ffn_up", x)))

    def _experts(self, block: str, x: Tensor) -> Tensor:
        router, up, down = (self.weights[f"{block}ffn_{name}.weight"] for name in ("gate_inp", "up_exps", "down_exps"))
        scores, chosen = (x @ router.T).softmax(-1).topk(_TOP)
        rows = [
            sum(
                score * (down[expert] @ F.gelu(up[expert] @ token))
                for score, expert in zip(token_scores, experts, strict=True)
            )
            for token, token_scores, experts in zip(x, scores, chosen, strict=True)
        ]
        return torch.stack([row for row in rows if isinstance(row, Tensor)])

    def _projected(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _normed(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], _EPS)

    def _draw(self, name: str, *shape: int) -> None:
        self.weights[name] = torch.randn(*shape) * shape[-1] ** -0.5

    def _linear(self, name: str, size_out: int, size_in: int) -> None:
        self._draw(f"{name}.weight", size_out, size_in)
        self.weights[f"{name}.bias"] = torch.randn(size_out) * 0.1

    def _norm(self, name: str) -> None:
        self.weights[f"{name}.weight"] = 1 + torch.randn(_HIDDEN) * 0.2
        self.weights[f"{name}.bias"] = torch.randn(_HIDDEN) * 0.1


def _rotated(x: Tensor) -> Tensor:
    """Both halves of each head, rotated by their positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * _THETA ** (-torch.arange(half) / half)
    first, second = x.split(half, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
