"""Draws scenes, and says what each patch of a picture shows."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from training.see.palette import COLOURS, Rgb, background, shade
from training.see.recipe import Shape
from training.see.scenes import SHAPES, Scene, Thing, is_held_out

Pixels = NDArray[np.uint8]
Classes = NDArray[np.int64]
Box = tuple[float, float, float, float]  # left, top, right, bottom
# Fonts of matplotlib; an empty name is the font that pillow brings.
FONTS = ("", "", "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSerif",
         "DejaVuSerif-Bold", "STIXGeneral", "STIXGeneralBol", "cmss10")  # fmt: skip
EASY_FONTS = ("", "DejaVuSans", "DejaVuSans-Bold")
HELDOUT_FONTS = ("DejaVuSansMono-Bold", "STIXGeneralItalic", "DejaVuSerif-BoldItalic")
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WHAT = ("nothing", "bar", *SHAPES, *CHARACTERS)  # classes of a patch
WHICH = ("nothing", *COLOURS)
_CROWD_TEXT = 0.65  # share of texts among what a crowded picture shows
_SIDES = ((96, 224), (96, 224), (96, 224), (224, 400))  # ranges of the width before the picture is resized


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture as the model gets it.

    Attributes:
        pixels: (side, side, 3).
        what, which, middle: classes of the patches: what they show, in which colour, and whether the middle of a thing,
            a character or a bar is in them; (patches,).
    """

    pixels: Pixels
    what: Classes
    which: Classes
    middle: Classes


class _Canvas:
    """A picture that is being drawn, with the boxes of what is on it, in shares of its sides."""

    def __init__(self, width: int, height: int, ground: Rgb) -> None:
        self.image = Image.new("RGB", (width, height), ground)
        self.pen = ImageDraw.Draw(self.image)
        self.width, self.height = width, height
        self.boxes: list[tuple[Box, str, str]] = []

    def mark(self, box: Box, what: str, which: str) -> None:
        """Note what is in a box of pixels."""
        left, top, right, bottom = box
        self.boxes.append(
            ((left / self.width, top / self.height, right / self.width, bottom / self.height), what, which)
        )


