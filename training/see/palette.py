"""Colours by name, and which of them can be told apart."""

from __future__ import annotations

from random import Random

Rgb = tuple[int, int, int]

# Each name has shades between which a colour is drawn.
COLOURS: dict[str, tuple[Rgb, ...]] = {
    "red": ((255, 0, 0), (220, 20, 30), (190, 10, 10), (240, 50, 45)),
    "orange": ((255, 165, 0), (255, 140, 0), (245, 130, 30)),
    "yellow": ((255, 255, 0), (250, 220, 20), (255, 235, 60)),
    "green": ((0, 128, 0), (0, 170, 60), (40, 200, 60), (20, 100, 40)),
    "turquoise": ((64, 224, 208), (0, 206, 209), (30, 190, 185)),
    "blue": ((0, 0, 255), (30, 70, 220), (20, 40, 160), (65, 105, 225)),
    "purple": ((128, 0, 128), (150, 40, 180), (110, 20, 150)),
    "pink": ((255, 105, 180), (255, 150, 190), (255, 182, 193)),
    "brown": ((139, 69, 19), (120, 70, 35), (101, 60, 20)),
    "black": ((0, 0, 0), (20, 20, 25)),
    "white": ((255, 255, 255), (245, 245, 248)),
    "grey": ((128, 128, 128), (150, 150, 155), (110, 110, 112)),
}
# Backgrounds: each with the names that are too close to it.
BACKGROUNDS: tuple[tuple[Rgb, tuple[str, ...]], ...] = (
    ((255, 255, 255), ("white",)),
    ((255, 255, 255), ("white",)),
    ((248, 246, 238), ("white",)),
    ((230, 230, 232), ("white",)),
    ((210, 226, 245), ("white",)),
    ((222, 240, 222), ("white",)),
    ((252, 240, 205), ("white", "yellow")),
    ((0, 0, 0), ("black", "brown", "purple")),
    ((30, 30, 36), ("black", "brown", "purple", "blue")),
    ((25, 35, 70), ("black", "blue", "purple", "brown")),
    ((20, 60, 40), ("black", "green", "brown")),
)


def shade(rng: Random, name: str) -> Rgb:
    """Draw a shade of a colour: between two of its shades, a little off."""
    first, second = rng.choice(COLOURS[name]), rng.choice(COLOURS[name])
    share = rng.random()
    return tuple(  # type: ignore[return-value]
        max(0, min(255, round(a + (b - a) * share + rng.uniform(-5, 5)))) for a, b in zip(first, second, strict=True)
    )


def background(rng: Random, *, plain: bool) -> tuple[Rgb, tuple[str, ...]]:
    """Draw a background and return it with the names of colours that stand out. ``plain``: white."""
    colour, close = BACKGROUNDS[0] if plain else rng.choice(BACKGROUNDS)
    return colour, tuple(name for name in COLOURS if name not in close)
