"""The pydantic models of the evaluation, as a newcomer writes them; training uses none of their lists of keys."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, Field


class NameAge(BaseModel):
    age: int
    first_name: str


class Human(BaseModel):
    full_name: str
    age_in_years: int
    lives_in: str


class Customer(BaseModel):
    person_name: str
    town: str
    years: int


class Citizen(BaseModel):
    first_name: str
    last_name: str
    location: str


class Resident(BaseModel):
    """Somebody who lives in a town."""

    town: str = Field(description="where the person lives")
    full_name: str = Field(description="first and last name")


class Employee(BaseModel):
    name: str
    profession: str
    age: int


class Worker(BaseModel):
    employer: str
    full_name: str
    occupation: str


class Contact(BaseModel):
    name: str
    email: str
    phone: str


class Traveller(BaseModel):
    name: str
    country: str
    language: str | None = None


class Profile(BaseModel):
    full_name: str
    years: int | None
    location: str | None


class Account(BaseModel):
    user_name: str
    email_address: str | None
    age: int | None


class Guest(BaseModel):
    guest_name: str
    is_vegetarian: bool


class Parent(BaseModel):
    name: str
    age: int
    is_married: bool


class Child(BaseModel):
    name: str
    age: int


class Family(BaseModel):
    people: list[Child]


class Villager(BaseModel):
    full_name: str
    town: str


class Village(BaseModel):
    persons: list[Villager]


class Address(BaseModel):
    street: str
    house_number: int
    city: str


class Addressee(BaseModel):
    name: str
    address: Address


class Pet(BaseModel):
    name: str
    animal: str
    age: int


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


class Book(BaseModel):
    title: str
    author: str
    year: int


class Opinion(StrEnum):
    positive = "positive"
    negative = "negative"
    neutral = "neutral"


class Review(BaseModel):
    product_name: str
    sentiment: Opinion


class Ticket(BaseModel):
    reporter: str
    priority: Literal["low", "medium", "high"]


class Purchase(BaseModel):
    customer: str
    item: str
    quantity: int


class Car(BaseModel):
    brand: str
    car_type: str


class Polyglot(BaseModel):
    name: str
    languages: list[str]


@dataclass(frozen=True)
class Heldout:
    """A model, and the facts that its keys ask for.

    Attributes:
        facts: the fact of each key; keys of nested objects are given with dots.
        about: what the texts are about; see ``records.make_record``.
        added: facts about a person that sentences of their own tell; others are in the first sentence.
        items: the key of the list that holds one object for each of several people.
    """

    model: type[BaseModel]
    facts: dict[str, str]
    about: str = "person"
    added: tuple[str, ...] = ()
    items: str | None = None

    @property
    def optional(self) -> frozenset[str]:
        """Keys whose value may be null."""
        fields = self.model.model_fields
        return frozenset(name for name, field in fields.items() if "None" in str(field.annotation))

    @property
    def told(self) -> tuple[str, ...]:
        """Facts that the first sentence about a person must have."""
        return tuple(
            {"first_name": "name", "last_name": "name"}.get(fact, fact)
            for key, fact in self.facts.items()
            if fact not in self.added and key not in self.optional
        )


HELDOUT = (
    Heldout(NameAge, {"age": "age", "first_name": "first_name"}),
    Heldout(Human, {"full_name": "name", "age_in_years": "age", "lives_in": "city"}),
    Heldout(Customer, {"person_name": "name", "town": "city", "years": "age"}),
    Heldout(Citizen, {"first_name": "first_name", "last_name": "last_name", "location": "city"}),
    Heldout(Resident, {"town": "city", "full_name": "name"}),
    Heldout(Employee, {"name": "name", "profession": "job", "age": "age"}, added=("job",)),
    Heldout(Worker, {"employer": "company", "full_name": "name", "occupation": "job"}, added=("job", "company")),
    Heldout(Contact, {"name": "name", "email": "email", "phone": "phone"}, added=("email", "phone")),
    Heldout(Traveller, {"name": "name", "country": "country", "language": "language"}, added=("country",)),
    Heldout(Profile, {"full_name": "name", "years": "age", "location": "city"}),
    Heldout(Account, {"user_name": "name", "email_address": "email", "age": "age"}),
    Heldout(Guest, {"guest_name": "name", "is_vegetarian": "vegetarian"}, added=("vegetarian",)),
    Heldout(Parent, {"name": "name", "age": "age", "is_married": "married"}, added=("married",)),
    Heldout(Family, {"name": "name", "age": "age"}, items="people"),
    Heldout(Village, {"full_name": "name", "town": "city"}, items="persons"),
    Heldout(Addressee, {"name": "name", "address.street": "street", "address.house_number": "number",
                        "address.city": "city"}, about="address"),
    Heldout(Pet, {"name": "pet_name", "animal": "animal", "age": "age"}, about="pet"),
    Heldout(CalendarEvent, {"name": "event", "date": "day", "participants": "participants"}, about="event"),
    Heldout(Book, {"title": "title", "author": "author", "year": "year"}, about="book"),
    Heldout(Review, {"product_name": "product", "sentiment": "sentiment"}, about="review"),
    Heldout(Ticket, {"reporter": "name", "priority": "urgency"}, about="ticket"),
    Heldout(Purchase, {"customer": "name", "item": "product", "quantity": "quantity"}, about="product"),
    Heldout(Car, {"brand": "brand", "car_type": "car_type"}, about="car"),
    Heldout(Polyglot, {"name": "name", "languages": "languages"}, about="polyglot"),
)  # fmt: skip
MODELS = {model.model.__name__: model.model for model in HELDOUT}
HELDOUT_KEYS = frozenset(tuple(model.facts) for model in HELDOUT)
