"""GGUF files in the shapes of released models, in Q4_K_M, with random weights.

    python -m benchmarks.gguf_models qwen3-0.6b TOKENIZER.json --out qwen3-0.6b.gguf

Blocks are random integers with scales that keep activations of usual size. Which tensors have 6 bits is as in
llama.cpp's files of this type. The tokenizer is one of byte-level BPE; if it has fewer tokens than the shape,
unused ones follow.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

_SUPER = 256  # weights of a block
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MOSTLY_Q4_K_M = 15
WEIGHT_SIZE = 0.02  # standard deviation
Blocks = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = 151936


SHAPES = {
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8),
    "qwen3-4b": Shape(36, 2560, 9728, 32, 8),
}


def q4_k(rng: np.random.Generator, rows: int, columns: int) -> Blocks:
    """Return blocks of 4 bits: codes from 0 to 15 whose minimum makes them symmetric."""
    scales = rng.integers(24, 64, (rows, columns // _SUPER, 8), np.uint8)
    scales[..., 0] = 63
    d = WEIGHT_SIZE / (4.6 * 44)  # 4.6: of codes; 44: the mean scale
    factors = np.broadcast_to(np.array([d, 7.5 * d], np.float16).view(np.uint8), (*scales.shape[:2], 4))
    low, high = scales[..., :4], scales[..., 4:]
    first = low | (high >> 4) << 6  # of scales, and equally of minimums
    packed = np.concatenate([first, first, (high & 15) | (high & 15) << 4], -1)
    codes = rng.integers(0, 256, (*scales.shape[:2], 128), np.uint8)
    return np.concatenate([factors, packed, codes], -1).reshape(rows, -1)


def q6_k(rng: np.random.Generator, rows: int, columns: int) -> Blocks:
    """Return blocks of 6 bits: codes from -32 to 31."""
    blocks = rng.integers(0, 256, (rows, columns // _SUPER, 192), np.uint8)
    scales = rng.integers(48, 128, (*blocks.shape[:2], 16), np.uint8)
    scales[..., 0] = 128  # -128, which the largest one has in real files
    d = np.array([WEIGHT_SIZE / (18.5 * 87)], np.float16).view(np.uint8)
    return np.concatenate([blocks, scales, np.broadcast_to(d, (*blocks.shape[:2], 2))], -1).reshape(rows, -1)


def has_six_bits(layer: int, layers: int) -> bool:
    """Return whether a layer's values and down projection have 6 bits."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


def matrices(shape: Shape) -> Iterator[tuple[str, int, int, bool]]:
    """Yield name, rows, columns of all matrices, and whether they have 6 bits."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", shape.vocabulary, shape.hidden, True
    for layer in range(shape.layers):
        more = has_six_bits(layer, shape.layers)
        yield f"blk.{layer}.attn_q.weight", queries, shape.hidden, False
        yield f"blk.{layer}.attn_k.weight", keys, shape.hidden, False
        yield f"blk.{layer}.attn_v.weight", keys, shape.hidden, more
        yield f"blk.{layer}.attn_output.weight", shape.hidden, queries, False
        yield f"blk.{layer}.ffn_gate.weight", shape.intermediate, shape.hidden, False
        yield f"blk.{layer}.ffn_up.weight", shape.intermediate, shape.hidden, False
        yield f"blk.{layer}.ffn_down.weight", shape.hidden, shape.intermediate, more


def norms(shape: Shape) -> Iterator[tuple[str, int]]:
    """Yield name and size of all norms."""
    yield "output_norm.weight", shape.hidden
    for layer in range(shape.layers):
        yield f"blk.{layer}.attn_norm.weight", shape.hidden
        yield f"blk.{layer}.ffn_norm.weight", shape.hidden
        yield f"blk.{layer}.attn_q_norm.weight", shape.head_dim
        yield f"blk.{layer}.attn_k_norm.weight", shape.head_dim


def token_ids(path: Path, size: int) -> dict[str, int]:
    """Return the tokens of a tokenizer.json by their names, and unused ones up to `size`."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    ids: dict[str, int] = tokenizer["model"]["vocab"] | {
        token["content"]: token["id"] for token in tokenizer["added_tokens"]
    }
    count = len(ids)
    if sorted(ids.values()) != list(range(count)) or count > size:
        raise SystemExit(f"{path} has {count} tokens; at most {size}, numbered from 0, are expected")
    return ids | {f"<unused{number}>": count + number for number in range(size - count)}


def write_tokenizer(writer: GGUFWriter, path: Path, size: int) -> None:
    """Write the vocabulary of a tokenizer.json."""
    tokens = token_ids(path, size)
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    special = {token["content"] for token in tokenizer["added_tokens"]}
    names = sorted(tokens, key=tokens.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    kinds = dict.fromkeys(tokens, TokenType.NORMAL) | dict.fromkeys(special, TokenType.CONTROL)
    writer.add_token_types([kinds.get(name, TokenType.UNUSED) for name in names])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens["<|im_end|>"])
    writer.add_pad_token_id(tokens["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)


def write_model(name: str, shape: Shape, tokenizer: Path, path: Path) -> None:
    """Write the file."""
    writer = GGUFWriter(path, "qwen3")
    writer.add_name(f"{name} shape")
    writer.add_file_type(_MOSTLY_Q4_K_M)
    writer.add_block_count(shape.layers)
    writer.add_context_length(40960)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_quantization_version(2)
    write_tokenizer(writer, tokenizer, shape.vocabulary)
    rng = np.random.default_rng(0)
    for norm, size in norms(shape):
        writer.add_tensor(norm, np.ones(size, np.float32))
    for matrix, rows, columns, more in matrices(shape):
        blocks = q6_k(rng, rows, columns) if more else q4_k(rng, rows, columns)
        kind = GGMLQuantizationType.Q6_K if more else GGMLQuantizationType.Q4_K
        writer.add_tensor(matrix, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("tokenizer", type=Path, help="a tokenizer.json of Qwen3, or a smaller one")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write_model(options.shape, SHAPES[options.shape], options.tokenizer, options.out)


if __name__ == "__main__":
    main()
