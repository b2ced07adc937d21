"""What the evaluation compares: models in sentence-transformers folders, and BM25."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

K1, B = 1.2, 0.75
BATCH = 64
MAX_TOKENS = 256


class Retriever(Protocol):
    """Anything that scores candidates for queries."""

    def scores(self, queries: list[str], candidates: list[str]) -> Tensor:
        """Return the scores (queries, candidates); higher is better."""
        ...


class Folder:
    """A model whose embedding is the normalized mean over the tokens, run by transformers."""

    def __init__(self, folder: Path, dimensions: int | None = None) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        self.dimensions = dimensions
        self.longest = min(MAX_TOKENS, self.tokenizer.model_max_length)

    def scores(self, queries: list[str], candidates: list[str]) -> Tensor:
        """Return the cosines."""
        return self.embed(queries) @ self.embed(candidates).T

    @torch.inference_mode()
    def embed(self, texts: list[str]) -> Tensor:
        """Return the embeddings of the texts."""
        order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
        embeddings: dict[int, Tensor] = {}
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            inputs = self.tokenizer(
                [texts[at] for at in places],
                padding=True,
                truncation=True,
                max_length=self.longest,
                return_tensors="pt",
            )
            states = self.model(**inputs).last_hidden_state
            weights = inputs["attention_mask"].unsqueeze(-1).float()
            mean = (states * weights).sum(1) / weights.sum(1)
            embeddings.update(zip(places, F.normalize(mean[:, : self.dimensions], dim=-1), strict=True))
        return torch.stack([embeddings[at] for at in range(len(texts))])


class Bm25:
    """BM25 over lower-case words."""

    def scores(self, queries: list[str], candidates: list[str]) -> Tensor:
        """Return the scores, with the statistics of the candidates."""
        counts = [Counter(_words(text)) for text in candidates]
        lengths = [sum(count.values()) for count in counts]
        mean = sum(lengths) / len(lengths)
        containing = Counter(word for count in counts for word in count)
        rarity = {word: math.log(1 + (len(counts) - count + 0.5) / (count + 0.5)) for word, count in containing.items()}
        rows = []
        for query in queries:
            words = [word for word in _words(query) if word in rarity]
            rows.append([
                sum(rarity[word] * count[word] * (K1 + 1) / (count[word] + K1 * (1 - B + B * length / mean))
                    for word in words)
                for count, length in zip(counts, lengths, strict=True)
            ])  # fmt: skip
        return torch.tensor(rows)


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())