@lru_cache(maxsize=200)
def font_of(name: str, size: int) -> ImageFont.FreeTypeFont:
    """Return a font at a size in pixels."""
    if not name:
        font = ImageFont.load_default(size)
        if not isinstance(font, ImageFont.FreeTypeFont):
            raise TypeError("pillow was built without FreeType, which draws text")
        return font
    return ImageFont.truetype(str(Path(mpl.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"), size)


def draw(rng: Random, scene: Scene, shape: Shape, *, easy: bool, fonts: tuple[str, ...] = FONTS) -> Drawing:
    """Draw a scene and resize it as a server does."""
    image, boxes = paint(rng, scene, easy=easy, fonts=fonts)
    return Drawing(np.asarray(resized(image, shape.side)), *_classes(boxes, shape.grid))


def paint(
    rng: Random, scene: Scene, *, easy: bool = False, fonts: tuple[str, ...] = FONTS
) -> tuple[Image.Image, list[tuple[Box, str, str]]]:
    """Draw a scene at some size. Return it with boxes, in shares of its sides, of what is in it in which colour.

    Args:
        easy: it is square, its text is large, and nothing disturbs it.
    """
    width = rng.randint(*rng.choice(_SIDES))
    height = width if easy or rng.random() < 0.5 else round(width * rng.uniform(0.75, 1.33))
    canvas = _Canvas(width, height, scene.background)
    for thing in scene.things:
        _paint_thing(canvas, thing)
    if scene.text:
        _paint_text(rng, canvas, scene, rng.choice(EASY_FONTS if easy else fonts), easy=easy)
    if scene.bars:
        _paint_chart(rng, canvas, scene, rng.choice(fonts))
    return canvas.image if easy else _disturbed(canvas.image, rng), canvas.boxes


def draw_crowd(rng: Random, shape: Shape) -> tuple[Drawing, list[list[tuple[str, str]]]]:
    """Draw rows of shapes, characters and short texts in many sizes and colours.

    Return the drawing and, of each row, the colours and the names or texts of what it shows.
    """
    ground, names = background(rng, plain=False)
    width = rng.randint(*rng.choice(_SIDES))
    canvas = _Canvas(width, round(width * rng.choice((1.0, rng.uniform(0.75, 1.33)))), ground)
    rows: list[list[tuple[str, str]]] = []
    top = 0.05 * rng.random() * canvas.height
    while (tall := rng.uniform(0.12, 0.4) * canvas.height) + top < canvas.height:
        rows.append([])
        left = 0.1 * rng.random() * canvas.width
        while left + 0.5 * tall < canvas.width:
            colour = rng.choice(names)
            ink = shade(rng, colour)
            if rng.random() < _CROWD_TEXT:
                shown, right = _crowd_text(rng, canvas, (left, top), tall, ink, colour)
            else:
                shown = rng.choice(SHAPES)
                size = min(tall, canvas.width - left)
                right = left + size
                x, y = (left + size / 2) / canvas.width, (top + size / 2) / canvas.height
                share = size / min(canvas.width, canvas.height)
                _paint_thing(canvas, Thing(shown, colour, ink, x, y, share, rng.uniform(-8, 8), 0, 0))
            if shown:
                rows[-1].append((colour, shown))
            left = right + rng.uniform(0.15, 0.6) * tall
        top += tall * rng.uniform(1.05, 1.4)
    image = _disturbed(canvas.image, rng)
    return Drawing(np.asarray(resized(image, shape.side)), *_classes(canvas.boxes, shape.grid)), rows


def _crowd_text(
    rng: Random, canvas: _Canvas, place: tuple[float, float], tall: float, ink: Rgb, colour: str
) -> tuple[str, float]:
    """Write a text of a height at a place. Return what of it fits, which may be nothing, and where it ends."""
    text = "".join(rng.choices(CHARACTERS[:10] if rng.random() < 0.5 else CHARACTERS[10:], k=rng.randint(1, 4)))
    name = rng.choice(FONTS)
    _, top, _, bottom = font_of(name, 100).getbbox(text)
    font = font_of(name, max(8, int(100 * tall / (bottom - top))))
    while text and (is_held_out(text) or place[0] + font.getlength(text) > canvas.width):
        text = text[:-1]
    if not text:
        return "", canvas.width
    left, top, right, _ = font.getbbox(text)
    _write(canvas, (place[0] - left, place[1] - top), text, font, ink, colour)
    return text, place[0] + right - left


def _disturbed(image: Image.Image, rng: Random) -> Image.Image:
    """Add noise to some pictures, and what JPEG leaves out to some."""
    if rng.random() < 0.12:
        image = _with_noise(image, rng)
    if rng.random() < 0.12:
        image = _as_jpeg(image, rng.randint(60, 95))
    return image


def _with_noise(image: Image.Image, rng: Random) -> Image.Image:
    generator = np.random.default_rng(rng.getrandbits(32))
    pixels = np.asarray(image)
    noise = generator.standard_normal(pixels.shape, np.float32) * rng.uniform(2, 14)
    return Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))


def resized(image: Image.Image, side: int) -> Image.Image:
    """Resize as the image processor of the exported folder: the longer edge first, then to a square."""
    width, height = image.size
    if width >= height:
        size = side, max(1, int(side / (width / height)))
    else:
        size = max(1, int(side * (width / height))), side
    size = size[0] + size[0] % 2, size[1] + size[1] % 2
    return image.resize(size, Image.Resampling.LANCZOS).resize((side, side), Image.Resampling.LANCZOS)


def _as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def _classes(boxes: list[tuple[Box, str, str]], grid: int) -> tuple[Classes, Classes, Classes]:
    """Classes of the patches: of those whose centres are in the boxes, and of those that hold the middle of a box.

    Args:
        grid: patches in a row.
    """
    what, which, middle = (np.zeros((grid, grid), np.int64) for _ in range(3))
    for (left, top, right, bottom), kind, colour in boxes:
        columns = slice(max(0, math.ceil(left * grid - 0.5)), max(0, math.ceil(right * grid - 0.5)))
        rows = slice(max(0, math.ceil(top * grid - 0.5)), max(0, math.ceil(bottom * grid - 0.5)))
        what[rows, columns] = WHAT.index(kind)
        which[rows, columns] = WHICH.index(colour)
        middle[min(grid - 1, int((top + bottom) / 2 * grid)), min(grid - 1, int((left + right) / 2 * grid))] = 1
    return what.reshape(-1), which.reshape(-1), middle.reshape(-1)


def _paint_thing(canvas: _Canvas, thing: Thing) -> None:
    # A square around it in pixels, so that it keeps its proportions.
    side = thing.size * min(canvas.width, canvas.height)
    x, y = thing.x * canvas.width, thing.y * canvas.height
    half = side / 2
    box = (x - half, y - half, x + half, y + half)
    if thing.shape == "circle":
        canvas.pen.ellipse(box, fill=thing.rgb)
    elif thing.shape == "ring":
        canvas.pen.ellipse(box, outline=thing.rgb, width=max(2, round(side * 0.2)))
    else:
        corners = OUTLINES[thing.shape]
        angle = math.radians(thing.turn)
        cos, sin = math.cos(angle), math.sin(angle)
        canvas.pen.polygon(
            [(x + half * (cos * a - sin * b), y + half * (sin * a + cos * b)) for a, b in corners], fill=thing.rgb
        )
    canvas.mark(box, thing.shape, thing.colour)


def _star() -> list[tuple[float, float]]:
    corners = []
    for corner in range(10):
        radius = 1.08 if corner % 2 == 0 else 0.45
        angle = math.pi * (corner / 5 - 0.5)
        corners.append((radius * math.cos(angle), radius * math.sin(angle) + 0.08))
    return corners


def _heart() -> list[tuple[float, float]]:
    corners = []
    for step in range(36):
        angle = 2 * math.pi * step / 36
        x = 16 * math.sin(angle) ** 3
        y = 13 * math.cos(angle) - 5 * math.cos(2 * angle) - 2 * math.cos(3 * angle) - math.cos(4 * angle)
        corners.append((x / 16, -(y + 2.5) / 14.8))
    return corners


_ARM = 0.34  # half the breadth of an arm of a cross
# Corners of the shapes in a square from -1 to 1; y grows downwards.
OUTLINES: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.92, -0.92), (0.92, -0.92), (0.92, 0.92), (-0.92, 0.92)],
    "triangle": [(0, -0.95), (1, 0.85), (-1, 0.85)],
    "diamond": [(0, -1.08), (0.78, 0), (0, 1.08), (-0.78, 0)],
    "cross": [(-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM), (_ARM, 1), (-_ARM, 1),
              (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM)],
    "star": _star(),
    "heart": _heart(),
}  # fmt: skip


