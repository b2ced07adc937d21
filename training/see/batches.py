"""Steps of the training: drawn pictures, with as many questions on each as a sequence holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

import numpy as np
import torch
from torch import Tensor

from training.see.drawing import Drawing, draw, draw_crowd
from training.see.heldout import Sight
from training.see.questions import Question, ask, ask_without_picture
from training.see.recipe import Recipe
from training.see.scenes import Scene, make_scene
from training.see.tokens import AROUND, GLOBAL, IMAGE, START, STOP, Ids

IGNORED = -100  # label of a token without loss
PADDING = -1  # segment of padding
_TRIES = 6  # questions that may be too long for what is left of a sequence, before it is padded
_HELDOUT_LENGTH = 400  # tokens of a sequence with all questions on a picture
_LISTS = (("List everything.", "{shown}"), ("List everything with its colour.", "{colour} {shown}"))
_SYSTEM = (
    "You are a helpful assistant.",
    "You are quire-nano-see.",
    "Answer briefly.",
    "You look at pictures and answer questions.",
    "You are a helpful assistant that answers briefly.",
)


@dataclass(frozen=True, slots=True)
class Step:
    """Sequences with their pictures.

    Attributes:
        pixels: uint8 (pictures, side, side, 3).
        what, which, middle: classes of the patches, (pictures, patches).
        tokens, labels: (pictures, length). A label is that of the next token.
        positions: (pictures, length).
        segments: (pictures, length): a token sees those before it of segment 0 and of its own.
    """

    pixels: Tensor
    what: Tensor
    which: Tensor
    middle: Tensor
    tokens: Tensor
    labels: Tensor
    positions: Tensor
    segments: Tensor


@dataclass(frozen=True, slots=True)
class Asked:
    """A question of the evaluation, and where the labels of its answer are in a step."""

    question: Question
    row: int
    start: int
    end: int


class _Row:
    """A sequence that grows: what all questions see, then questions with answers."""

    def __init__(self, prefix: list[int], length: int) -> None:
        self.length = length
        self.prefix = len(prefix)
        self.tokens = list(prefix)
        self.labels = [IGNORED] * len(prefix)
        self.positions = list(range(len(prefix)))
        self.segments = [0] * len(prefix)

    def add(self, prompt: list[int], answer: list[int], *, segment: int, first: int) -> bool:
        """Append a question, whose first token has a position. Return False if it is too long."""
        tokens = prompt + answer
        if len(self.tokens) + len(tokens) > self.length:
            return False
        # The label of a token is the next one: that of the prompt's last token begins the answer.
        self.labels += [IGNORED] * (len(prompt) - 1) + answer + [IGNORED]
        self.tokens += tokens
        self.positions += range(first, first + len(tokens))
        self.segments += [segment] * len(tokens)
        return True

    def pad(self, token: int) -> None:
        """Fill up to the length."""
        missing = self.length - len(self.tokens)
        self.tokens += [token] * missing
        self.labels += [IGNORED] * missing
        self.positions += [0] * missing
        self.segments += [PADDING] * missing


class Steps:
    """Makes the steps. A step depends on the recipe and its number alone."""

    def __init__(self, ids: Ids, recipe: Recipe) -> None:
        self._ids, self._recipe = ids, recipe
        self._picture = f"{AROUND}{GLOBAL}{IMAGE * recipe.shape.tokens}{AROUND}"

    def make(self, number: int) -> Step:
        """Make a step of the training. The first steps have no sequences: they are for the tower alone."""
        recipe = self._recipe
        rng = Random(f"{recipe.seed}-{number}")
        if number < recipe.tower_steps:
            return _stacked([], [draw_crowd(rng, recipe.shape)[0] for _ in range(recipe.crowds)])
        after = number - recipe.tower_steps - recipe.reading_steps
        easy = after < recipe.easy
        reading = 1.0 if after < 0 else recipe.reading
        kinds, weights = zip(*(recipe.easy_mix if easy else recipe.mix), strict=True)
        rows, drawings = [], []
        for _ in range(recipe.pictures):
            if rng.random() < reading:
                drawing, crowd = draw_crowd(rng, recipe.shape)
                row = self._reading(rng, crowd)
            else:
                scene = make_scene(rng, rng.choices(kinds, weights)[0], heldout=False, easy=easy)
                drawing = draw(rng, scene, recipe.shape, easy=easy)
                row = self._row(rng, scene)
            drawings.append(drawing)
            rows.append(row)
        return _stacked(rows, drawings)

    def heldout(self, sights: Iterable[Sight]) -> tuple[Step, list[Asked]]:
        """Make a step of held-out pictures with their questions."""
        rows, drawings, asked = [], [], []
        for at, sight in enumerate(sights):
            row = _Row(self._prefix("", picture=True), _HELDOUT_LENGTH)
            spans = self._fill(row, iter(sight.questions), talk=False)
            asked += [Asked(question, at, *span) for question, span in spans]
            row.pad(self._ids.end)
            rows.append(row)
            drawings.append(sight.drawing(self._recipe.shape))
        return _stacked(rows, drawings), asked

    def _row(self, rng: Random, scene: Scene) -> _Row:
        recipe = self._recipe
        system = rng.choice(_SYSTEM) if rng.random() < recipe.system else ""
        picture = rng.random() >= recipe.without
        row = _Row(self._prefix(system, picture=picture), recipe.length)
        if picture:
            self._fill(row, (ask(rng, scene, "train") for _ in count()), talk=rng.random() < recipe.talk)
        else:
            self._fill(row, (ask_without_picture(rng, "train") for _ in count()), talk=False)
        row.pad(self._ids.end)
        return row

    def _reading(self, rng: Random, crowd: list[list[tuple[str, str]]]) -> _Row:
        """List what a crowded picture shows, row by row, as far as a sequence is long."""
        question, pattern = rng.choice(_LISTS)
        lines = ("  ".join(pattern.format(colour=colour, shown=shown) for colour, shown in row) for row in crowd)
        row = _Row(self._prefix("", picture=True), self._recipe.length)
        prompt = self._ids.encode(f"{question}{STOP}\n{START}assistant\n")
        answer = [*self._ids.encode("\n".join(lines)), self._ids.stop]
        space = row.length - row.prefix - len(prompt)
        row.add(prompt, answer[:space], segment=1, first=row.prefix)
        row.pad(self._ids.end)
        return row

    def _prefix(self, system: str, *, picture: bool) -> list[int]:
        """Return what comes before the question of a user."""
        before = f"{START}system\n{system}{STOP}\n" if system else ""
        return self._ids.encode(f"{before}{START}user\n{self._picture if picture else ''}")

    def _fill(self, row: _Row, questions: Iterator[Question], *, talk: bool) -> list[tuple[Question, tuple[int, int]]]:
        """Append questions while they fit. Return them with the places of their answers' labels.

        Args:
            questions: as many as there are, or endless.
            talk: the questions are turns of one conversation.
        """
        asked: list[tuple[Question, tuple[int, int]]] = []
        tries = 0
        for question in questions:
            again = f"\n{START}user\n" if talk and asked else ""
            prompt = self._ids.encode(f"{again}{question.text}{STOP}\n{START}assistant\n")
            answer = [*self._ids.encode(question.answer), self._ids.stop]
            first = len(row.tokens) if talk else row.prefix
            if not row.add(prompt, answer, segment=1 if talk else len(asked) + 1, first=first):
                tries += 1
                if tries == _TRIES:
                    break
                continue
            end = len(row.tokens) - 1
            asked.append((question, (end - len(answer), end)))
        return asked


def _stacked(rows: list[_Row], drawings: list[Drawing]) -> Step:
    return Step(
        torch.from_numpy(np.stack([drawing.pixels for drawing in drawings])),
        torch.from_numpy(np.stack([drawing.what for drawing in drawings])),
        torch.from_numpy(np.stack([drawing.which for drawing in drawings])),
        torch.from_numpy(np.stack([drawing.middle for drawing in drawings])),
        torch.tensor([row.tokens for row in rows]),
        torch.tensor([row.labels for row in rows]),
        torch.tensor([row.positions for row in rows]),
        torch.tensor([row.segments for row in rows]),
    )
