"""Facts that the user states and asks for later in the conversation."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from training.books import phrase_book
from training.generators import recall_phrases
from training.generators.turn import Turn
from training.grammar import draw, fill
from training.noise import add_noise
from training.values import Values

SPELLINGS = {"train": ("favourite", "favourite", "favorite", "fav"), "heldout": ("favourite", "favorite")}
MAIN_WEIGHTS = {"name": 6, "city": 4, "age": 4, "job": 3, "dog": 2, "cat": 2}
# Share of the training questions that are changed to ask for a fact that was not stated
EXTRA_UNTOLD_RATE = 0.1
# Groups of facts that the same question might ask for
SIMILAR_FACTS = (
    {"color", "colour"}, {"film", "movie"}, {"food", "dish"}, {"day", "day of the week"}, {"dog", "cat", "pet"},
    {"sport", "sport_played"}, {"hobby"}, {"language", "language_spoken"}, {"instrument", "instrument_played"},
    {"name", "nickname", "surname", "last name", "middle name"}, {"city", "country", "dream city"},
    {"email", "email address"}, {"teacher"}, {"job", "dream job"}, {"drink"}, {"country", "trip", "dream city"},
    {"birth_month", "month"}, {"language", "learning"}, {"colour", "coat"}, {"children"}, {"favourite"},
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """One fact: its key, its phrases, the values of their slots, and the value of the fact."""

    key: str
    table: dict[str, Any]
    slots: dict[str, str]
    value: str

    def statement(self) -> str:
        """Return the statement in the model's replies: your name is Anna."""
        return fill(self.table["say"], self._values())

    def _values(self) -> dict[str, str]:
        return {**self.slots, "v": self.value, "av": with_article(self.value)}


def with_article(word: str) -> str:
    """Return the word preceded by "a" or "an"."""
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


