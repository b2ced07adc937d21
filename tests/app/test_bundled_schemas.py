"""`chat.completions.parse` with pydantic models of one's own against the bundled model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ValidationError

from tests.support.process import ServerProcess, serving

LIMIT = 256


class Person(BaseModel):
    name: str
    age: int


class User(BaseModel):
    full_name: str
    years: int


class Inhabitant(BaseModel):
    city: str
    name: str


class Names(BaseModel):
    first_name: str
    last_name: str


class Staff(BaseModel):
    person_name: str
    profession: str


class Contact(BaseModel):
    name: str
    email: str


class Profile(BaseModel):
    name: str
    age: int | None
    country: str | None


class People(BaseModel):
    people: list[Person]


class Animal(StrEnum):
    cat = "cat"
    dog = "dog"


class Pet(BaseModel):
    name: str
    animal: Animal


class Address(BaseModel):
    street: str
    city: str


class Client(BaseModel):
    name: str
    address: Address


ASKED: list[tuple[BaseModel, str]] = [
    (Person(name="Anna", age=31), "Extract: Anna is 31 years old and lives in Oslo."),
    (User(full_name="Peter Miller", years=45), "Extract the person: Peter Miller is 45 years old."),
    (Inhabitant(city="Rome", name="Maria"), "Extract the data: Maria lives in Rome."),
    (Names(first_name="Clara", last_name="Jones"), "Extract the person: Clara Jones is 28 years old."),
    (Staff(person_name="David", profession="baker"), "Extract the person: David works as a baker."),
    (Contact(name="Anna", email="anna@mail.com"), "Extract: This is Anna. Her email is anna@mail.com."),
    (Profile(name="Hugo", age=19, country=None), "Extract the person: Hugo is 19 years old."),
    (
        People(people=[Person(name="Anna", age=31), Person(name="Ben", age=42)]),
        "Extract the people: Anna is 31 years old. Ben is 42 years old.",
    ),
    (Pet(name="Rex", animal=Animal.dog), "Extract the pet: My dog Rex is 3 years old."),
    (
        Client(name="Elena", address=Address(street="Oak Street", city="Paris")),
        "Extract the customer: Elena lives at 12 Oak Street in Paris.",
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("quire-nano") as running:
        yield running


def test_parse_with_ten_models(server: ServerProcess) -> None:
    ended, right = [], []
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for kind, text in ASKED:
            parsed = _parsed(client, type(kind), text)
            ended.append(parsed is not None)
            right.append(parsed == kind)
    assert all(ended)
    assert sum(right) >= 8


def _parsed(client: openai.OpenAI, model: type[BaseModel], text: str) -> BaseModel | None:
    """The answer as an object of the model; None if it ran on to the length limit."""
    messages: Any = [{"role": "user", "content": text}]
    try:
        answer = client.chat.completions.parse(
            model="quire-nano", messages=messages, response_format=model, temperature=0, max_tokens=LIMIT
        )
    except (openai.LengthFinishReasonError, ValidationError):
        return None
    return answer.choices[0].message.parsed


def a(**properties: Any) -> dict[str, Any]:
    """A schema of an object."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
# Schemas, and the levels of indentation that their JSON needs. Small models fill such answers with whitespace.
LEVELS: list[tuple[dict[str, Any], int]] = [
    (a(title=TEXT, year=NUMBER, tags={"type": "array", "items": TEXT}), 2),
    (a(name=TEXT, age=NUMBER, city=TEXT), 1),
    (a(a=TEXT, b=TEXT, c=TEXT), 1),
    (a(x=NUMBER, y=NUMBER, z=NUMBER), 1),
    ({"type": "object"}, 4),
    (a(list={"type": "array", "items": a(k=TEXT, v=NUMBER)}), 3),
    (a(ok={"type": "boolean"}, why=TEXT, score={"type": "number"}), 1),
    (a(kind={"enum": ["a", "b"]}, n=NUMBER, m={"type": ["null", "string"]}), 1),
    (a(list={"type": "array", "items": NUMBER}, more=a(p=a(q=TEXT))), 3),
    ({"type": "array", "items": NUMBER, "minItems": 3}, 1),
]
QUESTIONS = ["Describe a city.", "Make up a person.", "What is 27 + 58?", "List three animals.", "Write a recipe."]
_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)')


@pytest.mark.parametrize("seeds", [4, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_hot_answers_do_not_end_in_whitespace(server: ServerProcess, seeds: int) -> None:
    with server.http as client, ThreadPoolExecutor(16) as threads:

        def answer(schema: dict[str, Any], seed: int) -> str:
            form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            body = {
                "messages": [{"role": "user", "content": QUESTIONS[seed % len(QUESTIONS)]}],
                "temperature": 1, "seed": seed, "max_tokens": 128, "chat_template_kwargs": {"enable_thinking": False},
                "response_format": {"type": "json_object"} if schema == {"type": "object"} else form,
            }  # fmt: skip
            choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
            text: str = choice["message"]["content"]
            if choice["finish_reason"] == "stop":
                json.loads(text)
            return text

        asked = [(schema, levels, seed) for schema, levels in LEVELS for seed in range(seeds)]
        texts = list(threads.map(lambda question: answer(question[0], question[2]), asked))
    for (_, levels, _), text in zip(asked, texts, strict=True):
        runs = re.findall(r"\s+", _STRING.sub("S", text))
        assert all(run == " " or re.fullmatch(rf"\n( {{0,{4 * levels}}}|\t{{0,{levels}}})", run) for run in runs), text


def test_compact_json_if_that_is_wanted(server: ServerProcess) -> None:
    with server.http as client:
        for seed in range(4):
            body = {
                "messages": [{"role": "user", "content": "Make up a person."}], "temperature": 1, "seed": seed,
                "max_tokens": 64, "chat_template_kwargs": {"enable_thinking": False},
                "structured_outputs": {"json": LEVELS[1][0], "disable_any_whitespace": True},
            }  # fmt: skip
            text = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            assert not re.search(r"\s", _STRING.sub("S", text)), text
