"""Training steps: pairs of a few themes, and their texts in groups of similar length.

Step ``n`` depends only on the seed and its number, so that a run can be resumed exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.embedder.model import Group
from training.embedder.pairs.pair import Pair
from training.embedder.pairs.themes import make_pair
from training.embedder.recipe import Recipe
from training.tokens import token_id

LENGTHS = (8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class Step:
    """The texts of a step in groups: the queries, then the texts, then the wrong texts.

    ``places`` are the rows of all texts in the order of the groups.
    ``allowed`` is false where a text, or wrong text, of another query is not to be taken as a wrong answer.
    """

    groups: list[Group]
    places: Tensor
    queries: int
    texts: int
    allowed: Tensor

    @property
    def tokens(self) -> int:
        """Tokens of the step with padding."""
        return sum(group.ids.numel() for group in self.groups)


class Steps:
    """Generate the pairs of each step and encode them."""

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe) -> None:
        self.tokenizer, self.recipe = tokenizer, recipe
        self.padding = token_id(tokenizer, "[PAD]")
        tokenizer.enable_truncation(recipe.length)

    def make(self, number: int) -> Step:
        """Return step ``number``."""
        rng = Random(f"{self.recipe.seed}-{number}")
        pairs = self._pairs(rng)
        wrong = [(at, pair.negative) for at, pair in enumerate(pairs) if pair.negative]
        texts = [*(pair.query for pair in pairs), *(pair.text for pair in pairs), *(text for _, text in wrong)]
        allowed = [
            [at == other or not pair.fits(pairs[other]) for other in range(len(pairs))] for at, pair in enumerate(pairs)
        ]
        for at, row in enumerate(allowed):
            # A wrong text is surely wrong only for its own query, and where a query asks for other things.
            row += [at == owner or not _alike(pairs[at], pairs[owner]) for owner, _ in wrong]
        return Step(*self._groups(texts, rng), len(pairs), len(texts) - len(pairs), torch.tensor(allowed))

    def _pairs(self, rng: Random) -> list[Pair]:
        themes, weights = list(self.recipe.mix), list(self.recipe.mix.values())
        pairs: list[Pair] = []
        while len(pairs) < self.recipe.pairs:
            theme = rng.choices(themes, weights)[0]
            pairs += [make_pair(theme, rng) for _ in range(min(self.recipe.chunk, self.recipe.pairs - len(pairs)))]
        return pairs

    def _groups(self, texts: list[str], rng: Random) -> tuple[list[Group], Tensor]:
        encoded = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        by_length: dict[int, list[int]] = {}
        for at, ids in enumerate(encoded):
            by_length.setdefault(next(length for length in LENGTHS if len(ids) <= length), []).append(at)
        lengths = sorted(by_length)
        places = [at for length in lengths for at in by_length[length]]
        groups = [self._group(length, [encoded[at] for at in by_length[length]], rng) for length in lengths]
        return groups, torch.tensor(places)

    def _group(self, length: int, rows: list[list[int]], rng: Random) -> Group:
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), self.padding, dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.bool)
        for at, row in enumerate(rows):
            ids[at, : len(row)] = torch.tensor(row)
            mask[at, : len(row)] = True
        shifted = rng.random() < self.recipe.shift_rate
        return Group(ids, mask, rng.randrange(self.recipe.shape.positions - length + 1) if shifted else 0)


def _alike(pair: Pair, owner: Pair) -> bool:
    """Whether the wrong text of ``owner`` might answer the query of ``pair``: they ask for the same or share marks."""
    return bool(pair.asks & (owner.asks | owner.holds))
