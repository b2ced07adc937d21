"""Questions about a scene, with their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from training.books import phrase_book
from training.grammar import draw, fill
from training.noise import add_noise
from training.see.palette import COLOURS
from training.see.scenes import PLACES, SHAPES, Bar, Scene, Thing

NO_PICTURE = (
    "I am quire-nano-see. Send me a simple picture of shapes, a number, a word or a bar chart, and ask what is in it."
)
OFF_TOPIC = "I can only say what is in the picture."
_BEFORE, _STRAY = 0.1, 0.1  # shares of questions with words before them, and with a word that says nothing
_CONSONANTS = "bcdfghjklmnprstvwz"
# Other words for a colour that a user may use.
_ALSO = {"grey": "gray", "turquoise": "cyan", "purple": "violet"}


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its answer. ``kind``: the table of phrases, or what the evaluation counts it as."""

    kind: str
    text: str
    answer: str


def ask(rng: Random, scene: Scene, split: str) -> Question:
    """Ask a question about a scene. ``split`` of the phrases: train or heldout."""
    if rng.random() < 0.02:
        return _question(rng, split, "off_topic", OFF_TOPIC)
    if rng.random() < 0.03:
        return _about_other(rng, scene, split)
    while True:
        kinds = _KINDS[scene.kind]
        (asking,) = rng.choices([asking for asking, _ in kinds], [weight for _, weight in kinds])
        if question := asking(rng, scene, split):
            return question


def ask_without_picture(rng: Random, split: str) -> Question:
    """Ask something where there is no picture."""
    kind = rng.choice(("describe", "number", "word", "only", "count_all", "off_topic", "off_topic", "off_topic"))
    return _question(rng, split, kind, NO_PICTURE)


def _question(rng: Random, split: str, kind: str, answer: str, count_as: str = "", **values: str) -> Question:
    book: dict[str, Any] = phrase_book("seen")
    pattern = rng.choice(book[kind][split])
    text = _worded(rng, pattern, book) if split == "train" else draw(pattern, rng)
    # A slot may hold another: {pic}.
    text = fill(text, {"pic": rng.choice(book["pictures"]), **values})
    for name, other in _ALSO.items():
        if name in text and rng.random() < 0.3:
            text = text.replace(name, other)
    return Question(count_as or kind, text, answer)


def _worded(rng: Random, pattern: str, book: dict[str, Any]) -> str:
    """Draw a phrase of a pattern with noise, sometimes with words around it or in it that change nothing."""
    text = draw(with_parts(pattern, book), rng)
    if rng.random() < _BEFORE:
        text = f"{draw(with_parts(rng.choice(book['around']['before']), book), rng)} {text}"
    if rng.random() < _STRAY:
        words = text.split(" ")
        stray = rng.choice(book["around"]["stray"]) if rng.random() < 0.5 else _unknown_word(rng)
        words.insert(rng.randint(0, len(words)), stray)
        text = " ".join(words)
    return add_noise(text, rng)


def with_parts(pattern: str, book: dict[str, Any]) -> str:
    """Put the patterns of `parts` for the slots with their names. A part may hold others."""
    return fill(fill(pattern, book["parts"]), book["parts"])


def _unknown_word(rng: Random) -> str:
    """Make a word up, so that words the model does not know do not change what a question asks for."""
    return "".join(rng.choice(_CONSONANTS) + rng.choice("aeiou") for _ in range(rng.randint(2, 3))) + rng.choice("nrst")


def _with_article(text: str) -> str:
    return f"an {text}" if text[0] in "aeiou" else f"a {text}"


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _look(thing: Thing) -> str:
    return f"{thing.colour} {thing.shape}"


def _name(rng: Random, scene: Scene, thing: Thing) -> str:
    """A name that no other thing has: its shape alone if that is enough."""
    alone = sum(other.shape == thing.shape for other in scene.things) == 1
    return thing.shape if alone and rng.random() < 0.6 else _look(thing)


def _plural(name: str) -> str:
    return f"{name}es" if name.endswith("cross") else f"{name}s"


def _number_of(count: int, name: str) -> str:
    return f"{count} {name if count == 1 else _plural(name)}"


def _there_are(count: int, name: str) -> str:
    if count == 0:
        return f"There are no {_plural(name)}."
    return f"There {'is' if count == 1 else 'are'} {_number_of(count, name)}."


