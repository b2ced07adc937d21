"""sentence-transformers with a folder that is also served: all-MiniLM-L6-v2 gives the same embeddings."""
# needs: torch==2.13.0 sentence-transformers>=6,<7

from __future__ import annotations

import random

import numpy as np
from sentence_transformers import SentenceTransformer
from texts import TEXTS, ask, expected

COUNT = 1000
others = "Caf\u00e9 1,024 (naive) don't \u6771\u4eac e-mail: a.b@c.de \U0001f600"
words = [*" ".join(TEXTS).split(), *others.split()]
rng = random.Random(5)
lengths = [round(600 ** (index / (COUNT - 1))) for index in range(COUNT)]
texts = [" ".join(rng.choices(words, k=length)) for length in lengths]

card = next(card for card in ask("/v1/models")["data"] if "minilm" in card["root"].lower())
model = SentenceTransformer(card["root"], device="cpu", local_files_only=True)
reference = model.encode(texts, batch_size=32)
fields = {"model": card["id"], "truncate_prompt_tokens": -1}
actual = [row for start in range(0, COUNT, 250) for row in expected(texts[start : start + 250], **fields)]
distances = 1 - (np.array(actual, np.float64) * reference.astype(np.float64)).sum(1)
assert distances.max() < 1e-5, (distances.max(), texts[int(distances.argmax())][:200])
