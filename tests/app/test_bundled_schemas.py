"""`chat.completions.parse` with pydantic models of one's own against the bundled model."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import openai
from pydantic import BaseModel, ValidationError

from tests.support.process import serving

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


def test_parse_with_ten_models() -> None:
    ended, right = [], []
    with serving() as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for wanted, text in ASKED:
            parsed = _parsed(client, type(wanted), text)
            ended.append(parsed is not None)
            right.append(parsed == wanted)
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