def _colour_of(rng: Random, scene: Scene, split: str) -> Question | None:
    counts = Counter(thing.shape for thing in scene.things)
    if rng.random() < 0.08:
        shape = rng.choice(SHAPES)
        if not counts[shape]:
            return _question(rng, split, "colour_of", f"There is no {shape}.", "absent", shape=shape)
    things = [thing for thing in scene.things if counts[thing.shape] == 1]
    if not things:
        return None
    thing = rng.choice(things)
    return _question(rng, split, "colour_of", f"The {thing.shape} is {thing.colour}.", shape=thing.shape)


def _shape_of(rng: Random, scene: Scene, split: str) -> Question | None:
    counts = Counter(thing.colour for thing in scene.things)
    things = [thing for thing in scene.things if counts[thing.colour] == 1]
    if not things:
        return None
    thing = rng.choice(things)
    return _question(rng, split, "shape_of", f"It is a {thing.shape}.", colour=thing.colour)


def _only(rng: Random, scene: Scene, split: str) -> Question | None:
    if len(scene.things) != 1:
        return None
    return _question(rng, split, "only", f"It is {_with_article(_look(scene.things[0]))}.")


def _only_colour(rng: Random, scene: Scene, split: str) -> Question | None:
    if len(scene.things) != 1:
        return None
    return _question(rng, split, "only_colour", f"It is {scene.things[0].colour}.")


def _place_of(rng: Random, scene: Scene, split: str) -> Question:
    thing = rng.choice(scene.things)
    name = _name(rng, scene, thing)
    return _question(rng, split, "place_of", f"The {name} is {thing.place}.", thing=name)


def _at_place(rng: Random, scene: Scene, split: str) -> Question:
    places = {thing.place: thing for thing in scene.things}
    place = rng.choice(list(places)) if rng.random() < 0.8 else rng.choice(rng.choice(PLACES))
    thing = places.get(place)
    answer = f"There is {_with_article(_look(thing)) if thing else 'nothing'}."
    return _question(rng, split, "at_place", answer, place=place)


def _relation(rng: Random, scene: Scene, split: str) -> Question | None:
    if len(scene.things) < 2:
        return None
    thing, other = rng.sample(scene.things, 2)
    kind = rng.choice(("left", "above"))
    near, far = (thing.column, other.column) if kind == "left" else (thing.row, other.row)
    if near == far:
        return None
    names = {"thing": _name(rng, scene, thing), "other": _name(rng, scene, other)}
    return _question(rng, split, kind, "Yes." if near < far else "No.", "relation", **names)


def _exists(rng: Random, scene: Scene, split: str) -> Question:
    if rng.random() < 0.5:
        thing = rng.choice(scene.things)
        shape, colour = thing.shape, thing.colour
    else:
        # Half right is wrong: the shape or the colour of a thing that is there.
        thing = rng.choice(scene.things)
        shape, colour = rng.choice(((thing.shape, rng.choice(list(COLOURS))), (rng.choice(SHAPES), thing.colour)))
    name = shape if rng.random() < 0.4 else f"{colour} {shape}"
    there = any(name in (thing.shape, _look(thing)) for thing in scene.things)
    answer = "Yes." if there else "No."
    return _question(rng, split, "exists", answer, thing=name, a_thing=_with_article(name))


def _count_all(rng: Random, scene: Scene, split: str) -> Question:
    return _question(rng, split, "count_all", _there_are(len(scene.things), "shape"))


def _count_some(rng: Random, scene: Scene, split: str) -> Question:
    thing = rng.choice(scene.things)
    name = rng.choice((thing.shape, _look(thing), f"{thing.colour} shape"))
    if rng.random() < 0.12:
        name = rng.choice((rng.choice(SHAPES), f"{rng.choice(list(COLOURS))} {thing.shape}"))
    count = sum(name in (other.shape, _look(other), f"{other.colour} shape") for other in scene.things)
    return _question(rng, split, "count_some", _there_are(count, name), shapes=_plural(name))


def _describe_shapes(rng: Random, scene: Scene, split: str) -> Question:
    text = _joined([f"{_with_article(_look(thing))} {thing.place}" for thing in scene.things])
    return _question(rng, split, "describe", f"{text[0].upper()}{text[1:]}.")


def _describe_counts(rng: Random, scene: Scene, split: str) -> Question:
    counts = Counter(_look(thing) for thing in scene.things)
    text = _joined([_number_of(count, look) for look, count in sorted(counts.items())])
    return _question(rng, split, "describe", f"{text}.")


