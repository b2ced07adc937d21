"""Facts which the user tells and asks later in the conversation."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from training.books import phrase_book
from training.generators import telling
from training.generators.turn import Turn
from training.grammar import draw, fill
from training.noise import disturb
from training.values import Values

SPELLINGS = {"train": ("favourite", "favourite", "favorite", "fav"), "heldout": ("favourite", "favorite")}
MAIN_WEIGHTS = {"name": 6, "city": 4, "age": 4, "job": 3, "dog": 2, "cat": 2}
# Share of the questions in training that turn into ones on facts not told
EXTRA_UNTOLD = 0.1
# Facts that one question might ask for alike
TWINS = (
    {"color", "colour"}, {"film", "movie"}, {"food", "dish"}, {"day", "day of the week"}, {"dog", "cat", "pet"},
    {"sport", "sport_played"}, {"hobby"}, {"language", "language_spoken"}, {"instrument", "instrument_played"},
    {"name", "nickname", "surname", "last name", "middle name"}, {"city", "country", "dream city"},
    {"email", "email address"}, {"teacher"}, {"job", "dream job"}, {"drink"}, {"country", "trip", "dream city"},
    {"birth_month", "month"}, {"language", "learning"}, {"colour", "coat"}, {"children"}, {"favourite"},
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """One fact: where it comes from, how it is said, and its value."""

    key: str
    table: dict[str, Any]
    slots: dict[str, str]
    value: str

    def said(self) -> str:
        """The fact in the model's words: your name is Anna."""
        return fill(self.table["say"], self._values())

    def _values(self) -> dict[str, str]:
        return {**self.slots, "v": self.value, "av": with_article(self.value)}


def with_article(word: str) -> str:
    """The word after "a" or "an"."""
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