class Memory:
    """The facts stated in one conversation, and turns that state and ask for them."""

    def __init__(self, rng: Random, values: Values, split: str = "train") -> None:
        self.rng, self.values, self.split = rng, values, split
        self.told: dict[str, Fact] = {}
        self.people = [values.draw("first_names", rng) for _ in range(2)]
        if split == "train":
            self.people = recall_phrases.pick_people(rng, self.people)

    # Keys and facts

    def _new_key(self) -> str:
        if self.split == "train":
            return recall_phrases.training_key(self.rng, self.values, self.people, MAIN_WEIGHTS)
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
            table, kind, slots = recall_phrases.training_table(key)
        else:
            table = book["favourite_phrases" if group == "favourites" else "belonging_phrases"]
            kind, slots = book[group][name], {"noun": name}
        return Fact(key, table, slots, str(self.values.draw(kind, self.rng)))

    def _statement(self, fact: Fact) -> str:
        """Return the user's statement of the fact, with all slots filled except the value."""
        if self.split == "train":
            return self._training_phrase(fact, "tell").rstrip(".!")
        return fill(
            draw(self.rng.choice(fact.table["heldout_tell"]), self.rng), self._slots_without_value(fact)
        ).rstrip(".!")

    def _training_phrase(self, fact: Fact, table: str) -> str:
        """Return the user's statement of the fact or question for it, from a list or composed."""
        slots = recall_phrases.to_first_person(self._slots_without_value(fact))
        if table in fact.table and self.rng.random() < recall_phrases.LISTED_RATE:
            return fill(recall_phrases.draw_listed(fact.table[table], self.rng, slots), slots)
        compose = recall_phrases.composed_statement if table == "tell" else recall_phrases.composed_question
        return recall_phrases.fill_common_slots(
            fill(compose(fact.key, fact.table, self.rng), slots), self.rng, self.values
        )

    def _slots_without_value(self, fact: Fact) -> dict[str, str]:
        return {**fact.slots, "fav": self.rng.choice(SPELLINGS[self.split])}

    # Turns

    def tell(self, count: int = 1, update: bool = False) -> Turn:
        """Return a turn in which the user states one or more facts; with ``update``, an earlier fact changes."""
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
            clauses.append(fill(self._statement(fact), {"v": f"{{v{at}}}", "av": f"{{av{at}}}"}))
        text = clauses[0]
        for clause in clauses[1:]:
            text = fill(self.rng.choice(joins), {"a": text, "b": clause})
        if update:
            text = fill(self.rng.choice(phrase_book("recall")["updates"][self.split]), {"a": text})
        text = add_noise(text, self.rng, self.split, frame=self.rng.random() < 0.3)
        if self.split == "train" and self.rng.random() < 0.12:
            other = add_noise(recall_phrases.unrelated_sentence(self.rng, self.values), self.rng, frame=False).rstrip(
                ".!"
            )
            text = f"{other}. {text}" if self.rng.random() < 0.5 else f"{text.rstrip('.!')}. {other}"
        values = {f"v{at}": fact.value for at, fact in enumerate(facts)}
        return fill(text, values | {f"av{at}": with_article(fact.value) for at, fact in enumerate(facts)})

    def _acknowledge(self, facts: list[Fact]) -> str:
        if len(facts) == 1 and facts[0].key == "attributes.name":
            return f"Nice to meet you, {facts[0].value}."
        statements = [fact.statement() for fact in facts]
        return f"Noted: {', '.join(statements[:-1])}{' and ' if statements[:-1] else ''}{statements[-1]}."

    def ask(self, known: bool = True) -> Turn:
        """Return a turn in which the user asks for a fact that was stated (``known``) or not."""
        if self.split == "train" and known and self.rng.random() < EXTRA_UNTOLD_RATE:
            known = False
        if known and self.told:
            fact = self.told[self.rng.choice(list(self.told))]
            reply = fact.statement()
            return Turn(
                "recall", self._question(fact), reply[0].upper() + reply[1:] + ".", expect={"value": fact.value}
            )
        key = self._untold_key()
        while key in self.told or self._is_ambiguous(key):
            key = self._untold_key()
        fact = self._make(key)
        noun = fill(fact.table.get("noun", self._noun_pattern(key)), fact.slots)
        return Turn("recall", self._question(fact), f"You have not told me {noun}.", expect={"untold": True})

    def _untold_key(self) -> str:
        if self.split == "train" and self.told and self.rng.random() < 0.4:
            return recall_phrases.similar_key(self.rng.choice(list(self.told)), self.rng, self.values, self.people)
        return self._new_key()

    def _noun_pattern(self, key: str) -> str:
        return "your favourite {noun}" if key.startswith("favourites") else "your {noun}"

    def _is_ambiguous(self, key: str) -> bool:
        """Whether another stated fact might answer the same question (color and colour, film and movie, a pet)."""
        last = key.split(".")[1]
        told = {other.split(".")[1] for other in self.told}
        return any(last in group and told & group for group in SIMILAR_FACTS)

    def _question(self, fact: Fact) -> str:
        if self.split == "train":
            return add_noise(self._training_phrase(fact, "ask"), self.rng)
        phrase = fill(draw(self.rng.choice(fact.table["heldout_ask"]), self.rng), self._slots_without_value(fact))
        return add_noise(phrase, self.rng, self.split)

    def ask_everything(self) -> Turn:
        """Return a turn in which the user asks for everything the model knows about them."""
        table = phrase_book("recall")["everything"]
        user = add_noise(
            draw(self.rng.choice(table["ask" if self.split == "train" else "heldout_ask"]), self.rng),
            self.rng,
            self.split,
        )
        if not self.told:
            return Turn("everything", user, table["nothing"])
        statements = ", ".join(fact.statement() for fact in self.told.values())
        return Turn(
            "everything",
            user,
            fill(table["say"], {"facts": statements}),
            expect={"values": [f.value for f in self.told.values()]},
        )

    def tell_and_ask(self) -> Turn:
        """Return a turn with a statement and a question in one message."""
        told = self.tell()
        asked = self.ask()
        gap = " " if told.user[-1:] in ".!?" else self.rng.choice((". ", ", "))
        return Turn("recall", told.user + gap + asked.user, asked.reply, expect=asked.expect)
