"""Training batches: conversations generated during training, sorted into length buckets.

Block ``n`` of a phase is the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.chat import Encoded, encode, encode_echo, encode_table
from training.generators.arithmetic import table_rows
from training.generators.conversations import VALUES, make_conversation
from training.generators.drills import echo_text
from training.tokens import token_id, with_fewer_merges

ECHO = "echo"
TABLE = "table"
# Half of the echoes are encoded with a part of the tokenizer's merges, so that copying does not depend on known words.
NUM_VARIANTS = 8
VARIANT_RATE = 0.5
DROPPED_MERGES = 0.08
LENGTHS = (48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768)


@dataclass(frozen=True)
class Batch:
    """Token ids and their loss mask, padded to one of ``LENGTHS``; the theme of each row."""

    ids: Tensor
    loss_mask: Tensor
    themes: tuple[str, ...]


class Batches:
    """Generate blocks of batches; a block depends only on the seed, the name of the phase and its number."""

    def __init__(self, tokenizer: Tokenizer, seed: str, mix: Mapping[str, float], tokens: int, block: int = 40) -> None:
        self.tokenizer, self.seed, self.mix, self.tokens, self.block = tokenizer, seed, mix, tokens, block
        self.padding = token_id(tokenizer, "<|endoftext|>")
        rng = Random(f"{seed}-merges")
        self.variants = [with_fewer_merges(tokenizer, DROPPED_MERGES, rng) for _ in range(NUM_VARIANTS)]

    def start_at(self, number: int) -> Iterator[Batch]:
        """Yield batches without end, starting at batch ``number``."""
        number, at = divmod(number, self.block)
        while True:
            yield from self._make_block(number)[at:]
            number, at = number + 1, 0

    def _make_block(self, number: int) -> list[Batch]:
        rng = Random(f"{self.seed}-{number}")
        themes, weights = list(self.mix), list(self.mix.values())
        waiting: dict[int, list[tuple[str, Encoded]]] = {length: [] for length in LENGTHS}
        full: list[Batch] = []
        while len(full) < self.block:
            theme = rng.choices(themes, weights)[0]
            encoded = self._draw(theme, rng)
            length = next((length for length in LENGTHS if len(encoded.ids) <= length), None)
            if length is None or not any(encoded.loss_mask[1:]):
                continue
            waiting[length].append((theme, encoded))
            if len(waiting[length]) == max(1, self.tokens // length):
                full.append(self._batch(waiting[length], length))
                waiting[length] = []
        rng.shuffle(full)
        return full

    def _draw(self, theme: str, rng: Random) -> Encoded:
        if theme == ECHO:
            tokenizer = rng.choice(self.variants) if rng.random() < VARIANT_RATE else self.tokenizer
            return encode_echo(echo_text(rng, VALUES), rng.randint(2, 3), tokenizer)
        if theme == TABLE:
            return encode_table(table_rows(rng), self.tokenizer)
        return encode(make_conversation(theme, rng), self.tokenizer)

    def _batch(self, rows: list[tuple[str, Encoded]], length: int) -> Batch:
        ids = torch.full((len(rows), length), self.padding, dtype=torch.long)
        loss_mask = torch.zeros((len(rows), length), dtype=torch.bool)
        for at, (_, row) in enumerate(rows):
            ids[at, : len(row.ids)] = torch.tensor(row.ids)
            loss_mask[at, : len(row.loss_mask)] = torch.tensor(row.loss_mask)
        return Batch(ids, loss_mask, tuple(theme for theme, _ in rows))
