"""Schemas of requests and answers, which pydantic makes at their first use."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.warnings import UnsupportedFieldAttributeWarning

_PACKAGE = "quire.protocol."


def defer_schemas() -> None:
    """Let pydantic make the schema of each model when something needs it: all of them take a third of a second.

    A server makes those of its endpoints once it has nothing to do; see `make_schemas`.
    """
    BaseModel.model_config["defer_build"] = True
    # FastAPI hides it while it defines a route, but the schemas of its bodies are made later now.
    warnings.simplefilter("ignore", UnsupportedFieldAttributeWarning)


async def make_schemas() -> None:
    """Make the schemas of all endpoints, so that no request has to wait for them; other tasks run in between."""
    for model in list(_unfinished(BaseModel)):
        model.model_rebuild()
        await asyncio.sleep(0)


def _unfinished(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield the models of the protocol without a schema, in the order in which they were defined."""
    for model in base.__subclasses__():
        if model.__module__.startswith(_PACKAGE) and not model.__pydantic_complete__:
            yield model
        yield from _unfinished(model)
