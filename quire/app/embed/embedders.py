"""Embedders: a server, or a model in this process."""

from __future__ import annotations

import asyncio
import base64
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import httpx
import numpy as np
from numpy.typing import NDArray

from quire.app.openai_client import ServerError, error_text
from quire.config.commands import Embed

_TRIES = 8  # of a request that a busy server refuses
_MAX_WAIT = 30.0  # seconds until the next try
_OK, _BUSY = 200, 503
_INDEX = re.compile(r"\[(\d+)\]$")
Vectors = NDArray[np.float32]


class TextRefused(Exception):
    """A text cannot be embedded.

    Attributes:
        index: index of the text among those that were sent; None if it is not known.
    """

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        match = None if param is None else _INDEX.search(param)
        self.index = None if match is None else int(match[1])


class Embedder(Protocol):
    """Embed texts."""

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """One row for each text.

        Raises:
            TextRefused: a text cannot be embedded.
            ServerError: the server or the engine failed.
        """


class ServerEmbedder:
    """Embed with an OpenAI-compatible server. Nonstandard fields are sent only if needed."""

    def __init__(self, client: httpx.AsyncClient, settings: Embed, model: str) -> None:
        self._client = client
        fields = {"prompt_name": settings.prompt_name, "dimensions": settings.dimensions}
        self._body: dict[str, Any] = {
            "model": model,
            "encoding_format": "base64",
            **({"truncate_prompt_tokens": -1} if settings.truncate else {}),
            **{name: value for name, value in fields.items() if value is not None},
        }

    async def embed(self, texts: Sequence[str]) -> Vectors:
        answer = await self._post({**self._body, "input": list(texts)})
        try:
            data = sorted(answer.json()["data"], key=lambda row: row["index"])
            return np.stack([_vector(row["embedding"]) for row in data])
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"the response is not a list of embeddings: {error!r}") from error

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        for number in range(_TRIES):
            try:
                answer = await self._client.post("embeddings", json=body)
            except httpx.HTTPError as error:
                raise ServerError(f"{self._client.base_url}: {error!r}") from error
            if answer.status_code != _BUSY:
                break
            seconds = answer.headers.get("retry-after", "")
            await asyncio.sleep(min(_MAX_WAIT, float(seconds) if seconds.isdigit() else 2.0**number))
        if answer.status_code == _OK:
            return answer
        try:
            detail = answer.json()["error"]
            raise TextRefused(f"{answer.status_code}: {detail['message']}", detail.get("param"))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ServerError(error_text(answer)) from None


@asynccontextmanager
async def server_embedder(settings: Embed) -> AsyncIterator[Embedder]:
    """The embedder of --url.

    Raises:
        ServerError: the URL or the key is not valid, or the server has no model.
    """
    assert settings.url is not None
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    try:
        client = httpx.AsyncClient(base_url=settings.url.rstrip("/") + "/", headers=headers, timeout=settings.timeout)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise ServerError(f"invalid server URL {settings.url}: {error}") from error
    async with client:
        yield ServerEmbedder(client, settings, settings.model_name or await model_with(client, "embed"))


async def model_with(client: httpx.AsyncClient, task: str) -> str:
    """The server's first model with this task, or its first model if none lists tasks.

    Raises:
        ServerError: it lists no models.
    """
    try:
        models = (await client.get("models")).raise_for_status().json()["data"]
        named = (model for model in models if task in (model.get("tasks") or ()))
        return str(next(named, models[0])["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ServerError(f"could not list the models of {client.base_url}: {error}") from error


def new_id() -> str:
    """An id for the requests of one batch."""
    return f"embed-{uuid.uuid4().hex}"


def _vector(value: Any) -> Vectors:
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value), "<f4")
    return np.array(value, np.float32)