class Memory:
    """Facts of one conversation: what was told, and turns which tell and ask."""

    def __init__(self, rng: Random, values: Values, split: str = "train") -> None:
        self.rng, self.values, self.split = rng, values, split
        self.told: dict[str, Fact] = {}
        self.people = [values.draw("first_names", rng) for _ in range(2)]
        if split == "train":
            self.people = telling.pick_people(rng, self.people)

    # Which facts there are

    def _new_key(self) -> str:
        if self.split == "train":
            return telling.training_key(self.rng, self.values, self.people, MAIN_WEIGHTS)
        book, chance = phrase_book("recall"), self.rng.random()
        if chance < 0.5:
            keys: list[str] = list(book["attributes"])
            return "attributes." + self.rng.choices(keys, [MAIN_WEIGHTS.get(key, 1) for key in keys])[0]
        if chance < 0.75:
            return f"favourites.{self.rng.choice(list(book['favourites']))}"
        if chance < 0.9:
            return f"belongings.{self.rng.choice(list(book['belongings']))}"
        return f"others.{self.rng.choice(list(book['others']))}.{self.rng.choice(self.people)}"

    def _make(self, key: str) -> Fact:
        book = phrase_book("recall")
        group, _, name = key.partition(".")
        slots: dict[str, str] = {}
        if group in ("attributes", "others"):
            name, _, person = name.partition(".")
            table, kind = book[group][name], book[group][name]["values"]
            slots = {"p": person}
        elif group not in book:
            table, kind, slots = telling.training_table(key)
        else:
            table = book["favourite_phrases" if group == "favourites" else "belonging_phrases"]
            kind, slots = book[group][name], {"noun": name}
        return Fact(key, table, slots, str(self.values.draw(kind, self.rng)))

    def _clause(self, fact: Fact) -> str:
        """How the user tells the fact, slots filled except the value."""
        if self.split == "train":
            return self._training_phrase(fact, "tell").rstrip(".!")
        return fill(draw(self.rng.choice(fact.table["heldout_tell"]), self.rng), self._fixed(fact)).rstrip(".!")

    def _training_phrase(self, fact: Fact, table: str) -> str:
        """How the user tells the fact or asks for it: from a list, or put together."""
        slots = telling.as_told(self._fixed(fact))
        if table in fact.table and self.rng.random() < telling.LISTED:
            return fill(telling.listed(fact.table[table], self.rng, slots), slots)
        compose = telling.composed_clause if table == "tell" else telling.composed_question
        return telling.small_words(fill(compose(fact.key, fact.table, self.rng), slots), self.rng, self.values)

    def _fixed(self, fact: Fact) -> dict[str, str]:
        return {**fact.slots, "fav": self.rng.choice(SPELLINGS[self.split])}

    # Turns

    def tell(self, count: int = 1, update: bool = False) -> Turn:
        """The user tells one fact or several; with ``update`` an earlier one changes."""
        if update and self.told:
            facts = [self._make(self.rng.choice(list(self.told)))]
        else:
            keys: list[str] = []
            for _ in range(40):
                key = self._new_key()
                if key not in self.told and key not in keys:
                    keys.append(key)
                if len(keys) == count:
                    break
            facts = [self._make(key) for key in keys]
        self.told.update({fact.key: fact for fact in facts})
        return Turn("tell", self._tell_text(facts, update), self._acknowledge(facts))

    def _tell_text(self, facts: list[Fact], update: bool) -> str:
        joins = phrase_book("recall")["joins"][self.split]
        clauses = []
        for at, fact in enumerate(facts):
            clauses.append(fill(self._clause(fact), {"v": f"{{v{at}}}", "av": f"{{av{at}}}"}))
        text = clauses[0]
        for clause in clauses[1:]:
            text = fill(self.rng.choice(joins), {"a": text, "b": clause})
        if update:
            text = fill(self.rng.choice(phrase_book("recall")["updates"][self.split]), {"a": text})
        text = disturb(text, self.rng, self.split, frame=self.rng.random() < 0.3)
        if self.split == "train" and self.rng.random() < 0.12:
            other = disturb(telling.aside(self.rng, self.values), self.rng, frame=False).rstrip(".!")
            text = f"{other}. {text}" if self.rng.random() < 0.5 else f"{text.rstrip('.!')}. {other}"
        values = {f"v{at}": fact.value for at, fact in enumerate(facts)}
        return fill(text, values | {f"av{at}": with_article(fact.value) for at, fact in enumerate(facts)})

    def _acknowledge(self, facts: list[Fact]) -> str:
        if len(facts) == 1 and facts[0].key == "attributes.name":
            return f"Nice to meet you, {facts[0].value}."
        said = [fact.said() for fact in facts]
        return f"Noted: {', '.join(said[:-1])}{' and ' if said[:-1] else ''}{said[-1]}."

    def ask(self, known: bool = True) -> Turn:
        """The user asks for a fact: one that was told, or one that was not."""
        if self.split == "train" and known and self.rng.random() < EXTRA_UNTOLD:
            known = False
        if known and self.told:
            fact = self.told[self.rng.choice(list(self.told))]
            reply = fact.said()
            return Turn(
                "recall", self._question(fact), reply[0].upper() + reply[1:] + ".", expect={"value": fact.value}
            )
        key = self._untold_key()
        while key in self.told or self._shadowed(key):
            key = self._untold_key()
        fact = self._make(key)
        noun = fill(fact.table.get("noun", self._noun_pattern(key)), fact.slots)
        return Turn("recall", self._question(fact), f"You have not told me {noun}.", expect={"untold": True})

    def _untold_key(self) -> str:
        if self.split == "train" and self.told and self.rng.random() < 0.4:
            return telling.near_key(self.rng.choice(list(self.told)), self.rng, self.values, self.people)
        return self._new_key()

    def _noun_pattern(self, key: str) -> str:
        return "your favourite {noun}" if key.startswith("favourites") else "your {noun}"

    def _shadowed(self, key: str) -> bool:
        """Whether another told fact might answer the same question (color and colour, film and movie, a pet)."""
        last = key.split(".")[1]
        told = {other.split(".")[1] for other in self.told}
        return any(last in twin and told & twin for twin in TWINS)

    def _question(self, fact: Fact) -> str:
        if self.split == "train":
            return disturb(self._training_phrase(fact, "ask"), self.rng)
        phrase = fill(draw(self.rng.choice(fact.table["heldout_ask"]), self.rng), self._fixed(fact))
        return disturb(phrase, self.rng, self.split)

    def ask_everything(self) -> Turn:
        """The user asks what the model knows of them."""
        table = phrase_book("recall")["everything"]
        user = disturb(
            draw(self.rng.choice(table["ask" if self.split == "train" else "heldout_ask"]), self.rng),
            self.rng,
            self.split,
        )
        if not self.told:
            return Turn("everything", user, table["nothing"])
        said = ", ".join(fact.said() for fact in self.told.values())
        return Turn(
            "everything",
            user,
            fill(table["say"], {"facts": said}),
            expect={"values": [f.value for f in self.told.values()]},
        )

    def tell_and_ask(self) -> Turn:
        """A fact and a question about it in one message."""
        told = self.tell()
        asked = self.ask()
        gap = " " if told.user[-1:] in ".!?" else self.rng.choice((". ", ", "))
        return Turn("recall", told.user + gap + asked.user, asked.reply, expect=asked.expect)
