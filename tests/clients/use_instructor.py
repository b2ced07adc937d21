"""The instructor library."""
# needs: instructor>=1.17,<2

from __future__ import annotations

import instructor
import openai
from pydantic import BaseModel, ConfigDict
from questions import DEGREES, MODEL, SUM, TOTAL, URL, WEATHER, get_weather

plain = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)


class Sum(BaseModel):
    """A sum."""

    model_config = ConfigDict(extra="forbid")  # without it, a model this small keeps adding properties

    total: int


class GetWeather(BaseModel):
    """Get the weather of a city."""

    city: str


def ask(mode, response_model, content, **options):
    client = instructor.from_openai(plain, mode=mode)
    return client.chat.completions.create(
        model=MODEL,
        response_model=response_model,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        **options,
    )


assert TOTAL in ask(instructor.Mode.TOOLS, None, SUM).choices[0].message.content
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    assert isinstance(ask(mode, Sum, SUM), Sum)

partial = list(ask(instructor.Mode.JSON_SCHEMA, instructor.Partial[Sum], SUM, stream=True))
assert isinstance(partial[-1].total, int)

call = ask(instructor.Mode.TOOLS, GetWeather, WEATHER)
assert DEGREES in get_weather(call.city)