def _paint_text(rng: Random, canvas: _Canvas, scene: Scene, font_name: str, *, easy: bool) -> None:
    """Draw the text as large as it fits, or smaller, somewhere."""
    text = scene.text
    base = font_of(font_name, 100)
    left, top, right, bottom = base.getbbox(text)
    fitting = min(0.9 * canvas.width / (right - left), 0.8 * canvas.height / (bottom - top))
    # A character has to keep some pixels when the picture is resized.
    least, tallest = 0.14, 0.6 if len(text) == 1 else 0.45
    height = rng.uniform(0.2, 0.3) if easy else rng.uniform(least, max(least, tallest))
    size = max(8, int(100 * min(fitting, height * canvas.height / (bottom - top))))
    font = font_of(font_name, size)
    left, top, right, bottom = font.getbbox(text)
    x = rng.uniform(0.02 * canvas.width, max(0.03 * canvas.width, 0.98 * canvas.width - (right - left))) - left
    y = rng.uniform(0.02 * canvas.height, max(0.03 * canvas.height, 0.98 * canvas.height - (bottom - top))) - top
    _write(canvas, (x, y), text, font, scene.rgb, scene.colour)


def _write(
    canvas: _Canvas, place: tuple[float, float], text: str, font: ImageFont.FreeTypeFont, ink: Rgb, colour: str
) -> None:
    """Write a text from a place on, and mark its characters."""
    canvas.pen.text(place, text, font=font, fill=ink)
    _, top, _, bottom = font.getbbox(text)
    for at, character in enumerate(text):
        start, end = font.getlength(text[:at]), font.getlength(text[: at + 1])
        box = (place[0] + start, place[1] + top, place[0] + end, place[1] + bottom)
        canvas.mark(box, character, colour)


def _paint_chart(rng: Random, canvas: _Canvas, scene: Scene, font_name: str) -> None:
    """Draw bars on a line, with their labels under it."""
    width, height = canvas.width, canvas.height
    dark = sum(scene.background) < 300
    ink = (235, 235, 235) if dark else (20, 20, 20)
    left, right = 0.08 * width, 0.97 * width
    line, tallest = 0.8 * height, rng.uniform(0.62, 0.74) * height
    step = (right - left) / len(scene.bars)
    breadth = step * rng.uniform(0.5, 0.8)
    font = font_of(font_name, max(8, int(0.14 * height)))
    for at, bar in enumerate(scene.bars):
        middle = left + step * (at + 0.5)
        box = (middle - breadth / 2, line - tallest * bar.height, middle + breadth / 2, line)
        canvas.pen.rectangle(box, fill=bar.rgb)
        canvas.mark(box, "bar", bar.colour)
        start, top, end, _ = font.getbbox(bar.label)
        place = (middle - (start + end) / 2, line + 0.03 * height - top)
        _write(canvas, place, bar.label, font, ink, "white" if dark else "black")
    thick = max(1, round(height / 96))
    canvas.pen.line((0.04 * width, line, right, line), fill=ink, width=thick)
    if rng.random() < 0.6:
        canvas.pen.line((0.04 * width, 0.04 * height, 0.04 * width, line), fill=ink, width=thick)
