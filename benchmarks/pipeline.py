"""transformers' pipeline for automatic speech recognition, for a Whisper of random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import AddedToken, pre_tokenizers

TEXT_TOKENS = 50257  # of the vocabulary; special tokens and timestamps follow
_TIMESTAMPS = 1501
_BEFORE = ("<|endoftext|>", "<|startoftranscript|>")
_AFTER = (*("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),)
LANGUAGES = 99
Samples = NDArray[np.float32]


def write_processor(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer with Whisper's special tokens, and the settings of its features, to a model's folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġword{number}" for number in range(TEXT_TOKENS - len(alphabet))]
    tokenizer: Any = transformers.WhisperTokenizer(
        vocab={text: number for number, text in enumerate([*alphabet, *words])}, merges=[], pad_token=_BEFORE[0]
    )
    codes = ["<|en|>", *(f"<|language-{number}|>" for number in range(1, LANGUAGES))]
    tokenizer.add_special_tokens({"additional_special_tokens": [*_BEFORE, *codes, *_AFTER]})
    tokenizer.add_tokens([AddedToken(f"<|{step * 0.02:.2f}|>", special=False) for step in range(_TIMESTAMPS)])
    if len(tokenizer) != vocabulary:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model {vocabulary}")
    tokenizer.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)


def pipeline_run(folder: Path, dtype: torch.dtype, tokens: int, batch_size: int) -> Callable[[list[Samples]], object]:
    """A run of the pipeline on samples at 16 kHz, which computes features and makes texts; greedy, in English."""
    pipe = transformers.pipeline(
        "automatic-speech-recognition", model=str(folder), dtype=dtype, device="cpu", batch_size=batch_size
    )
    generation = {
        "language": "en",
        "task": "transcribe",
        "num_beams": 1,
        "do_sample": False,
        "max_new_tokens": tokens,
        "min_new_tokens": tokens,
    }

    def run(files: list[Samples]) -> object:
        answers: Any = pipe(files, generate_kwargs=dict(generation))
        # Special tokens, which random weights choose now and then, have no text.
        assert all(len(answer["text"].split()) > tokens // 2 for answer in answers), "too little text"
        return answers

    return run