def _read(rng: Random, scene: Scene, split: str) -> Question:
    answer = f"The number is {scene.text}." if scene.kind == "number" else f"It says {scene.text}."
    return _question(rng, split, scene.kind, answer)


def _text_values(scene: Scene) -> dict[str, str]:
    sign = "digit" if scene.kind == "number" else "letter"
    return {"text": scene.kind, "sign": sign, "signs": f"{sign}s"}


def _ink(rng: Random, scene: Scene, split: str) -> Question:
    return _question(rng, split, "ink", f"The {scene.kind} is {scene.colour}.", **_text_values(scene))


def _length(rng: Random, scene: Scene, split: str) -> Question:
    values = _text_values(scene)
    return _question(rng, split, "length", f"It has {_number_of(len(scene.text), values['sign'])}.", **values)


def _end(rng: Random, scene: Scene, split: str) -> Question:
    values = _text_values(scene)
    kind, at = rng.choice((("first", 0), ("last", -1)))
    return _question(rng, split, kind, f"The {kind} {values['sign']} is {scene.text[at]}.", "end", **values)


def _describe_text(rng: Random, scene: Scene, split: str) -> Question:
    return _question(rng, split, "describe", f"The {scene.kind} {scene.text} in {scene.colour}.")


def _count_bars(rng: Random, scene: Scene, split: str) -> Question:
    return _question(rng, split, "count_bars", _there_are(len(scene.bars), "bar"))


def _extreme(rng: Random, scene: Scene, split: str) -> Question:
    kind, pick = rng.choice((("highest", max), ("lowest", min)))
    bar: Bar = pick(scene.bars, key=lambda bar: bar.height)
    answer = f"Bar {bar.label} is the {kind}. It is {bar.colour}."
    return _question(rng, split, kind, answer, "extreme")


def _bar_colour(rng: Random, scene: Scene, split: str) -> Question:
    bar = rng.choice(scene.bars)
    return _question(rng, split, "bar_colour", f"Bar {bar.label} is {bar.colour}.", label=bar.label)


def _bar_label(rng: Random, scene: Scene, split: str) -> Question:
    bar = rng.choice(scene.bars)
    return _question(rng, split, "bar_label", f"The {bar.colour} bar is {bar.label}.", colour=bar.colour)


def _higher(rng: Random, scene: Scene, split: str) -> Question:
    bar, other = rng.sample(scene.bars, 2)
    answer = "Yes." if bar.height > other.height else "No."
    return _question(rng, split, "higher", answer, label=bar.label, other=other.label)


def _describe_chart(rng: Random, scene: Scene, split: str) -> Question:
    bars = _joined([f"{bar.label} is {bar.colour}" for bar in scene.bars])
    highest = max(scene.bars, key=lambda bar: bar.height)
    return _question(rng, split, "describe", f"A bar chart: {bars}. Bar {highest.label} is the highest.")


def _about_other(rng: Random, scene: Scene, split: str) -> Question:
    """Ask for something of another kind of scene."""
    if scene.things:
        return _question(rng, split, "any_text", "There is no text in the picture.", "absent")
    shape = rng.choice(SHAPES)
    return _question(rng, split, "colour_of", f"There is no {shape}.", "absent", shape=shape)


_Asking = Callable[[Random, Scene, str], Question | None]
_KINDS: dict[str, list[tuple[_Asking, float]]] = {
    "shapes": [(_colour_of, 3), (_shape_of, 3), (_only, 4), (_only_colour, 3), (_place_of, 2), (_at_place, 2),
               (_relation, 2), (_exists, 1.5), (_count_all, 1.5), (_count_some, 0.7), (_describe_shapes, 3)],
    "counts": [(_count_all, 2), (_count_some, 10), (_describe_counts, 2.5), (_exists, 1), (_colour_of, 0.5),
               (_shape_of, 0.5)],
    "number": [(_read, 4), (_ink, 1.5), (_length, 0.8), (_end, 0.8), (_describe_text, 2)],
    "word": [(_read, 4), (_ink, 1.5), (_length, 0.8), (_end, 0.8), (_describe_text, 2)],
    "chart": [(_count_bars, 1.5), (_extreme, 3), (_bar_colour, 2), (_bar_label, 2), (_higher, 2),
              (_describe_chart, 2)],
}  # fmt: skip
