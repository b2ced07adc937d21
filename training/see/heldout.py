"""The pictures and questions of the evaluation: phrasings, numbers and words that training never uses."""

from __future__ import annotations

import io
from dataclasses import dataclass
from random import Random

import numpy as np
from PIL import Image

from training.see.drawing import FONTS, HELDOUT_FONTS, Drawing, paint, resized
from training.see.questions import Question, ask
from training.see.recipe import Recipe, Shape
from training.see.scenes import Scene, make_scene

PER_PICTURE = 4  # questions
# What the kinds of questions count as; others count as what they are called.
_GROUPS = {
    "colour_of": "colour", "only_colour": "colour", "ink": "colour", "shape_of": "shape", "only": "colour and shape",
    "place_of": "place", "at_place": "place", "relation": "relation", "count_all": "count", "count_some": "count",
    "count_bars": "count", "number": "number", "word": "word", "extreme": "chart", "bar_colour": "chart",
    "bar_label": "chart", "higher": "chart", "exists": "exists", "length": "length of a text", "end": "end of a text",
    "absent": "declines", "off_topic": "declines",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sight:
    """A picture as it was drawn, with questions on it."""

    scene: Scene
    image: Image.Image
    questions: tuple[Question, ...]

    def drawing(self, shape: Shape) -> Drawing:
        """Return it as the model gets it; the classes of its patches are not known."""
        nothing = np.zeros(shape.grid**2, np.int64)
        return Drawing(np.asarray(resized(self.image, shape.side)), nothing, nothing, nothing)

    def png(self) -> bytes:
        """Return a file of it."""
        file = io.BytesIO()
        self.image.save(file, "PNG")
        return file.getvalue()


def group_of(question: Question) -> str:
    """Return what a question counts as in the evaluation."""
    return _GROUPS.get(question.kind, question.kind)


def sights(count: int, seed: int, *, split: str = "heldout", other_fonts: bool = False) -> list[Sight]:
    """Draw pictures of all kinds in turn.

    Args:
        split: of the phrases.
        other_fonts: texts are in fonts that training never uses.
    """
    kinds = [kind for kind, _ in Recipe().mix]
    drawn = []
    for at in range(count):
        rng = Random(f"heldout-{seed}-{at}")
        scene = make_scene(rng, kinds[at % len(kinds)], heldout=True, easy=False)
        image, _ = paint(rng, scene, fonts=HELDOUT_FONTS if other_fonts else FONTS)
        questions: dict[str, Question] = {}
        while len(questions) < PER_PICTURE:
            question = ask(rng, scene, split)
            questions.setdefault(question.kind, question)
        drawn.append(Sight(scene, image, tuple(questions.values())))
    return drawn
