"""What is in a picture: things, a text, or bars of a chart. Places are shares of the picture's side."""

from __future__ import annotations

import string
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from training.books import phrase_book
from training.see.palette import Rgb, background, shade

SHAPES = ("circle", "square", "triangle", "star", "heart", "cross", "diamond", "ring")
PLACES = (
    ("at the top left", "at the top", "at the top right"),
    ("on the left", "in the middle", "on the right"),
    ("at the bottom left", "at the bottom", "at the bottom right"),
)
MOST_COUNTED = 6
LONGEST_NUMBER = 5
LABELS = "ABCDE"
_HELD_OUT = 8  # one text of so many is held out
_LARGE = 0.5  # share of large ones among scenes of one or two things
_GROUP_SIZES = {4: (0.13, 0.2), 3: (0.15, 0.27), 2: (0.2, 0.42)}  # ranges of sizes by the cells in a row
_CELLS = [(row, column) for row in range(3) for column in range(3)]


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape.

    Attributes:
        rgb: the shade that is drawn.
        x, y: centre.
        size: side of the square around it.
        turn: degrees.
        row, column: where it is among three by three places; in scenes for counting, of two to four by as many.
    """

    shape: str
    colour: str
    rgb: Rgb
    x: float
    y: float
    size: float
    turn: float
    row: int
    column: int

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return PLACES[self.row][self.column]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a chart; ``height`` as a share of the chart's."""

    label: str
    colour: str
    rgb: Rgb
    height: float


@dataclass(frozen=True, slots=True)
class Scene:
    """All of a picture.

    Attributes:
        kind: shapes, counts, number, word or chart.
        things: of shapes and counts, row by row.
        text: of a number or a word.
        colour, rgb: of the text.
        bars: of a chart, from the left.
    """

    kind: str
    background: Rgb
    things: tuple[Thing, ...] = ()
    text: str = ""
    colour: str = ""
    rgb: Rgb = (0, 0, 0)
    bars: tuple[Bar, ...] = ()


def is_held_out(text: str) -> bool:
    """Whether a number or a word is for the evaluation alone. Single digits are in both."""
    return len(text) > 1 and zlib.crc32(text.encode()) % _HELD_OUT == 0


def make_scene(rng: Random, kind: str, *, heldout: bool, easy: bool) -> Scene:
    """Draw a scene of a kind."""
    ground, names = background(rng, plain=easy)
    if kind == "shapes":
        return Scene(kind, ground, things=_spread(rng, names, easy=easy))
    if kind == "counts":
        return Scene(kind, ground, things=_groups(rng, names))
    if kind == "chart":
        return Scene(kind, ground, bars=_bars(rng, names))
    colour = rng.choice(names)
    text = _text(rng, kind, heldout=heldout, easy=easy)
    return Scene(kind, ground, text=text, colour=colour, rgb=shade(rng, colour))


def _spread(rng: Random, names: Sequence[str], *, easy: bool) -> tuple[Thing, ...]:
    """A few things, each in one of nine places. Two things differ in shape or in colour."""
    count = rng.choice((1, 1, 2, 3) if easy else (1, 1, 2, 2, 3, 3, 4, 5))
    cells = sorted(rng.sample(_CELLS, count))
    looks: list[tuple[str, str]] = []
    while len(looks) < count:
        look = rng.choice(SHAPES), rng.choice(names)
        if look not in looks:
            looks.append(look)
    size = rng.uniform(0.2, 0.26) if easy else rng.uniform(0.16, 0.26)
    if not easy and count <= 2 and rng.random() < _LARGE:
        cells, size = _large(rng, count)
    return tuple(
        _thing(rng, look, (cell[0] + 0.5) / 3, (cell[1] + 0.5) / 3, size * rng.uniform(0.85, 1.04), 0.03, cell)
        for look, cell in zip(looks, cells, strict=True)
    )


def _large(rng: Random, count: int) -> tuple[list[tuple[int, int]], float]:
    """Places and size of one or two things that are as large as they fit."""
    if count == 1 and rng.random() < 0.4:
        # What fills nearly all of a picture is in its middle.
        return [(1, 1)], rng.uniform(0.5, 0.9)
    if count == 1:
        return [rng.choice(_CELLS)], rng.uniform(0.26, 0.52)
    while True:
        first, second = cells = sorted(rng.sample(_CELLS, 2))
        if max(abs(first[0] - second[0]), abs(first[1] - second[1])) == 2:
            return cells, rng.uniform(0.26, 0.42)


def _groups(rng: Random, names: Sequence[str]) -> tuple[Thing, ...]:
    """One to six things of up to three looks, anywhere."""
    count = rng.randint(1, MOST_COUNTED)
    looks = [(rng.choice(SHAPES), rng.choice(names)) for _ in range(rng.choice((1, 2, 2, 3)))]
    if rng.random() < 0.3:
        looks = [(looks[0][0], colour) for _, colour in looks]
    grid = rng.choice((4, 4, 4, 3, 3, 2 if count <= 4 else 3))
    cells = sorted(rng.sample([(row, column) for row in range(grid) for column in range(grid)], count))
    size = rng.uniform(*_GROUP_SIZES[grid])
    return tuple(
        _thing(rng, rng.choice(looks), (cell[0] + 0.5) / grid, (cell[1] + 0.5) / grid, size, 0.025, cell)
        for cell in cells
    )


def _thing(
    rng: Random, look: tuple[str, str], y: float, x: float, size: float, shift: float, cell: tuple[int, int]
) -> Thing:
    x, y = (max(size / 2 + 0.01, min(0.99 - size / 2, value + rng.uniform(-shift, shift))) for value in (x, y))
    return Thing(look[0], look[1], shade(rng, look[1]), x, y, size, rng.uniform(-8, 8), *cell)


def _text(rng: Random, kind: str, *, heldout: bool, easy: bool) -> str:
    while True:
        if kind == "number":
            longest = 2 if easy else LONGEST_NUMBER
            text = "".join(rng.choice(string.digits) for _ in range(rng.randint(1, longest)))
        elif rng.random() < (0.3 if heldout else 0.5):
            text = rng.choice(_words())
        else:
            text = "".join(rng.choice(string.ascii_uppercase) for _ in range(rng.randint(1, 3 if easy else 6)))
        if is_held_out(text) == (heldout and len(text) > 1):
            return text


def _words() -> list[str]:
    words: list[str] = phrase_book("seen")["words"].split()
    return words


def _bars(rng: Random, names: Sequence[str]) -> tuple[Bar, ...]:
    """Bars of different colours, the highest and the lowest of which are clear."""
    count = rng.randint(2, len(LABELS))
    steps = rng.sample(range(2, 11), count)
    colours = rng.sample(list(names), count)
    return tuple(
        Bar(label, colour, shade(rng, colour), step / 10)
        for label, colour, step in zip(LABELS, colours, steps, strict=False)
    )
