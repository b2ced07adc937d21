"""The text generators: the same seed gives the same text, and training never uses held-out text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from pydantic import BaseModel

from training.books import phrase_book, words
from training.generators.arithmetic import composed_request, is_heldout, steps
from training.generators.compose import is_heldout_phrase
from training.generators.conversations import THEMES, make_conversation
from training.generators.knowledge import facts, fallback_turn, quire_turn, small_talk_turn
from training.generators.questions import WEIGHTS, composed_question, question_contents
from training.generators.schemas import Field, schema_of, schema_turn
from training.generators.tool_specs import read_specs
from training.generators.turn import Turn
from training.grammar import all_phrases, draw, slots_of
from training.heldout import KINDS, cases
from training.heldout_models import HELDOUT_KEYS, MODELS
from training.values import Values

SHARED_LISTS = {"months", "weekdays", "seasons"}


def normal(phrase: str) -> str:
    return re.sub(r"[^\w{}+*/=-]+", " ", phrase.lower()).strip()


def phrasings(patterns: list[str]) -> set[str]:
    return {normal(phrase) for pattern in patterns for phrase in all_phrases(pattern)}


@pytest.mark.parametrize("theme", [*THEMES, "arithmetic_direct"])
def test_same_seed_same_conversation(theme: str) -> None:
    first, second = (make_conversation(theme, Random("a")) for _ in range(2))
    assert first == second
    assert make_conversation(theme, Random("b")) != first


@pytest.mark.parametrize("kind", list(KINDS))
def test_evaluation_prompts_are_repeatable_and_distinct(kind: str) -> None:
    first, second = cases(kind, 20, seed=3), cases(kind, 20, seed=3)
    assert first == second
    assert len({str(case.messages) for case in first}) == len(first)


def test_grammar() -> None:
    assert set(all_phrases("(what is|what's) {a} (now|)")) == {
        "what is {a} now",
        "what is {a}",
        "what's {a} now",
        "what's {a}",
    }
    assert all_phrases("{name} ({age}) of x") == ["{name} ({age}) of x"]
    assert set(all_phrases("a (b|c (d|e))")) == {"a b", "a c d", "a c e"}
    assert draw("a (b|c)", Random(1)) in ("a b", "a c")
    with pytest.raises(ValueError, match="unbalanced"):
        all_phrases("a (b|c")


@pytest.mark.parametrize("section", ["add", "sub", "sub_reversed", "unsupported"])
def test_heldout_arithmetic_phrasings(section: str) -> None:
    table = phrase_book("arithmetic")[section]
    assert not phrasings(table["train"]) & phrasings(table["heldout"])


def test_heldout_quire_phrasings() -> None:
    trained, heldout = set(), set()
    for table in phrase_book("quire").values():
        trained |= phrasings([*table.get("ask", []), *table.get("train", [])])
        heldout |= phrasings(table.get("heldout", []))
    assert len(heldout) > 200
    assert not trained & heldout


def test_heldout_talk_phrasings() -> None:
    for table in phrase_book("small_talk").values():
        assert not phrasings(table["ask"]) & phrasings(table["heldout"])
    for section in ("ask", "unknown_quire"):
        table = phrase_book("fallback")[section]
        assert not phrasings(table["train"]) & phrasings(table["heldout"])


@pytest.mark.parametrize(
    ("book", "make"),
    [("quire", quire_turn), ("fallback", fallback_turn), ("small_talk", small_talk_turn)],
)
def test_composed_phrases_are_not_heldout_ones(book: str, make: Callable[[Random], Turn]) -> None:
    rng = Random(2)
    made = {normal(make(rng).user) for _ in range(3000)}
    assert len(made) > 800
    assert not made & heldout_of(phrase_book(book))


@pytest.mark.parametrize("section", ["add", "sub", "unsupported"])
def test_composed_sums_are_not_heldout_ones(section: str) -> None:
    rng = Random(3)
    made = {normal(composed_request(rng, section)) for _ in range(3000)}
    assert len(made) > 1000
    assert not made & heldout_of(phrase_book("arithmetic"))


def heldout_of(table: dict[str, Any]) -> set[str]:
    phrases: set[str] = set()
    for name, value in table.items():
        if isinstance(value, dict):
            phrases |= heldout_of(value)
        elif name == "heldout":
            phrases |= phrasings(value)
    return phrases


def test_heldout_phrases_are_recognised() -> None:
    for book in ("quire", "fallback", "small_talk", "arithmetic"):
        assert all(is_heldout_phrase(phrase, book) for phrase in heldout_of(phrase_book(book)))


def test_every_fact_has_many_questions() -> None:
    rng = Random(4)
    for fact, table in facts().items():
        flag = table.get("flag")
        assert set(question_contents(fact, flag)) <= set(WEIGHTS), fact
        made = [composed_question(fact, flag, rng) for _ in range(200)]
        assert len(set(made)) > 150, fact
        assert not any(re.search(r"\{\w*\}|\|", phrase.replace("/{id}", "")) for phrase in made), fact


def test_composed_sums_keep_their_numbers() -> None:
    rng = Random(5)
    for section in ("add", "sub"):
        for _ in range(2000):
            assert sorted(slots_of(composed_request(rng, section))) == ["a", "b"]


def test_heldout_recall_phrasings() -> None:
    book = phrase_book("recall")
    tables = [
        *book["attributes"].values(),
        *book["others"].values(),
        book["favourite_phrases"],
        book["belonging_phrases"],
    ]
    for table in tables:
        assert not phrasings(table["tell"]) & phrasings(table["heldout_tell"])
        assert not phrasings(table["ask"]) & phrasings(table["heldout_ask"])


def test_heldout_extract_phrasings() -> None:
    for table in phrase_book("extract").values():
        assert not phrasings(table["train"]) & phrasings(table["heldout"])


def test_heldout_words() -> None:
    train, heldout = words("train"), words("heldout")
    for name in ("first_names", "surnames", "cities", "pet_names", "jobs", "titles", "nouns", "colours", "foods"):
        assert len(heldout[name]) >= 10
    for name in set(train) - SHARED_LISTS:
        assert not set(map(str.lower, train[name])) & set(map(str.lower, heldout[name])), name


def test_heldout_tools() -> None:
    train = {name for spec in read_specs("train") for name in spec.names}
    heldout = {name for spec in read_specs("heldout") for name in spec.names}
    assert len(train) > 300
    assert len(heldout) > 30
    assert not train & heldout


def test_training_sums_are_not_held_out() -> None:
    rng = Random(1)
    for _ in range(300):
        conversation = make_conversation("arithmetic", rng)
        match = re.match(r"(\d+)[+-](\d+):", conversation.think)
        assert not match or not is_heldout(int(match[1]), int(match[2]))


@pytest.mark.parametrize(
    ("a", "b", "minus", "expected"),
    [
        (27, 58, False, "27+58: 7+8=15, 2+5+1=8 -> 85"),
        (4, 5, False, "4+5: 4+5=9 -> 9"),
        (90, 17, True, "90-17: 10-7=3, 9-1-1=7 -> 73"),
        (17, 90, True, "17-90: 17<90, 90-17: 10-7=3, 9-1-1=7 -> -73"),
        (58, 51, True, "58-51: 8-1=7, 5-5=0 -> 7"),
    ],
)
def test_scratch_steps(a: int, b: int, minus: bool, expected: str) -> None:
    assert steps(a, b, minus) == expected


def test_scratch_steps_are_correct() -> None:
    for a in range(0, 100, 7):
        for b in range(100):
            for minus in (False, True):
                text = steps(a, b, minus)
                for left, right in re.findall(r"(?<!\d)(\d+(?:[+-]\d+)+)=(\d+)", text):
                    assert sum(int(part) for part in re.findall(r"[+-]?\d+", left)) == int(right)
                assert text.endswith(f"-> {a - b if minus else a + b}")


def test_heldout_texts_of_records() -> None:
    book = phrase_book("records")
    tables = [book["base"], *book["more"].values(), *book["yes"].values(), *book["no"].values()]
    for table in [*tables, *book["things"].values(), *book["asks"].values()]:
        assert not phrasings(table["train"]) & phrasings(table["heldout"])
    for table in [*book["keys"].values(), *book["words"].values()]:
        assert not set(table["train"]) & set(table["heldout"])


def test_answers_of_schemas() -> None:
    rng, values = Random(6), Values("train")
    hidden = 0
    for _ in range(800):
        turn = schema_turn(rng, values)
        answer = json.loads(turn.reply)
        assert answer == turn.expect["json"]
        assert "{" + "text}" not in turn.user
        assert not isinstance(answer, dict) or tuple(answer) not in HELDOUT_KEYS
        hidden += bool(turn.given)
        for start, stop in turn.given:
            assert turn.reply[start:stop] == turn.reply[:1] or re.fullmatch(r'\w+|": "?', turn.reply[start:stop])
    assert 400 < hidden < 700


def test_schemas_in_requests_are_those_of_pydantic() -> None:
    fields = [Field("name", "full_name", "string", False), Field("age", "years", "integer", True)]
    shape = {"title": "People", "fields": [("people", {"items": {"title": "Person", "fields": fields}})]}

    class Person(BaseModel):
        full_name: str
        years: int | None

    class People(BaseModel):
        people: list[Person]

    made = schema_of(shape, Random(2))
    assert made == People.model_json_schema()


def test_texts_of_the_evaluation_tell_what_the_models_require() -> None:
    for case in cases("schema", 96, seed=5):
        model = MODELS[case.expect["model"]]
        assert model.model_validate(case.expect["answer"])
        assert case.schema is not None
        assert case.schema["title"] == model.__name__
