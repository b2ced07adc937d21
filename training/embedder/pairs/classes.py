"""Words of one class, such as animals, with each other and with the name of the class."""

from __future__ import annotations

from random import Random

from training.embedder.pairs.pair import Pair, same
from training.generators.recall import with_article
from training.values import Values

VALUES = {split: Values(split, rare=0.0) for split in ("train", "heldout")}
# Names of each class, by the list of its words
CLASSES = {
    "animals": ("animal", "creature", "kind of animal", "beast"), "foods": ("food", "dish", "something to eat", "meal"),
    "drinks": ("drink", "beverage", "something to drink"), "sports": ("sport", "kind of sport", "athletic activity"),
    "hobbies": ("hobby", "pastime", "leisure activity"), "jobs": ("job", "profession", "occupation", "kind of work"),
    "instruments": ("musical instrument", "instrument", "something to make music with"),
    "languages": ("language", "tongue people speak"), "colours": ("colour", "color", "shade"),
    "countries": ("country", "nation", "state of the world"), "cities": ("city", "town", "place people live in"),
    "cars": ("vehicle", "kind of car", "means of transport"), "rooms": ("room", "part of a building"),
    "months": ("month", "part of the year"), "weekdays": ("day of the week", "weekday"),
    "first_names": ("first name", "name of a person"), "currencies": ("currency", "kind of money"),
}  # fmt: skip
ABOUT = ("{a}", "kind of {c}", "is it {a}", "which one is {a}", "name of {a}", "{c}", "an example of {a}", "{c}s")


def word_class(rng: Random, split: str) -> Pair:
    """Return a word and the name of its class, or two words of the class."""
    name = rng.choice(list(CLASSES))
    words = VALUES[split].words[name]
    text, other = rng.choice(words), rng.choice(words)
    if rng.random() < 0.5:
        label = rng.choice(CLASSES[name])
        text = rng.choice(ABOUT).replace("{a}", with_article(label)).replace("{c}", label)
    return same(text, other, [f"class {name}"])
